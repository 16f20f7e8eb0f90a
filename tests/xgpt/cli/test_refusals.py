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
    (2, r"^no schedule: there is too little memory"),
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
                     r"policy waa-c, encode_batch 1, decode_micro_batches (\d+), tp_degree 8", text)
    assert held, text
    asked = CliRunner().invoke(cli, [
        "simulate", str(tmp_path / "job.yaml"), "--set", "schedule.encode_batch=1",
        "--set", f"schedule.decode_micro_batches={held[2]}"]).stdout
    assert f"to {held[1]} of 125 GiB per rank: DOES NOT FIT" in asked
