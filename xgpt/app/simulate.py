"""Simulates a schedule of a job: estimates it, checks the estimate by a replay with random queries,
and draws the replay."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from xgpt.app.opened_job import OpenedJob
from xgpt.app.schedule import plan_job
from xgpt.core.controls import FixedSchedule
from xgpt.core.errors import InputError
from xgpt.core.policies import able_policies, policy
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate, Schedule
from xgpt.core.units import format_seconds
from xgpt.report import run_charts as timeline
from xgpt.report.chart import SUFFIXES, write_image
from xgpt.report.figures import middle_window, percent, plain, rates
from xgpt.report.html_page import write_chart_page
from xgpt.report.notebook import Printed
from xgpt.report.plan_screen import source_words
from xgpt.report.table import OF_JOB, estimate_table, fact, memory_words
from xgpt.report.words import controls_line, counted, placement
from xprofiler.interpolation import REFUSED_BEYOND
from xprofiler.timing import TimingSource
from xrunner.backends.engine import mistake
from xscheduler.evaluator import in_run_order, job_lengths
from xscheduler.planner import PlanOptions
from xscheduler.progress import Watch
from xscheduler.replays import Replays
from xscheduler.replicas import problem_of_replica, replica_problems
from xscheduler.search import SURE
from xscheduler.service_planner import ServicePlanner
from xsimulator.replay.job import planned_queries
from xsimulator.replay.perfetto import write_trace
from xsimulator.replay.prediction import num_checked_queries, sample_job, steady_queries
from xsimulator.replay.records import ReplayResult
from xsimulator.replay.replicas import replay_steady, replayer_of
from xsimulator.replay.steady_state import (
    SteadyFigures,
    combine_unlike,
    enough_queries,
    steady_figures,
)
from xsimulator.rough.figures import EXTRAPOLATED, fixed_point
from xsimulator.rough.formulas import fixed_estimate

LEAST_QUERIES, MOST_QUERIES = 2000, 50_000
ROUNDS = 12  # as many times the queries in the system are enough for a steady state


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayFigures:
    """Figures of a replayed job with its start and end, and of its steady state (None: the job is
    too short for one, or has no query of the length that the limit is for). `loop_ttft_s`:
    as of ReplayResult."""

    queries: int
    throughput_qps: float
    output_tokens_per_s: float
    latency_p50_s: float
    latency_p99_s: float
    wall_s: float
    steady_throughput_qps: float | None
    steady_latency_s: float | None  # of the slowest replica, if they are unlike
    estimated_latency_s: float  # of the same replica, by the estimate
    utilisation: tuple[float, ...]  # per stage, of the steady state where there is one
    kv_peak_tokens: int  # of the fullest pool that decodes
    kv_tokens: int  # its budget
    preemptions: int
    loop_ttft_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Simulation(Printed):
    """An estimate, its replay, and the replay's figures. As text the screen of `xgpt simulate`."""

    problem: Problem
    times: str  # source of the step times
    estimate: Estimate
    figures: ReplayFigures
    replay: ReplayResult

    def __repr__(self) -> str:
        return (f"<Simulation of {self.problem.model.name}: {self.estimate.policy}, "
                f"{self.estimate.figures.throughput_qps:.4g} requests/s in steady state>")

    def __str__(self) -> str:
        of, cluster, own = self.figures, self.problem.cluster, self.estimate
        limit_s = self.problem.constraint.latency_s
        verdict = "no limit" if math.isinf(limit_s) else (
            f"limit {format_seconds(limit_s)} "
            f"{'met' if (of.steady_latency_s or of.latency_p99_s) <= limit_s else 'MISSED'}")
        why = "batches are formed of the whole job" if own.variables.get("batches") else (
            "the job is too short")
        steady = f"none: {why}" if of.steady_throughput_qps is None else (
            f"{plain(of.steady_throughput_qps)} requests/s (formula: "
            f"{own.figures.throughput_qps / of.steady_throughput_qps - 1:+.1%})")
        return "\n".join([
            f"{counted(of.queries, 'request')} in {format_seconds(of.wall_s)}, simulated",
            "", *(fact(label, text) for label, text in (
                ("schedule", f"{controls_line(own)}; {placement(own)}"),
                ("on", f"{cluster.num_devices} x {cluster.device.name}, {self.problem.model.name}"),
                ("throughput", rates(of.throughput_qps, of.output_tokens_per_s) + OF_JOB),
                ("steady rate", steady),
                ("latency", f"P50 {format_seconds(of.latency_p50_s)}, P99 "
                            f"{format_seconds(of.latency_p99_s)}; {verdict}"),
                *([] if of.loop_ttft_s is None else [(
                    "first token", f"{format_seconds(of.loop_ttft_s)} in the mean after sending, "
                    f"by {counted(own.variables['max_active'], 'client')} of a closed loop")]),
                ("busy", f"{percent(sum(of.utilisation) / len(of.utilisation))} of the time, "
                         f"KV cache {percent(of.kv_peak_tokens / max(of.kv_tokens, 1))} at most"
                         f"{f'; {of.preemptions} preemptions' * bool(of.preemptions)}"),
                ("memory", memory_words(own)), ("times", self.times)))])

    @property
    def details(self) -> str:
        """The text of the estimate and of the replay's latency, for `xgpt simulate --verbose`."""
        text, latency_s = estimate_table(self.estimate, self.problem.constraint), (
            self.figures.steady_latency_s)
        return text if latency_s is None else "\n".join([text, fact(
            "replay", f"latency {format_seconds(latency_s)} in steady state (formula: "
            f"{self.figures.estimated_latency_s / latency_s - 1:+.1%})")])

    def to_dict(self) -> dict[str, Any]:
        """The `--json` object: the replay, and the estimate with the keys of a schedule's file."""
        return {"replay": self.figures, "estimate": self.estimate}

    def draw(self, picture: Path, trace: Path) -> None:
        """Draws the steady state to `picture`, in the format of its suffix (else HTML), and writes
        the whole replay to `trace`, for Perfetto."""
        names = timeline.stage_names(self.estimate.all_pools, "GPU" if (
            self.problem.cluster.device.kind == "gpu") else "worker")
        window = middle_window(  # a few periods
            timeline.replay_lanes(self.replay), 3 * self.estimate.figures.period_s)
        chart = timeline.draw(self.replay, *(window or (0.0, self.replay.makespan_s)), names)
        if picture.suffix in SUFFIXES:
            write_image(chart, picture)
        else:
            title = policy(self.estimate.policy).title
            write_chart_page([chart], picture, f"Steady state of {title}")
        write_trace(self.replay, trace, names)


