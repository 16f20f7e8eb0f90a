"""What a run plans with and measures: every policy and degree that the job leaves open."""

import importlib.util
import math
from dataclasses import replace
from typing import Any

import pytest
from job_folder import xgpt

from jobs import job_file, opened
from xgpt.app.needed_profile import needed_profile
from xgpt.app.opened_job import OpenedJob
from xgpt.app.profile import timing_of
from xgpt.app.running.prepare import (
    refuse_what_cannot_run,
    refuse_what_no_machine_runs,
    uses_kv_blocks,
)
from xgpt.app.schedule import executable, plan_job
from xgpt.app.teller import LogTeller
from xgpt.core.errors import InfeasibleError, InputError, MissingExtraError, XgptError
from xgpt.core.schedule import Estimate, Schedule
from xgpt.job.job_file import load_job
from xprofiler.roofline import Roofline
from xrunner.backends.deepspeed import ENGINE
from xscheduler.cache_sizing import kv_tokens_for, slots_for
from xscheduler.planner import Planner, plan
from xsimulator.replay.records import ReplayResult

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
def test_a_run_measures_the_degrees_it_may_use(tmp_path, schedule, plan, measured):
    problem = executable(session_of(tmp_path, schedule)).problem
    assert (problem.fixed.policy, problem.fixed.tp_degree, problem.fixed.tp_gpus) == (None, *plan)
    assert needed_profile(session_of(tmp_path, "").job, problem).degrees == measured


def test_a_schedule_to_execute_decides_for_the_job(tmp_path):
    planned = session_of(tmp_path, "policy: rra, tp_degree: 2, tp_gpus: 2", cluster="a40-4")
    schedule = plan_job(planned, timing_of(planned)).schedule
    for given in (schedule, schedule.changed(policy="waa-m")):
        fixed = executable(session_of(tmp_path, ""), given).problem.fixed
        assert (fixed.policy, fixed.tp_degree, fixed.tp_gpus) == (given.estimate.policy, 2, 2)


@pytest.mark.parametrize(("schedule", "policy"), [("", "rra"), ("policy: waa-c", "waa-c")])
def test_lengths_to_be_observed_want_a_schedule_that_can_be_changed_in_place(
        tmp_path, schedule, policy):
    own = session_of(tmp_path, schedule, cluster="a40-4")
    found = plan(replace(own.problem, observes=True, num_queries=None), timing_of(own))
    assert found.estimate.policy == policy


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
        tmp_path, schedule, chosen):
    session = executable(session_of(tmp_path, schedule, cluster="a40-4"))
    found = plan_job(session, timing_of(session)).schedule
    assert {name: found.estimate.variables[name] for name in chosen} == chosen
    assert found.estimate.policy == session.problem.fixed.policy and found.estimate.figures.fits
    assert found.fingerprint == session.problem.fingerprint
    free = session_of(tmp_path, f"policy: {found.estimate.policy}", cluster="a40-4")
    steady = Planner(session.problem, timing_of(session)).steady()
    best = Planner(executable(free).problem, timing_of(session)).steady()
    assert best.estimate.figures.throughput_qps >= steady.estimate.figures.throughput_qps


def test_a_baseline_keeps_the_bound_or_says_that_it_cannot(tmp_path):
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


def test_weights_that_no_layout_holds_are_refused_before_anything_is_measured(
        tmp_path, monkeypatch):
    monkeypatch.setattr("xgpt.app.schedule.timing_of", lambda *_, **__: pytest.fail("measured"))
    with pytest.raises(InfeasibleError, match=r"weights of opt-1.3b alone take .* as \w+, and "):
        plan_job(opened(tmp_path, **SMALL, cluster="local", constraint="{memory: 64 MiB}",
                        run="{offload: off}"))


POLICIES = {"rra": "policy: rra, encode_batch: 4, decode_iterations: 8", "waa-c":
            "policy: waa-c, encode_batch: 1", "orca": "policy: orca, max_active: 8",
            "ft": "policy: ft, encode_batch: 4"}


def laid_out(folder, cluster, model="opt-1.3b", layout="auto", schedule=POLICIES["rra"]):
    return opened(folder, model=model, cluster=cluster, run=f"{{kv_layout: {layout}}}",
                  workload="{requests: {count: 200}, task: S}",
                  schedule=f"{{{schedule}, replicas: 1, tp_degree: 1}}")


