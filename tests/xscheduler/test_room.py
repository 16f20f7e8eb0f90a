"""A request longer than the plan's lengths gets its room where memory allows, and a run that is to
see lengths first gets some for the queries that it may come to hold."""

import math
from pathlib import Path

import pytest
from problems import estimate_of, roofline_of, timing_of, toy_problem

from xgpt.app.opened import open_file
from xgpt.app.plan import plan_job
from xscheduler.room import LEAST_OBSERVING, headroom, mean_present, with_room_for


@pytest.fixture
def session(tmp_path: Path) -> object:
    path = tmp_path / "job.yaml"
    path.write_text("model: opt-13b\ncluster: a40-4\n"
                    "workload: {requests: {count: 2000}, task: S}\n"
                    "schedule: {encode_batch: 16, decode_iterations: 8}\n")
    return open_file(path)


def test_room_is_made_in_every_group_and_counted(session) -> None:  # type: ignore[no-untyped-def]
    schedule = plan_job(session, timing_of(session)).schedule
    before = schedule.estimate
    tokens = before.deployment.kv_tokens // before.deployment.num_groups + 100
    after = with_room_for(schedule, session.problem, tokens).estimate
    assert after.deployment.kv_tokens == tokens * before.deployment.num_groups
    added = after.deployment.kv_tokens - before.deployment.kv_tokens
    for stage in before.deployment.stages:
        for rank in stage.ranks:
            grown = after.figures.memory_bytes[rank] - before.figures.memory_bytes[rank]
            assert grown == added * stage.num_layers * 2 * 5120 * 2 // stage.tp_degree
    assert with_room_for(schedule, session.problem, 10) == schedule
    assert with_room_for(schedule, session.problem, 10**7) == schedule, "what cannot fit is left"
    assert (
        after.changed(
            kv_tokens=before.deployment.kv_tokens, memory_bytes=before.figures.memory_bytes
        )
        == before
    )


def test_caps_leave_more_headroom_than_is_asked_at_least_where_outputs_may_be_short() -> None:
    problem = toy_problem(outputs=(190, 5, 200), memory=2e9)
    estimate = estimate_of(problem, encode_batch=1, decode_iterations=199)
    times = headroom(estimate, problem, roofline_of(problem))
    assert LEAST_OBSERVING < times < math.inf
    at_work = estimate_of(problem, encode_batch=24, decode_iterations=199)
    assert LEAST_OBSERVING <= headroom(at_work, problem, roofline_of(problem)) < times
    tight = toy_problem(outputs=(190, 5, 200), memory=2e9, latency_s=1e-9)
    assert math.isinf(headroom(estimate, tight, roofline_of(tight))), "not even short ones tell"


@pytest.mark.parametrize("slots", [1, 8, 100, 2500])
def test_slots_hold_three_deviations_more_than_the_mean(slots: int) -> None:
    mean = mean_present(slots)
    assert mean == 1 or mean + 3 * math.sqrt(mean) <= slots < mean + 1 + 3 * math.sqrt(mean + 1)
