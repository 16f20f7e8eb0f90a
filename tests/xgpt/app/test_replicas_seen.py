"""Several replicas in `xgpt status`, `top`, metrics.json and the report."""

import json
import re
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from fake_run import write_fake_run
from runs import RUNNING
from screens import check_screen, without_figures

from xgpt.app.top import glance
from xgpt.cli.main import cli
from xgpt.report.page import write_report
from xgpt.report.replicas import replica_facts, replica_rows, replica_words
from xgpt.report.run_screen import end_screen
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
    """Heartbeats of replicas on several nodes."""
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
    assert "48 requests in the system" in top and "200 output tokens/s now" in top
    assert "replicas, " not in top, "one node"
    _, status = written(place, replicas(64))
    assert "and 48 more replicas\nn1: 8 replicas, 800 tokens/s\n" in status
    assert "n8: 8 replicas" in status and max(map(len, status.splitlines())) <= 80
    _, status = written(place, replicas(64, per_node=1))
    assert status.rstrip().endswith("n16: 1 replica, 100 tokens/s\nand 48 more nodes")


def told(number: int, **changes: object) -> dict[str, object]:
    """A replica in measured.json."""
    return {"replica": number, "node": "n1", "devices": f"GPU {number}", "restarts": 0,
            "load_s": 2.0, "queries": 50, "output_tokens": 1200, "wall_s": 10.0,
            "output_tokens_per_s": 120.0, **changes}


def account(*replicas: dict[str, object], **changes: object) -> dict[str, object]:
    """A whole run's measured.json, as far as replicas are told of."""
    return {"state": "done", "queries_before": 0, "replicas": [*replicas], **changes}


PREDICTED = SimpleNamespace(replicas=[
    {"queries": 48, "output_tokens": 1150, "wall_s": 9.5, "output_tokens_per_s": 121.0},
    {"queries": 52, "output_tokens": 1250, "wall_s": 8.3, "output_tokens_per_s": 150.0}])


def test_each_replica_is_compared_with_its_own_prediction():
    facts = replica_facts(account(told(0), told(1, restarts=2)), PREDICTED)
    assert [row["queries"] for row in facts["replicas"]] == [
        {"measured": 50, "predicted": 48}, {"measured": 50, "predicted": 52}]
    slow, quick = replica_rows(facts)
    assert slow == {
        "replica": "1", "node": "n1", "device": "GPU 1", "requests": "50 / 52",
        "output tokens": "1,200 / 1,250", "seconds": "10.0 / 8.30", "tokens/s": "120 / 150",
        "load": "2.00 s", "restarts": "2"}
    assert (quick["replica"], quick["restarts"]) == ("0", "-")
    assert replica_words(facts) == (
        "tokens/s, measured / predicted: slowest 1 (n1, GPU 1) 120 / 150; "
        "quickest 0 (n1, GPU 0) 120 / 121; 2 restarts")


def test_however_many_replicas_there_are_the_screen_has_a_few_lines_of_them():
    node = "gpu-partition-a100-017.cluster"
    facts = replica_facts(account(*(told(number, node=node, restarts=1)
                                    for number in range(64))), PREDICTED)
    text = end_screen({"queries": 72, "status": "done", **facts}, [], ["short"] * 9, {
        "answers": "out/results.csv", "report": "out/report.html", "next": "xgpt explain out"})
    lines = text.splitlines()
    assert len(lines) <= 16 and max(map(len, lines)) <= 80, text
    assert sum("slowest" in line or "quickest" in line for line in lines) <= 4
    assert "64 restarts" in " ".join(text.split())


def test_a_run_that_went_on_has_no_prediction_and_one_replica_no_table():
    facts = replica_facts(account(told(0), told(1, output_tokens_per_s=90.0),
                                  queries_before=9), PREDICTED)
    assert replica_words(facts) == (
        "tokens/s: slowest 1 (n1, GPU 1) 90.0; quickest 0 (n1, GPU 0) 120")
    assert "restarts" not in replica_rows(facts)[0]
    assert replica_facts({"state": "done", "queries_before": 0}, PREDICTED) == {}
    assert replica_rows({}) == [] and replica_words({}) == ""


def test_the_page_has_a_table_of_replicas(tmp_path):
    run = write_fake_run(tmp_path / "out", num_queries=3)
    metrics = json.loads((run / "metrics.json").read_text())
    (run / "metrics.json").write_text(json.dumps(
        metrics | replica_facts(account(told(0), told(1, node="<b>n2")), PREDICTED)))
    page = write_report(run).read_text()
    table = page[page.index('<h2 id="replicas">'):]
    words = " ".join(re.sub(r"<[^>]+>", " ", table[:table.index("</table>")]).split())
    assert words == ("Replicas measured / predicted, the slowest first "
                     "replica node device requests output tokens seconds tokens/s load "
                     "1 &lt;b&gt;n2 GPU 1 50 / 52 1,200 / 1,250 10.0 / 8.30 120 / 150 2.00 s "
                     "0 n1 GPU 0 50 / 48 1,200 / 1,150 10.0 / 9.50 120 / 121 2.00 s")
