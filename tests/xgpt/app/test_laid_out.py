"""A job on `cluster: local` is planned on every layout of the cores, by times that are measured."""

from dataclasses import replace
from pathlib import Path

import pytest
from profiles import Law, amdahl, profile_of

from jobs import opened as opened_job
from xgpt.app import needed_profile as profile_identity
from xgpt.app.opened_job import OpenedJob
from xgpt.app.schedule import (
    JobPlanner,
    by_layout,
    job_with_times,
    plan_from,
    plan_job,
    with_ranks,
)
from xgpt.core.errors import InfeasibleError, InputError
from xgpt.core.schedule import Schedule
from xgpt.core.schedule_file import load_schedule, save_schedule
from xgpt.core.system import machine as local
from xgpt.job import resolve as layout
from xgpt.launch import launcher
from xprofiler.profile_file import save_profile
from xprofiler.profile_timing import ProfileTiming
from xscheduler.planner import Planner, PlanOptions

STEADY = PlanOptions(horizon="steady")


class Machine:
    """Cores, whose threads follow a law; what was measured on them."""

    def __init__(self, patch: pytest.MonkeyPatch, cores: int, law: Law,
                 spread: float = 0.0) -> None:
        self.measured: list[str] = []
        self.law, self._spread = law, spread
        for module in (layout, local, launcher, profile_identity):
            patch.setattr(module, "usable_cores", lambda *_: cores)
        for module in (layout, local):
            patch.setattr(module, "gpus_here", list)
        patch.setattr("xgpt.app.schedule.timing_of", self.timing_of)
        self.cost_s = 0.0  # of timing another layout; 0: earlier jobs have
        patch.setattr("xgpt.app.schedule.timing_cost_s", lambda *_: self.cost_s)

    def timing_of(self, opened: OpenedJob) -> ProfileTiming:
        run, problem = opened.job.run, opened.problem
        assert run.ranks and run.threads_per_rank, "laid out"
        self.measured.append(f"{run.ranks}x{run.threads_per_rank}")
        return ProfileTiming(profile_of(problem.model, run.ranks, run.threads_per_rank, self.law,
                                        dtype=problem.dtype, spread=self._spread))


def job_of(folder: Path, *, count: int | None = 12, bound: str = "inf",
           schedule: str = "policy: rra, replicas: 1, encode_chunk: 0",
           run: str = "dtype: float32") -> OpenedJob:
    requests = f"requests: {{count: {count}}}, " if count else ""
    return opened_job(
        folder, model="opt-125m", cluster="local", schedule=f"{{{schedule}}}", output="out",
        constraint=f"{{latency_s: {bound}}}", run=f"{{{run}}}", workload=(
            f"{{{requests}input_tokens: {{mean: 40, std: 20, max: 80}}, "
            "output_tokens: {mean: 12, std: 5, max: 24}}"))


def test_threads_that_divide_all_work_leave_one_rank_the_best(tmp_path, monkeypatch):
    machine = Machine(monkeypatch, 2, amdahl(0.0))
    plan = plan_job(job_of(tmp_path))
    assert plan.schedule.deployment.num_devices == 1 and plan.opened.job.run.threads_per_rank == 2
    assert sorted(machine.measured) == ["1x2", "2x1"]
    (note,) = [n for n in plan.schedule.estimate.notes if n.startswith("layout: ")]
    assert "1 rank x 2 threads" in note and "2 ranks x 1 thread would take about" in note
    assert "\nlayout       1 rank x 2 threads" in str(plan)


def test_a_short_job_pays_for_the_start_of_several_ranks(tmp_path, monkeypatch):
    """Two ranks have the higher throughput; a job of a moment is done sooner by one."""
    Machine(monkeypatch, 2, amdahl(1.0))
    for count, ranks in ((12, 1), (4000, 2)):
        assert plan_job(job_of(tmp_path, count=count)).schedule.deployment.num_devices == ranks
    steady = plan_job(job_of(tmp_path, count=12), options=STEADY)
    assert steady.schedule.deployment.num_devices == 2, "a job without end has the start once"


@pytest.mark.parametrize(("part", "ranks"), [(0.0, 1), (1.0, 2)])
def test_only_a_layout_that_may_be_the_best_is_planned_in_full(part, ranks, tmp_path, monkeypatch):
    Machine(monkeypatch, 2, amdahl(part), spread=0.05)
    planned: list[tuple[int, bool]] = []
    plan = Planner.plan

    def noting(planner: Planner, latency_bound_s: float | None = None) -> Schedule:
        planned.append((planner.problem.cluster.num_devices, planner.options.has_margin))
        return plan(planner, latency_bound_s)

    monkeypatch.setattr(Planner, "plan", noting)
    best = plan_job(job_of(tmp_path, count=None, bound="20"), options=STEADY)
    assert best.schedule.deployment.num_devices == ranks and best.schedule.margin.factor > 1
    assert planned == [(1, True), (2, False), (2, True)][:ranks + 1]


@pytest.mark.parametrize(("count", "cost_s", "expected"), [
    (12, 1e6, ["1x2"]), (12, 0.0, ["1x2", "2x1"]), (None, 1e6, ["1x2", "2x1"])])