def estimate_of(own: OpenedJob) -> Estimate:
    problem = own.problem
    return plan(problem, Roofline(problem.model, problem.cluster.device, problem.dtype)).estimate


@pytest.fixture(scope="module")
def estimates(tmp_path_factory):
    folder = tmp_path_factory.mktemp("planned")
    return {name: estimate_of(laid_out(folder, "a40-4", schedule=schedule))
            for name, schedule in POLICIES.items()}


@pytest.mark.parametrize(("policy", "cluster", "layout", "in_blocks"), [
    ("rra", "a40-4", "auto", True), ("rra", "local", "auto", False),
    ("rra", "a40-4", "rows", False), ("rra", "local", "blocks", True),
    ("waa-c", "a40-4", "auto", True), ("waa-c", "local", "blocks", True),
    ("orca", "local", "blocks", False),  # in blocks by itself, whatever is reserved
    ("ft", "a40-4", "auto", False)])
def test_a_gpus_memory_is_taken_in_blocks_and_a_cpus_in_rows(
        tmp_path, estimates, policy, cluster, layout, in_blocks):
    own = laid_out(tmp_path, cluster, layout=layout)
    assert uses_kv_blocks(own, estimates[policy]) is in_blocks


@pytest.mark.parametrize(("policy", "model", "layout", "words"), [
    ("orca", "opt-1.3b", "rows", "auto or blocks with orca"),
    ("ft", "opt-1.3b", "blocks", "auto or rows with ft"),
    ("rra", "t5-11b", "blocks", "auto or rows with an encoder-decoder model")])
def test_what_is_not_executed_is_refused(tmp_path, estimates, policy, model, layout, words):
    with pytest.raises(InputError, match=words):
        uses_kv_blocks(laid_out(tmp_path, "local", model, layout), estimates[policy])


@pytest.mark.parametrize("engine", ["vllm", "deepspeed"])
def test_another_engine_lays_out_its_own(tmp_path, engine):
    laid_out(tmp_path, "local", schedule=POLICIES["ft"])
    asked = [f"run.engine={engine}", "run.kv_layout=rows", "run.deterministic=true"]
    job = load_job(tmp_path / "job.yaml", asked)
    for refuse in (refuse_what_no_machine_runs, lambda job: refuse_what_cannot_run(
            job, LogTeller())):
        with pytest.raises(InputError) as refused:
            refuse(job)
        assert {"run.kv_layout", "run.deterministic"} <= {
            mistake.key for mistake in refused.value.mistakes}


def test_room_for_changes_is_tokens_where_it_was_rows(tmp_path, estimates):
    own, estimate = laid_out(tmp_path, "a40-4"), estimates["rra"]
    figures, deployment = estimate.figures, estimate.deployment
    full = estimate.changed(memory_bytes=tuple(figures.memory_capacity_bytes
                                               for _ in figures.memory_bytes))
    longest = 20 * deployment.group_kv_tokens
    planned = slots_for(full, own.problem, longest, 1.0)
    assert slots_for(full, own.problem, longest, 2.0) == planned, "no memory for one row more"
    assert slots_for(full, own.problem, longest, 2.0, in_blocks=True) > planned
    # as many tokens as planned where nothing is left, more where something is, never too many
    assert kv_tokens_for(full, own.problem, 10**9) == deployment.group_kv_tokens
    most = kv_tokens_for(estimate, own.problem, 10**9)
    assert most > deployment.group_kv_tokens
    assert kv_tokens_for(estimate, own.problem, most - 1) == most - 1


def test_a_schedule_of_steps_far_beyond_what_was_measured_is_not_simulated(tmp_path, monkeypatch):
    monkeypatch.setattr(ReplayResult, "is_timed", False)
    done = xgpt("simulate", job_file(
        tmp_path, schedule="{policy: rra, encode_batch: 8, decode_iterations: 9}"))
    assert done.returncode == 2
    assert "within 4 times the sizes that the profile measured" in " ".join(done.stderr.split())


# `run: {engine: deepspeed}`: which batches are planned, and what is refused before anything starts.


def by_deepspeed(folder, *, model="opt-1.3b", schedule="", run="ranks: 2", bound="inf"):
    return opened(
        folder, model=model, cluster="local", constraint=f"{{latency_s: {bound}}}",
        workload="{requests: {count: 40}, task: S}", schedule=f"{{{schedule}}}",
        run=f"{{engine: deepspeed, {run}}}")


