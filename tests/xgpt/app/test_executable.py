"""What a run plans with and measures: every policy and degree that the job leaves open."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from jobs import opened
from xgpt.app.local_profile import wanted_profile
from xgpt.app.opened import OpenedJob
from xgpt.app.plan import executable, plan_job
from xgpt.app.timing import timing_of
from xgpt.core import catalog
from xgpt.core.errors import InfeasibleError, InputError
from xscheduler.planner import Planner, plan

SMALL = {"model": "opt-1.3b", "workload": "{requests: {count: 20}, task: S}"}


def session_of(folder, schedule, cluster="local"):
    return opened(folder, **SMALL, cluster=cluster, schedule=f"{{{schedule}}}", run="{ranks: 4}")


@pytest.mark.parametrize(("schedule", "plan", "measured"), [
    ("", (None, None), (1, 2, 4)),
    ("tp_degree: 1", (1, 0), (1,)),
    ("tp_gpus: 0", (1, 0), (1,)),
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
    schedule = plan_job(planned, timing_of(planned)).schedule
    fixed = executable(session_of(tmp_path, ""), schedule).problem.fixed
    assert (fixed.tp_degree, fixed.tp_gpus) == (2, 2)


def test_a_degree_the_model_cannot_be_divided_by_is_refused_before_anything_is_measured(
        tmp_path: Path) -> None:
    session = session_of(tmp_path, "tp_degree: 3")
    with pytest.raises(InputError, match="does not divide the model's 32 attention heads"):
        wanted_profile(session.job, executable(session).problem)


@pytest.mark.parametrize(("schedule", "policy"), [
    ("", None), ("policy: rra", "rra"), ("policy: waa-c", "waa-c"), ("policy: waa-m", "waa-m")])
def test_a_run_searches_every_policy_unless_the_job_names_one(tmp_path: Path, schedule: str,
                                                              policy: str | None) -> None:
    assert executable(session_of(tmp_path, schedule)).problem.fixed.policy == policy


@pytest.mark.parametrize(("schedule", "policy"), [("", "rra"), ("policy: waa-c", "waa-c")])
def test_lengths_to_be_observed_want_a_schedule_that_can_be_changed_in_place(
        tmp_path: Path, schedule: str, policy: str) -> None:
    own = session_of(tmp_path, schedule, cluster="a40-4")
    found = plan(replace(own.problem, observes=True, num_queries=None), timing_of(own))
    assert found.estimate.policy == policy


def test_a_given_schedule_brings_its_policy(tmp_path: Path) -> None:
    planned = session_of(tmp_path, "", cluster="a40-4")
    schedule = plan_job(executable(planned), timing_of(planned)).schedule
    given = schedule.changed(policy="waa-m")
    assert executable(session_of(tmp_path, ""), given).problem.fixed.policy == "waa-m"


@pytest.mark.parametrize(("schedule", "chosen"), [
    ("policy: ft, encode_batch: 16", {"encode_batch": 16}),
    pytest.param("policy: dsi, encode_micro_batches: 12, replicas: 1",
                 {"encode_micro_batches": 12}, marks=pytest.mark.slow),
    ("policy: dsi, encode_batch: 9, decode_micro_batches: 3, encode_micro_batches: 6",
     {"encode_batch": 9, "decode_micro_batches": 3, "encode_micro_batches": 6}),
    pytest.param("policy: orca, max_active: 7", {"max_active": 7}, marks=pytest.mark.slow),
    ("policy: vllm, token_budget: 700", {"token_budget": 700}),
    ("policy: orca, max_active: 6, tp_degree: 2, tp_gpus: 2",
     {"max_active": 6, "tp_degree": 2, "tp_gpus": 2})])
def test_a_baselines_schedule_has_the_jobs_variables_and_the_best_of_the_others(
        tmp_path: Path, schedule: str, chosen: dict[str, int]) -> None:
    session = executable(session_of(tmp_path, schedule, cluster="a40-4"))
    found = plan_job(session, timing_of(session)).schedule
    assert {name: found.estimate.variables[name] for name in chosen} == chosen
    assert found.estimate.policy == session.problem.fixed.policy and found.estimate.figures.fits
    assert found.fingerprint == session.problem.fingerprint
    free = session_of(tmp_path, f"policy: {found.estimate.policy}", cluster="a40-4")
    steady = Planner(session.problem, timing_of(session)).steady()
    best = Planner(executable(free).problem, timing_of(session)).steady()
    assert best.estimate.figures.throughput_qps >= steady.estimate.figures.throughput_qps


def test_a_baseline_keeps_the_bound_or_says_that_it_cannot(tmp_path: Path) -> None:
    session = executable(session_of(tmp_path, "policy: ft", cluster="a40-4"))
    timing = timing_of(session)
    free = plan_job(session, timing).schedule
    bound_s = 0.9 * free.estimate.figures.latency_s

    def bounded(latency_s: float) -> OpenedJob:
        constraint = session.problem.constraint.with_latency(limit_s=latency_s)
        return replace(session, problem=replace(
            session.problem, constraint=replace(constraint, confidence=0.5)))  # without a margin

    found = plan_job(bounded(bound_s), timing).schedule
    assert found.estimate.figures.latency_s * found.margin.factor <= bound_s
    assert found.estimate.figures.throughput_qps < free.estimate.figures.throughput_qps
    with pytest.raises(InfeasibleError, match="by policy ft"):
        plan_job(bounded(1e-6), timing)
    with pytest.raises(InfeasibleError, match=r"little memory.* \(schedule.encode_batch = 4000\)"):
        fixed = replace(session.problem.fixed, encode_batch=4000)
        plan_job(replace(session, problem=replace(session.problem, fixed=fixed)), timing)


@pytest.mark.parametrize("policy", ["orca", "vllm", "sarathi"])
def test_one_pass_for_both_phases_is_refused_for_an_encoder_decoder_model(
        tmp_path: Path, policy: str) -> None:
    session = session_of(tmp_path, f"policy: {policy}")
    problem = replace(session.problem, model=catalog.model("t5-11b"))
    with pytest.raises(InputError, match="ft, dsi for an encoder-decoder model"):
        executable(replace(session, problem=problem))
    fixed = replace(problem.fixed, policies=("dsi",), max_active=None)
    assert executable(replace(session, problem=replace(problem, fixed=fixed)))


def test_weights_that_no_layout_holds_are_refused_before_anything_is_measured(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xgpt.app.plan.timing_of", lambda *_, **__: pytest.fail("measured"))
    with pytest.raises(InfeasibleError, match=r"weights of opt-1.3b alone take .* as \w+, and "):
        plan_job(opened(tmp_path, **SMALL, cluster="local", constraint="{memory: 64 MiB}"))
