"""A request longer than the plan's lengths gets its room where memory allows."""

from __future__ import annotations

from pathlib import Path

import pytest
from taken_as_true import timing_of

from xgpt.app.opened import open_file
from xgpt.app.plan import plan_job
from xscheduler.room import with_room_for


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
