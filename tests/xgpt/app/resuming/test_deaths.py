"""Rank deaths beside requests that have expired: the next leg, and the end of the job."""

import json

import numpy as np
import pytest

pytest.importorskip("torch", reason="runs need the extra `run`")

from plans import plan_of  # noqa: E402
from runs import Told  # noqa: E402

from xgpt.app.running.deaths import Leg, Legs, run_through  # noqa: E402
from xgpt.launch.process import RanksFailed  # noqa: E402
from xgpt.requests.spool import Record, Spool, SpoolWriter  # noqa: E402
from xrunner.files.deaths import DEATHS_FILE  # noqa: E402
from xrunner.files.expired import expired_requests, write_expired  # noqa: E402
from xrunner.files.results import ResultWriter, answered  # noqa: E402
from xrunner.files.sink import Underway  # noqa: E402
from xrunner.files.spooled_requests import SpooledQueries  # noqa: E402
from xrunner.query import FinishedQuery  # noqa: E402


def test_a_suspect_beside_an_expired_line_of_four_answers_ends_the_job(tmp_path, made):
    spool, plan = SpoolWriter(), plan_of(tmp_path, made("llama")[0])
    spool.add(Record(id="suspect", line=1), [5])
    for sample in range(4):
        spool.add(Record(id="four", line=2, sample=sample, choices=4), [5])
    spool.save(tmp_path, np.array([(query, 3) for query in range(5)]), 0)
    assert write_expired(tmp_path, [2]) == [1, 2, 3, 4] == expired_requests(tmp_path)
    (tmp_path / DEATHS_FILE).write_text(json.dumps(
        {"fingerprint": plan.fingerprint, "deaths": {"0": 2}}))
    deaths = Legs(plan)
    leg = deaths.next_leg()
    assert leg == Leg((), alone=0, is_trial=True)
    assert "has an error instead of an answer" in deaths.record(leg, "killed")
    assert deaths.next_leg() is None
    (row,) = map(json.loads, (tmp_path / "results.jsonl").read_text().splitlines())
    assert row["id"] == "suspect" and row["error"]


@pytest.mark.parametrize("loads", [True, False])
@pytest.mark.parametrize("poison", [{17}, {3, 40}, {0, 1, 2}, set()])
def test_the_cause_of_deaths_is_found_by_halves(tmp_path, made, poison, loads):
    """Ranks work 16 of 48 queries at a time, and die where one is poison; two more deaths have no
    cause among the queries (`loads` False: they come before any has begun)."""
    spool, plan, count = SpoolWriter(), plan_of(tmp_path, made("llama")[0]), 48
    for query in range(count):
        spool.add(Record(id=f"q{query}", line=query + 1), [5])
    spool.save(tmp_path, np.array([(query, 3) for query in range(count)]), 0)
    starts, others = list[Leg](), [2, 3]
    queries = SpooledQueries(Spool(tmp_path), plan)

    def start(leg: Leg) -> None:
        starts.append(leg)
        before = answered(tmp_path / "results.jsonl")
        writer = ResultWriter(tmp_path / "results.jsonl", first_index=before.written, model="m")
        left = [query for query in range(count) if query not in leg.aside
                and query >= before.written and query not in before.held]
        is_other = len(starts) in others
        underway, dies = Underway(tmp_path), is_other
        for first in range(0, len(left), 16):
            batch = left[first:first + 16]
            if loads or not is_other:
                underway.begin(batch)
            dies = dies or bool(poison & {*batch})
            if dies:
                break
            for query in batch:
                writer.write(FinishedQuery(
                    query=queries[query], output_ids=(5,), finish_reason="length", text="",
                    encode_start_s=0.0, first_token_s=1.0, last_token_s=1.0))
        writer.close()
        underway.close()
        if dies:
            raise RanksFailed(9, "killed")

    run_through(plan, start, restarts=9, tell=Told())
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == [f"q{query}" for query in range(count)]
    assert {row["index"] for row in rows if row.get("error")} == poison
    assert len(starts) <= 8 + 10 * len(poison), "all at once, then halves: not each alone"
    assert not (tmp_path / DEATHS_FILE).exists()
