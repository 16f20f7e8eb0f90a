"""Why there is no schedule: the true reason is named, and its figures can be asked for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from xgpt.cli.main import cli
from xgpt.core.errors import InfeasibleError

LARGE = """
model: llama-3.1-405b
cluster: {num_nodes: NODES, devices_per_node: 8, device: H200, intra_link: nvlink4,
          inter_link: ib-400g}
workload: {requests: {count: 400}, input_tokens: {mean: 50, std: 10, max: 100},
           output_tokens: {mean: 900, std: 200, max: 1500}}
schedule: {policy: waa-c, tp_degree: 8, tp_gpus: GPUS}
"""


def refused(tmp_path: Path, nodes: int) -> str:
    job = tmp_path / "job.yaml"
    job.write_text(LARGE.replace("NODES", str(nodes)).replace("GPUS", str(8 * nodes)))
    done = CliRunner().invoke(cli, ["schedule", str(job)])
    assert isinstance(done.exception, InfeasibleError)
    return str(done.exception)


@pytest.mark.parametrize(("nodes", "reason"), [
    # 16 devices have room for the weights twice, but half of them hold all KV entries
    (2, r"no division of the devices fits: 8 of 16 decode, and hold all of the weights"),
    # memory is enough: nothing is said of it
    (3, r"^no schedule: the job has 400 queries, and the fewest that are present at a time are "
        r"9\d\d, by policy waa-c, encode_batch 1")])
def test_what_forbids_a_division_is_named(tmp_path: Path, nodes: int, reason: str) -> None:
    text = refused(tmp_path, nodes)
    assert re.search(reason, text), text
    if nodes == 3:
        assert "memory" not in text
        return
    held = re.search(r"at least (\d+ GiB) on its fullest device, of which 125 GiB can be used, by "
                     r"policy waa-c, encode_batch 1, decode_micro_batches 1, tp_degree 8", text)
    assert held, text
    asked = CliRunner().invoke(cli, [
        "simulate", str(tmp_path / "job.yaml"), "--set", "schedule.encode_batch=1",
        "--set", "schedule.decode_micro_batches=1"]).stdout
    assert f"to {held[1]} of 125 GiB per rank: DOES NOT FIT" in asked


def test_pools_that_each_hold_all_weights_are_told_of(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("model: llama-3.1-405b\ncluster: h100-8\nworkload: {task: S}\n"
                   "schedule: {policy: waa-c, tp_degree: 2, tp_gpus: 8}\n")
    done = CliRunner().invoke(cli, ["schedule", str(job)])
    assert re.search(r"each of 2 pools holds all weights, \d+ GiB, and all devices have \d+ GiB",
                     str(done.exception))