def found(session: OpenedJob) -> Schedule:
    problem = session.problem
    return plan_job(executable(session), Roofline(problem.model, problem.cluster.device,
                                              problem.dtype)).schedule


def test_all_ranks_are_one_group_and_the_policy_is_ft_unless_the_job_says_dsi(tmp_path):
    for schedule, policy in (("", "ft"), ("policy: ft", "ft"), ("policy: dsi", "dsi")):
        fixed = executable(by_deepspeed(tmp_path, schedule=schedule)).problem.fixed
        assert (fixed.policy, fixed.tp_degree, fixed.tp_gpus) == (policy, 2, 2)
    fixed = executable(by_deepspeed(tmp_path, run="ranks: 1")).problem.fixed
    assert (fixed.tp_degree, fixed.tp_gpus) == (1, 0)


def test_the_best_batch_within_the_bound_is_planned_and_said_to_be_by_other_times(tmp_path):
    free = found(by_deepspeed(tmp_path))
    assert [stage.ranks for stage in free.estimate.deployment.stages] == [(0, 1)]
    assert ENGINE.note in free.estimate.notes
    bound_s = free.estimate.figures.latency_s / 3
    bounded = found(by_deepspeed(tmp_path, bound=f"{bound_s}"))
    assert bounded.estimate.figures.latency_s <= bound_s
    assert 1 <= bounded.estimate.figures.encode_batch < free.estimate.figures.encode_batch
    assert bounded.estimate.figures.throughput_qps < free.estimate.figures.throughput_qps
    with pytest.raises(InfeasibleError, match="one request alone takes"):
        found(by_deepspeed(tmp_path, bound="0.001"))


def test_a_batch_that_the_job_fixes_is_taken_as_it_is(tmp_path):
    given = found(by_deepspeed(tmp_path, schedule="policy: dsi, encode_batch: 6, "
                                                "encode_micro_batches: 3", bound="0.001"))
    assert (given.estimate.policy, given.estimate.figures.encode_batch) == ("dsi", 6)
    assert given.estimate.controls.encode_micro_batches == 3 and math.isinf(given.proof.gap)
    with pytest.raises(InputError, match=r"schedule\.encode_batch: required"):
        found(by_deepspeed(tmp_path, schedule="policy: ft, decode_micro_batches: 2"))


def installed(monkeypatch: pytest.MonkeyPatch, *, package: bool, compiler: bool) -> None:
    real: Any = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: (
        (object() if package else None) if name == "deepspeed" else real(name, *rest)))
    monkeypatch.setattr("shutil.which", lambda name: "/bin/c++" if compiler else None)


def test_a_package_or_a_compiler_that_is_missing_is_named(tmp_path, monkeypatch):
    job = by_deepspeed(tmp_path).job
    installed(monkeypatch, package=True, compiler=True)
    refuse_what_cannot_run(job, LogTeller())
    installed(monkeypatch, package=False, compiler=True)
    with pytest.raises(MissingExtraError, match=r"'deepspeed'.*-e '\.\[deepspeed\]'"):
        refuse_what_cannot_run(job, LogTeller())
    installed(monkeypatch, package=True, compiler=False)
    with pytest.raises(XgptError, match="install g\\+\\+"):
        refuse_what_cannot_run(job, LogTeller())
    refuse_what_cannot_run(load_job(job.source, ["run.ranks=1"]), LogTeller())  # compiles nothing
    installed(monkeypatch, package=False, compiler=False)
    refuse_what_cannot_run(load_job(job.source, ["run.engine=xgpt"]), LogTeller())  # needs neither


def test_a_schedule_of_other_stages_or_another_policy_is_refused(tmp_path):
    session = by_deepspeed(tmp_path)
    schedule = found(session)
    assert executable(session, schedule).problem.fixed.policy == "ft"
    with pytest.raises(InputError, match=r"schedule\.policy = 'rra'"):
        executable(session, schedule.changed(policy="rra"))
    with pytest.raises(InputError, match=r"schedule\.replicas = 2: 1"):
        executable(session, schedule.changed(estimate=schedule.estimate.in_copies(2)))
    stage = schedule.estimate.deployment.stages[0]
    halves = (replace(stage, ranks=(0,)), replace(stage, index=1, ranks=(1,)))
    with pytest.raises(InputError, match="one, of all 2 ranks"):
        executable(session, schedule.changed(stages=halves))
