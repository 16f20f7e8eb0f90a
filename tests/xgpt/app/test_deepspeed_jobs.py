"""`run: {engine: deepspeed}`: which batches are planned, and what is refused before anything
starts."""

import importlib.util
import math
from dataclasses import replace
from typing import Any

import pytest

from jobs import opened
from xgpt.app.opened import OpenedJob
from xgpt.app.running.prepare import refuse_what_cannot_run
from xgpt.app.schedule import executable, plan_job
from xgpt.app.telling import LogTeller
from xgpt.core.errors import InfeasibleError, InputError, MissingExtraError, XgptError
from xgpt.core.schedule import Schedule
from xgpt.job.job_file import load_job
from xprofiler.roofline import Roofline
from xrunner.backends.deepspeed import ENGINE


def session_of(folder, *, model="opt-1.3b", schedule="", run="ranks: 2", bound="inf"):
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
        fixed = executable(session_of(tmp_path, schedule=schedule)).problem.fixed
        assert (fixed.policy, fixed.tp_degree, fixed.tp_gpus) == (policy, 2, 2)
    fixed = executable(session_of(tmp_path, run="ranks: 1")).problem.fixed
    assert (fixed.tp_degree, fixed.tp_gpus) == (1, 0)


def test_the_best_batch_within_the_bound_is_planned_and_said_to_be_by_other_times(tmp_path):
    free = found(session_of(tmp_path))
    assert [stage.ranks for stage in free.estimate.deployment.stages] == [(0, 1)]
    assert ENGINE.note in free.estimate.notes
    bound_s = free.estimate.figures.latency_s / 3
    bounded = found(session_of(tmp_path, bound=f"{bound_s}"))
    assert bounded.estimate.figures.latency_s <= bound_s
    assert 1 <= bounded.estimate.figures.encode_batch < free.estimate.figures.encode_batch
    assert bounded.estimate.figures.throughput_qps < free.estimate.figures.throughput_qps
    with pytest.raises(InfeasibleError, match="one query alone takes"):
        found(session_of(tmp_path, bound="0.001"))


def test_a_batch_that_the_job_fixes_is_taken_as_it_is(tmp_path):
    given = found(session_of(tmp_path, schedule="policy: dsi, encode_batch: 6, "
                                                "encode_micro_batches: 3", bound="0.001"))
    assert (given.estimate.policy, given.estimate.figures.encode_batch) == ("dsi", 6)
    assert given.estimate.controls.encode_micro_batches == 3 and math.isinf(given.proof.gap)
    with pytest.raises(InputError, match=r"schedule\.encode_batch: required"):
        found(session_of(tmp_path, schedule="policy: ft, decode_micro_batches: 2"))


def installed(monkeypatch: pytest.MonkeyPatch, *, package: bool, compiler: bool) -> None:
    real: Any = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: (
        (object() if package else None) if name == "deepspeed" else real(name, *rest)))
    monkeypatch.setattr("shutil.which", lambda name: "/bin/c++" if compiler else None)


def test_a_package_or_a_compiler_that_is_missing_is_named(tmp_path, monkeypatch):
    job = session_of(tmp_path).job
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
    session = session_of(tmp_path)
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
