"""Rank deaths beside requests that have expired: the next leg, and the end of the job."""

import json

import numpy as np
import pytest

pytest.importorskip("torch", reason="runs need the extra `run`")

from plans import plan_of  # noqa: E402

from xgpt.app.running.deaths import Leg, Legs  # noqa: E402
from xgpt.requests.spool import Record, SpoolWriter  # noqa: E402
from xrunner.files.deaths import DEATHS_FILE  # noqa: E402
from xrunner.files.expired import expired_requests, write_expired  # noqa: E402


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
    assert leg == Leg((), alone=0)
    assert "has an error instead of an answer" in deaths.record(leg, "killed")
    assert deaths.next_leg() is None
    (row,) = map(json.loads, (tmp_path / "results.jsonl").read_text().splitlines())
    assert row["id"] == "suspect" and row["error"]
