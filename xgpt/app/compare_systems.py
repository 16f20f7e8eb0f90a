"""Compares systems of static batches on a job, with RRA and Sarathi beside them, by replays of the
same requests."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from xgpt.app.opened_job import OpenedJob
from xgpt.app.schedule import plan_job
from xgpt.app.simulate import too_large
from xgpt.core.controls import FixedSchedule
from xgpt.core.lengths import BoolArray
from xgpt.core.policies import policy
from xgpt.core.problem import Problem, QueryLengths
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


def systems_screen(problem: Problem, rows: Sequence[dict[str, Any]]) -> str:
    """The screen of `xgpt simulate --systems`. `rows`: those of `compare_systems`."""
    body = []
    for row in rows:
        times = [format_seconds(row[name]) for name in (
            "makespan_s", "latency_mean_s", "latency_p99_s")]
        tokens = [f"{sum(batch[name] for batch in row['batches']):,}" if row["batches"] else "-"
                  for name in ("superfluous_tokens", "padded_tokens")]
        body.append((row["name"], *times, f"{row['late']:,}", *tokens))
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
                    names: Sequence[str]) -> list[dict[str, Any]]:
    """Plans the job for each system of these names, for RRA and for Sarathi, and replays its
    requests. Returns the figures of each, with those of every batch where requests are batched.
    Raises InfeasibleError where one has no schedule."""
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
        rows.append({
            "name": name, "estimate": estimate, "makespan_s": result.makespan_s,
            "latency_mean_s": float(result.latency_s.mean()),
            "latency_p99_s": float(np.quantile(result.latency_s, 0.99)), "late": int(late.sum()),
            "batches": _batches(result, queries, late) if of == STATIC else []})
    return rows


def _requests_of(problem: Problem) -> QueryLengths:
    """The job's requests, with outputs that are drawn where they are unknown."""
    rng = np.random.default_rng(problem.seed)
    known = problem.queries or planned_queries(problem, *sample_job(
        problem.lengths, problem.num_queries or USUAL, rng, None))
    known = known.take(np.arange(min(len(known.inputs), MOST)))
    if known.outputs is None:
        _, outputs = sample_job(problem.lengths, len(known.inputs), rng, known.inputs)
        known = replace(known, outputs=np.minimum(outputs, known.most_outputs))
    return known if known.deadlines_s is not None else replace(known, deadlines_s=np.full(
        len(known.inputs), problem.constraint.limit_s("deadline")))


def _batches(result: ReplayResult, queries: QueryLengths, late: BoolArray) -> list[dict[str, int]]:
    """The batches of all replicas. `late`: [requests] whether each ends after its deadline."""
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
            found.append({"requests": len(own), "padded_tokens": padded,
                          "superfluous_tokens": superfluous,
                          "late": int((late[rows] & is_last).sum())})
    return found