def simulate_job(opened: OpenedJob, timing: TimingSource,
                 given: Estimate | None = None) -> Simulation:
    """Simulates the estimate `given`; None: the schedule of the job's control variables, or its
    plan where it has none. Raises InputError for control variables that are incomplete, or sizes
    far beyond the profile's."""
    if opened.problem.arrivals is not None:
        raise InputError([mistake(opened.job, "workload.arrivals", None, "none in this call: plan "
                                  "the job, or take `xgpt simulate`, for figures of a service")])
    if given is None and _is_planned(opened.problem.fixed):
        plan = plan_job(opened, timing, PlanOptions())
        problem, estimate = plan.opened.problem, plan.schedule.estimate
    else:
        problem, estimate = opened.problem, _estimate(opened, timing, given)
    replay, steady, estimated_s = replayed(problem, timing, estimate, problem.num_queries)
    if not replay.is_timed:
        raise too_large(opened, ["the replay has larger steps"])
    return Simulation(
        problem=problem, estimate=estimate, replay=replay, times=source_words(
            timing, estimate, problem.cluster, opened.job.plan_engine),
        figures=_figures(replay, steady, estimated_s, estimate, estimate.deployment.replicas
                         if problem.num_queries is None and not estimate.others else 1))


def simulate_service(opened: OpenedJob, timing: TimingSource, given: Schedule | None) -> Schedule:
    """The schedule `given`, or else the job's plan, with figures of requests that arrive as the job
    says. Raises InfeasibleError where the job names no rate, and none keeps its limits."""
    if given is None:
        return plan_job(opened, timing, PlanOptions()).schedule
    planner = ServicePlanner(opened.problem, timing, Watch(), requests=opened.job.search_queries)
    served = planner.served(planner.search.of(given.estimate))
    return replace(given, served=replace(served, search=None), rejected=(), over_copies=(),
                   bounds=opened.problem.constraint.bounds)


def _is_planned(fixed: FixedSchedule) -> bool:
    """Whether no control variable is given."""
    return replace(fixed, policies=(), replicas=None) == FixedSchedule()


def _estimate(opened: OpenedJob, timing: TimingSource, given: Estimate | None) -> Estimate:
    fixed, problem = opened.problem.fixed, opened.problem
    if given is not None:  # each of its shapes by the times of this job
        first, *others = (_as_replayed(opened, timing, problem_of_replica(problem, shape), shape)
                          for shape in given.shapes)
        return first.beside(tuple(others))
    name = able_policies(fixed)[0].name
    _, missing = fixed_point(name, fixed)
    if fixed.tp_degree not in (None, 1) and fixed.tp_gpus is None:
        missing.append("tp_gpus")
    if missing:
        raise InputError([mistake(
            opened.job, f"schedule.{variable}", None,
            "required beside the other control variables (without any, the job is planned)")
            for variable in missing])
    of_copy = replica_problems(
        replace(problem, fixed=replace(fixed, replicas=fixed.replicas or 1)))[0]
    formed = fixed_estimate(name, of_copy, timing, fixed)
    if math.isinf(formed.figures.latency_s):
        raise too_large(opened, [note.removeprefix(EXTRAPOLATED) for note in formed.notes
                                  if note.startswith(EXTRAPOLATED)])
    return _as_replayed(opened, timing, of_copy, formed.in_copies(of_copy.copies))