def test_another_layout_is_timed_where_it_may_save_more_than_that_takes(
        tmp_path, monkeypatch, count, cost_s, expected):
    machine = Machine(monkeypatch, 2, amdahl(0.5))
    machine.cost_s = cost_s
    said: list[str] = []
    monkeypatch.setattr("xgpt.app.teller.LogTeller.say", lambda _, message: said.append(message))
    plan_job(job_of(tmp_path, count=count))
    assert machine.measured == expected
    assert len(expected) == 2 or (
        "1 rank x 2 threads. 2 ranks x 1 thread is not measured" in said[-1]
        and "--set run.ranks=2" in said[-1])


def test_where_the_first_layout_keeps_no_bound_the_others_are_timed_and_named(
        tmp_path, monkeypatch):
    machine = Machine(monkeypatch, 2, amdahl(1.0))
    machine.cost_s = 1e6
    with pytest.raises(InfeasibleError, match="1 rank x 2 threads: .*; 2 ranks x 1 thread: "):
        plan_job(job_of(tmp_path, bound="0.0001"))
    assert machine.measured == ["1x2", "2x1"]


def test_a_wish_or_a_profile_file_is_one_layout_and_is_not_compared(tmp_path, monkeypatch):
    machine = Machine(monkeypatch, 4, amdahl(0.0))
    for run, expected in (("ranks: 2, threads_per_rank: 1", "2x1"), ("threads_per_rank: 2", "2x2")):
        machine.measured.clear()
        plan = plan_job(job_of(tmp_path, run=f"dtype: float32, {run}"))
        assert machine.measured == [expected]
        assert not any(n.startswith("layout: ") for n in plan.schedule.estimate.notes)
    Machine(monkeypatch, 2, amdahl(0.0))
    opened = job_of(tmp_path)
    save_profile(profile_of(opened.problem.model, 2, 1, amdahl(0.0)), tmp_path / "p.json")
    named = replace(opened, job=replace(opened.job, profile=tmp_path / "p.json"))
    assert [str(each) for each in by_layout(named)] == ["2x1"]


def test_what_only_several_ranks_can_do_decides_the_layout(tmp_path, monkeypatch):
    Machine(monkeypatch, 2, amdahl(0.0))
    plan = plan_job(job_of(tmp_path, count=40, schedule="policy: waa-c"))
    assert plan.schedule.deployment.num_devices == 2
    assert "1 rank x 2 threads cannot run it" in plan.schedule.estimate.notes[-1]
    with pytest.raises(InputError):
        plan_job(job_of(tmp_path, schedule="tp_degree: 5"))


def test_a_schedule_runs_on_the_ranks_it_was_found_for_or_is_refused_in_words(
        tmp_path, monkeypatch):
    Machine(monkeypatch, 2, amdahl(1.0))
    opened = job_of(tmp_path)
    for ranks in (1, 2):
        plan = plan_job(with_ranks(opened, ranks))
        save_schedule(plan.schedule, tmp_path / "schedule.json")
        again = plan_from(opened, load_schedule(tmp_path / "schedule.json"), tmp_path)
        assert again.opened.job.run.ranks == ranks == again.schedule.deployment.num_devices
        assert again.opened.job.run.threads_per_rank == 2 // ranks
        own, _ = job_with_times(opened, plan.schedule.estimate)
        assert own.problem.cluster.num_devices == ranks
    one, opened = with_ranks(opened, 1), with_ranks(opened, 2)
    schedule = plan_job(opened).schedule
    alone = plan_job(one).schedule.estimate.one_copy
    both = alone.beside((alone.changed(throughput_qps=0.0),))
    stage = alone.deployment.pools[0].stages[0]
    short = replace(alone, deployment=replace(alone.deployment, pools=(replace(
        alone.deployment.pools[0], stages=(replace(stage, num_layers=stage.num_layers - 1),)),)))
    for estimate, words in ((alone.in_copies(3), "as many devices as the job has: 2"),
                            (alone.beside((short,)), r"others\[0\].*layers as the model has"),
                            (both, r"others\[0\].figures.throughput_qps = 0: more than 0")):
        given = schedule.changed(estimate=estimate)
        with pytest.raises(InputError, match=words):
            plan_from(opened, given, tmp_path)
    assert plan_from(opened, schedule.changed(estimate=alone.in_copies(2)), tmp_path)


def test_one_planner_answers_for_every_bound_and_measures_once(tmp_path, monkeypatch):
    machine = Machine(monkeypatch, 2, amdahl(0.1))
    planner = JobPlanner(job_of(tmp_path), STEADY)
    free = planner.plan()
    tight = planner.plan(0.8 * free.schedule.figures.latency_s)
    assert tight.schedule.figures.throughput_qps <= free.schedule.figures.throughput_qps
    assert len(machine.measured) == 2
    laid_out, own = planner.of(free)
    assert laid_out is free.opened and own.problem.cluster == free.opened.problem.cluster


def test_copies_within_a_layout_are_a_choice_like_any_other(tmp_path, monkeypatch):
    """Threads bring nothing: a rank a core is best, each with the whole model, not a pipeline."""
    Machine(monkeypatch, 2, amdahl(1.0))
    whole = plan_job(job_of(tmp_path, count=None), options=STEADY).schedule
    found = plan_job(job_of(tmp_path, count=None, schedule="policy: rra"), options=STEADY).schedule
    assert (found.deployment.replicas, found.deployment.devices_per_replica) == (2, 1)
    assert found.figures.throughput_qps > whole.figures.throughput_qps
    assert [row.replicas for row in found.over_copies] == [2, 1]
    assert found.proof.bound_qps >= max(row.bound_qps for row in found.over_copies)
