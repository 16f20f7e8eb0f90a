"""Compares systems of static batches on a job, with RRA and Sarathi beside them, by replays of the
same requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from xgpt.app.opened_job import OpenedJob
from xgpt.app.schedule import plan_job
from xgpt.app.simulate import too_large
from xgpt.core.controls import FixedSchedule
from xgpt.core.lengths import BoolArray
from xgpt.core.policies import policy
from xgpt.core.problem import Problem, QueryLengths
from xgpt.core.schedule import Estimate
from xgpt.core.systems import STATIC, SYSTEMS
from xgpt.core.units import format_seconds
from xgpt.report.table import paragraph, table
from xprofiler.timing import TimingSource
from xrunner.rules.static import padding
from xscheduler.planner import PlanOptions
from xsimulator.replay.job import planned_queries
from xsimulator.replay.prediction import sample_job
from xsimulator.replay.records import ReplayResult
from xsimulator.replay.replicas import replayer_of

BESIDE = ("rra", "sarathi")
USUAL, MOST = 2000, 20_000  # chosen: requests of a job without any, and the most that are replayed


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFigures:
    """Figures of one batch. `late`: requests that end with it after their deadlines."""

    requests: int
    padded_tokens: int
    superfluous_tokens: int
    late: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemFigures:
    """Figures of a system's replay. `batches`: () for policies whose requests leave early."""

    name: str
    estimate: Estimate
    makespan_s: float
    latency_mean_s: float
    latency_p99_s: float
    late: int
    batches: tuple[BatchFigures, ...]


def systems_screen(problem: Problem, rows: Sequence[SystemFigures]) -> str:
    """The screen of `xgpt simulate --systems`."""
    body = [(row.name, *map(format_seconds, (row.makespan_s, row.latency_mean_s,
                                             row.latency_p99_s)), f"{row.late:,}",
             *(f"{sum(getattr(batch, name) for batch in row.batches):,}" if row.batches else "-"
               for name in ("superfluous_tokens", "padded_tokens"))) for row in rows]
    cluster, forecast = problem.cluster, problem.adjustment.admission.forecast
    return "\n".join([
        f"{problem.model.name} on {cluster.num_devices} x {cluster.device.name}, simulated; "
        f"forecast: {forecast.kind}", "",
        table(("system", "makespan", "latency", "P99", "late", "superfluous", "padded"), body,
              right=range(1, 7)), "",
        paragraph("latency: the mean. late: requests after their deadlines. superfluous: output "
                  "tokens of rows that are decoded beyond their ends. padded: input tokens that an "
                  "engine which pads inputs would compute; FT's runner pads none.")])


def compare_systems(opened: OpenedJob, timing: TimingSource,
                    names: Sequence[str]) -> list[SystemFigures]:
    """Plans the job for each system of these names, for RRA and for Sarathi, and replays its
    requests. Raises InfeasibleError where one has no schedule."""
    problem, rows = opened.problem, []
    queries = _requests_of(problem)
    assert queries.deadlines_s is not None
    for name, of, batches in (*((name, STATIC, SYSTEMS[name].settings) for name in names),
                              *((policy(of).title, of, None) for of in BESIDE)):
        own = replace(
            problem, adjustment=replace(problem.adjustment, batches=batches, order="input"),
            fixed=FixedSchedule(policies=(of,), replicas=problem.fixed.replicas),
            constraint=replace(problem.constraint, bounds=tuple(  # no deadline refuses a system
                bound for bound in problem.constraint.bounds if bound.metric != "deadline")))
        estimate = plan_job(replace(opened, problem=own), timing,
                            PlanOptions(horizon="job")).schedule.estimate
        result = replayer_of(own, timing, estimate).run(queries)
        if not result.is_timed:
            raise too_large(opened, [f"the replay of {name} has larger steps"])
        late = result.times.last_token_s > queries.deadlines_s
        rows.append(SystemFigures(
            name=name, estimate=estimate, makespan_s=result.makespan_s, late=int(late.sum()),
            latency_mean_s=float(result.latency_s.mean()),
            latency_p99_s=float(np.quantile(result.latency_s, 0.99)),
            batches=tuple(_batches(result, queries, late)) if of == STATIC else ()))
    return rows


def _requests_of(problem: Problem) -> QueryLengths:
    """The job's requests, with outputs that are drawn where they are unknown."""
    known, rng = problem.queries, np.random.default_rng(problem.seed)
    if known is None:
        known = planned_queries(problem, *sample_job(
            problem.lengths, min(problem.num_queries or USUAL, MOST), rng, None))
    known = known.take(np.arange(min(len(known.inputs), MOST)))
    if known.outputs is None:
        _, outputs = sample_job(problem.lengths, len(known.inputs), rng, known.inputs)
        known = replace(known, outputs=np.minimum(outputs, known.most_outputs))
    return known if known.deadlines_s is not None else replace(known, deadlines_s=np.full(
        len(known.inputs), problem.constraint.limit_s("deadline")))


def _batches(result: ReplayResult, queries: QueryLengths, late: BoolArray) -> list[BatchFigures]:
    """The batches of all replicas."""
    found, written = [], np.zeros(len(queries.inputs), np.int64)
    for pool in result.pools:
        places = np.arange(len(written)) if pool.requests is None else pool.requests
        members, rounds = dict[int, list[int]](), dict[int, int]()  # by batch
        for step in pool.steps:
            members.setdefault(step.phase, []).extend(step.joined)
            rounds[step.phase] = step.iteration
        for phase, own in members.items():
            rows = places[own]
            wrote = np.minimum(result.output_tokens[rows] - written[rows], rounds[phase] + 1)
            padded, superfluous = padding((queries.inputs[rows] + written[rows]).tolist(),
                                          wrote.tolist())
            written[rows] += wrote
            is_last = written[rows] == result.output_tokens[rows]
            found.append(BatchFigures(requests=len(own), late=int((late[rows] & is_last).sum()),
                                      padded_tokens=padded, superfluous_tokens=superfluous))
    return found