def _as_replayed(opened: OpenedJob, timing: TimingSource, of_copy: Problem,
                 given: Estimate) -> Estimate:
    """The estimate of the schedule `given` by a replay with this job's times, as for a plan."""
    own = replace(given, notes=(f"times: {timing.provenance()}",), others=()).one_copy
    found = Replays(of_copy, timing).of(own, SURE * num_checked_queries(of_copy, own))
    return found.shown(of_copy).in_copies(given.deployment.replicas)


def too_large(opened: OpenedJob, reasons: Sequence[str]) -> InputError:
    """The error about a schedule with steps far larger than those whose times were measured."""
    return InputError([mistake(
        opened.job, "schedule", None,
        f"within {REFUSED_BEYOND:g} times the sizes that the profile measured: {why}")
        for why in reasons])


def replayed(problem: Problem, timing: TimingSource, estimate: Estimate,
             num_queries: int | None = None,
             ) -> tuple[ReplayResult, SteadyFigures | None, float]:
    """Replays `num_queries` queries, with the job's input lengths where those are known; None:
    enough queries for a steady state of one replica, or of all if they are unlike. Returns the
    replay, its steady state, and the estimated latency in s of the replica slowest in it."""
    rng = np.random.default_rng(problem.seed)
    known = None if num_queries is None or problem.queries is None else job_lengths(
        problem, estimate)
    inputs = None if known is None or not len(known.inputs) else known.inputs
    if inputs is not None:
        num_queries = len(inputs)  # requests that are too long get errors
    copies = [shape for shape in estimate.shapes for _ in range(shape.deployment.replicas)]
    count = num_queries or enough_queries(estimate, least=LEAST_QUERIES, rounds=ROUNDS,
                                          most=MOST_QUERIES)
    queries = steady_queries(problem, estimate, count, rng) if num_queries is None else replace(
        planned_queries(problem, *sample_job(problem.lengths, count, rng, inputs)),
        prefixes=None if known is None or inputs is None else known.prefixes)
    if num_queries is not None and (known is not None or problem.is_synthetic):
        queries = queries.take(in_run_order(problem, estimate, known or queries))
    if estimate.others or num_queries is None:
        results, result = replay_steady(problem, timing, estimate, queries)
    else:
        results = [result := replayer_of(problem, timing, estimate).run(queries)]
    if not result.is_timed or estimate.variables.get("batches"):
        return result, None, math.nan
    own = [steady_figures(one, problem.constraint, problem.lengths.outputs) for one in results]
    steady = combine_unlike(own)
    slowest = next((copy for copy, one in zip(copies, own, strict=False) if one is not None
                    and steady is not None and one.latency_s == steady.latency_s), estimate)
    return result, steady, slowest.figures.latency_s


def _figures(result: ReplayResult, steady: SteadyFigures | None, estimated_s: float,
             estimate: Estimate, copies: int) -> ReplayFigures:
    """The figures of a replay by one of `copies` equal replicas."""
    p50, p99 = np.quantile(result.latency_s, [0.5, 0.99])
    fullest = max((pool for pool in result.pools if pool.role != "encode"), key=lambda pool: (
        pool.memory_tokens.max(initial=0) / max(pool.kv_tokens, 1)))
    count, wall_s = len(result.latency_s), result.makespan_s
    return ReplayFigures(
        queries=copies * count, throughput_qps=copies * count / wall_s, wall_s=wall_s,
        output_tokens_per_s=copies * float(result.output_tokens.sum()) / wall_s,
        latency_p50_s=float(p50), latency_p99_s=float(p99),
        steady_throughput_qps=copies * steady.throughput_qps if steady else None,
        steady_latency_s=steady.latency_s if steady and not math.isnan(steady.latency_s) else None,
        utilisation=tuple((steady.utilisation if steady else result.utilisation()).tolist()),
        estimated_latency_s=estimated_s, kv_peak_tokens=int(fullest.memory_tokens.max(initial=0)),
        kv_tokens=fullest.kv_tokens, preemptions=result.preemptions,
        loop_ttft_s=result.loop_ttft_s(
            None if estimate.others else estimate.variables.get("max_active")))
