"""What `xgpt status`, `top`, metrics.json and the report show of several replicas."""

import json
import re
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from runs import RUNNING
from screens import check_screen, without_figures

from xgpt.app.top import glance
from xgpt.cli.main import cli
from xgpt.run_folder.files import RunFolder
from xrunner.files.heartbeat import HEARTBEATS, RankState
from xrunner.files.lock import output_lock
from xrunner.files.sink import write_progress


@pytest.fixture
def place(tmp_path):
    (tmp_path / "nightly" / HEARTBEATS).mkdir(parents=True)
    write_progress(tmp_path / "nightly" / "progress.json", RUNNING)
    return RunFolder(name="nightly", output=tmp_path / "nightly", bound_s=2.0)


def replicas(count: int, per_node: int = 8, stages: int = 1) -> list[RankState]:
    """What ranks of replicas on several nodes report."""
    return [RankState(
        rank=rank, stage=rank, pool="all", elapsed_s=60.0, busy_s=45.0, recent_share=0.75,
        queries=24, replica=rank // stages, at_s=time.time(), node=f"n{rank // per_node + 1}",
        devices=f"GPU {rank % per_node}", waiting=3 * (rank % stages == 0),
        tokens_per_s=100.0 * (rank % stages == 0)) for rank in range(count * stages)]


def written(place: RunFolder, states: list[RankState]) -> tuple[str, str]:
    """(top, status) of a run whose ranks report these states."""
    for state in states:
        (place.output / HEARTBEATS / f"{state.rank}.json").write_text(json.dumps(asdict(state)))
    with output_lock(place.output):
        shown = str(glance(place)), CliRunner().invoke(
            cli, ["status", str(place.output)], catch_exceptions=False).stdout
    return tuple(re.sub(rf"\s+{re.escape(str(place.output))}\S*", " FOLDER", text)
                 for text in shown)


def test_replicas_have_a_row_each_and_nodes_a_line_with_what_each_is_at(place):
    first, second, *others = replicas(4, per_node=2)
    top, status = written(place, [first, replace(
        second, restarts=1, tokens_per_s=0, note="loading vLLM, at most 30 min"), *others])
    for text, name in ((top, "top"), (status, "status")):
        assert max(map(len, text.splitlines())) <= 80
        check_screen(Path(__file__).with_name("screens.txt"), f"{name}, replicas", without_figures(
            re.sub(r"-{3,}", "---", text)))
        assert re.search(r"\n +1  n1 +GPU 1 +75% +24 +3 +- +1\n", text), text
        assert "n2: 2 replicas, 200 tokens/s" in text
        assert "replica 1: loading vLLM, at most 30 min" in text


def test_ranks_of_a_replica_are_one_row_and_of_many_replicas_the_first_are_shown(place):
    top, _ = written(place, replicas(2, stages=2))
    assert re.search(r"\n +1  n1 +GPU 2, GPU 3 +75% +24 +3 +100$", top, re.M), top
    assert "48 requests in the system" in top and "replicas, " not in top, "one node"
    _, status = written(place, replicas(64))
    assert "and 48 more replicas\nn1: 8 replicas, 800 tokens/s\n" in status
    assert "n8: 8 replicas" in status and max(map(len, status.splitlines())) <= 80
    _, status = written(place, replicas(64, per_node=1))
    assert status.rstrip().endswith("n16: 1 replica, 100 tokens/s\nand 48 more nodes")
