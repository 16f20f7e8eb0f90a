"""Deadlines of requests: as lines and tables have them, and in seconds from the job's start."""

import json
from datetime import datetime

import numpy as np
import pytest

from xgpt.app.opened_job import open_job
from xgpt.app.teller import LogTeller
from xgpt.core.errors import InputError
from xgpt.job.job_file import load_job
from xgpt.requests.deadlines import deadline_of, in_seconds

JOB = ("model: opt-125m\ncluster: a40-4\n"
       "workload: {requests: FILE, output_tokens: {mean: 9, std: 1, max: 20}}\n")


def opened(folder, name, text, *overrides):
    (folder / name).write_text(text)
    (folder / "job.yaml").write_text(JOB.replace("FILE", name))
    return open_job(load_job(folder / "job.yaml", overrides), LogTeller(), "lengths")


def test_a_time_of_day_is_the_next_one_after_the_start():
    given = np.array([deadline_of(value) for value in ("17:30", "7:05:09", "00:00", 12, None)])
    at_five = in_seconds(given, np.arange(5), 99, datetime(2026, 3, 2, 17, 0).timestamp())
    assert at_five.tolist() == [1800, 50_709, 25_200, 12, 99]
    assert in_seconds(given, np.array([2, 0]), np.inf,
                      datetime(2026, 3, 2, 17, 30).timestamp())[1] == 86_400
    assert in_seconds(None, np.arange(5), np.inf, 0.0) is None


def test_lines_and_tables_have_deadlines_and_the_constraint_has_the_default(tmp_path):
    lines = [{"tokens": [1, 2], "deadline_s": 5}, {"tokens": [3]}, {"tokens": [4], "deadline_s": 0}]
    found = opened(tmp_path, "a.jsonl", "".join(json.dumps(one) + "\n" for one in lines),
                   "constraint.deadline_s=2 min")
    assert found.problem.queries.deadlines_s.tolist() == [5, 120]
    assert found.requests.bad_lines[0].line == 3
    assert found.problem.constraint.bound_on("deadline").quantile == 0.95
    table = opened(tmp_path, "b.csv", 'tokens,deadline_s\n"[1,2]",7\n"[3]",\n')
    assert table.problem.queries.deadlines_s.tolist() == [7, np.inf]
    assert table.problem.constraint.bound_on("deadline").limit_s == np.inf


def test_a_share_in_time_needs_deadlines(tmp_path):
    line = '{"tokens": [1, 2]}\n'
    with pytest.raises(InputError) as refused:
        opened(tmp_path, "a.jsonl", line, "constraint.attainment=0.9",
               "constraint.on_deadline=stop")
    assert [one.key for one in refused.value.mistakes] == [
        "constraint.attainment", "constraint.on_deadline"]
    assert opened(tmp_path, "a.jsonl", line).problem.queries.deadlines_s is None


def test_an_order_by_deadlines_needs_one_of_each_request(tmp_path):
    lines = '{"tokens": [1], "deadline_s": 5}\n{"tokens": [2]}\n{"tokens": [3]}\n'
    with pytest.raises(InputError) as refused:
        opened(tmp_path, "a.jsonl", lines, "schedule.order=deadline")
    (found,) = refused.value.mistakes
    assert found.key == "schedule.order" and "2 of 3 do not, the first in " in found.allowed
    assert found.allowed.endswith("line 2")
    given = opened(tmp_path, "a.jsonl", lines, "schedule.order=deadline", "constraint.deadline_s=9")
    assert given.problem.queries.deadlines_s.tolist() == [5, 9, 9]
    opened(tmp_path, "a.jsonl", lines.splitlines()[0], "schedule.order=deadline")
