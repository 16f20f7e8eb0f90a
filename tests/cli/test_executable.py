"""Which tensor-parallel degrees a run plans with and measures: 1, unless it is asked for more."""

from __future__ import annotations

from pathlib import Path

import pytest

from xgpt.cli.local_profile import wanted_profile
from xgpt.cli.session import Session, executable, find, open_session, timing_of
from xgpt.errors import InputError
from xgpt.schedule import with_estimate


def session_of(folder: Path, schedule: str, cluster: str = "local") -> Session:
    path = folder / "job.yaml"
    path.write_text(f"model: opt-1.3b\ncluster: {cluster}\n"
                    "workload: {requests: {count: 20}, task: S}\n"
                    f"schedule: {{{schedule}}}\nrun: {{ranks: 4}}\n")
    return open_session(path, (), fetch=False)


@pytest.mark.parametrize(("schedule", "plan", "measured"), [
    ("", (1, 0), (1,)),
    ("tp_degree: 1", (1, 0), (1,)),
    ("tp_degree: 2", (2, None), (1, 2)),
    ("tp_degree: 2, tp_gpus: 2", (2, 2), (1, 2)),
    ("tp_degree: 2, tp_gpus: 4", (2, 4), (2,)),
    ("tp_degree: 4", (4, None), (1, 4)),
    ("tp_gpus: 4", (None, 4), (1, 2, 4))])
def test_a_run_measures_the_degrees_it_may_use(
        tmp_path: Path, schedule: str, plan: tuple[int | None, int | None],
        measured: tuple[int, ...]) -> None:
    problem = executable(session_of(tmp_path, schedule)).problem
    assert (problem.fixed.tp_degree, problem.fixed.tp_gpus) == plan
    assert wanted_profile(session_of(tmp_path, "").job, problem).degrees == measured


def test_a_schedule_to_execute_decides_for_the_job(tmp_path: Path) -> None:
    planned = session_of(tmp_path, "policy: rra, tp_degree: 2, tp_gpus: 2", cluster="a40-4")
    schedule = find(planned, timing_of(planned))
    fixed = executable(session_of(tmp_path, ""), schedule).problem.fixed
    assert (fixed.tp_degree, fixed.tp_gpus) == (2, 2)


def test_a_degree_the_model_cannot_be_divided_by_is_refused_before_anything_is_measured(
        tmp_path: Path) -> None:
    session = session_of(tmp_path, "tp_degree: 3")
    with pytest.raises(InputError, match="does not divide the model's 32 attention heads"):
        wanted_profile(session.job, executable(session).problem)


@pytest.mark.parametrize(("schedule", "policy"), [
    ("", "rra"), ("policy: rra", "rra"), ("policy: waa-c", "waa-c"), ("policy: waa-m", "waa-m")])
def test_a_run_leaves_round_robin_only_where_the_job_says_so(tmp_path: Path, schedule: str,
                                                             policy: str) -> None:
    assert executable(session_of(tmp_path, schedule)).problem.fixed.policy == policy


def test_a_given_schedule_brings_its_policy(tmp_path: Path) -> None:
    planned = session_of(tmp_path, "", cluster="a40-4")
    schedule = find(executable(planned), timing_of(planned))
    given = with_estimate(schedule, policy="waa-m")
    assert executable(session_of(tmp_path, ""), given).problem.fixed.policy == "waa-m"


def test_policies_that_are_only_simulated_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not execute"):
        executable(session_of(tmp_path, "policy: orca"))
