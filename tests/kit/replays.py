# owner tb
"""What a replay takes for steps, given a run's queries and the lengths that they had."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from replayed import problem_of
from toys import generate

from xgpt.core.controls import FixedSchedule
from xgpt.core.prefixes import Prefixes
from xgpt.core.problem import Problem, QueryLengths
from xgpt.core.schedule import Estimate
from xprofiler.roofline import Roofline
from xrunner.query import PreparedQuery
from xsimulator.replay.job import replay_job
from xsimulator.replay.records import PoolRecords, ReplayResult
from xsimulator.rough.formulas import fixed_estimate

Steps = list[tuple[Any, ...]]


def lengths_of(queries: Sequence[PreparedQuery], outputs: Sequence[int] | np.ndarray,
               prefixes: Prefixes | None = None) -> QueryLengths:
    return QueryLengths(inputs=np.array([len(q.input_ids) for q in queries]),
                        outputs=np.array(outputs), prefixes=prefixes,
                        most_outputs=np.array([q.max_new_tokens for q in queries]))


def problem_for(directory: Path, queries: Sequence[PreparedQuery],
                outputs: Sequence[int] | np.ndarray, devices: int = 1) -> Problem:
    """A job of these queries, whose outputs are as long as they will be."""
    return problem_of(directory, np.array([[len(q.input_ids), length] for q, length in
                                           zip(queries, outputs, strict=True)]), devices)


def timing_of(problem: Problem) -> Roofline:
    return Roofline(problem.model, problem.cluster.device, problem.dtype)


def estimated(policy: str, problem: Problem, **config: Any) -> Estimate:
    """What the simulator makes of a policy's variables."""
    return fixed_estimate(policy, problem, timing_of(problem), FixedSchedule(**config))


def replayed(problem: Problem, estimate: Estimate, queries: Sequence[PreparedQuery],
             outputs: Sequence[int] | np.ndarray, prefixes: Prefixes | None = None,
             **more: Any) -> ReplayResult:
    return replay_job(problem, timing_of(problem), estimate,
                      lengths_of(queries, outputs, prefixes), **more)


def whole_steps(pool: PoolRecords) -> Steps:
    """(kind, group, phase, iteration, queries, tokens) of each step, as a run's records begin."""
    return [(step.kind.value, step.group, step.phase, step.iteration, encoded + decoded,
             tokens + decoded) for step, encoded, decoded, tokens in zip(
        pool.steps, pool.encoded.tolist(), pool.decoded.tolist(), pool.tokens.tolist(),
        strict=True)]


def steps_of(log: Sequence[Any]) -> Steps:
    """The same of an executor's log."""
    return [tuple(record[:6]) for record in log if record.kind != "cross_kv"]


def answers_of(sink: Any) -> dict[int, list[int]]:
    """The tokens of each query that finished, by its index."""
    return {r.query.index: list(r.output_ids) for r in sink.results}


def generated(model: Any, queries: Sequence[PreparedQuery]) -> dict[int, list[int]]:
    """What transformers answers to each, by its index."""
    return {q.index: generate(model, q) for q in queries}
