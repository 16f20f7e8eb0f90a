"""The best schedule at each of several latency bounds, for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from xgpt.core.schedule import Schedule
from xgpt.core.units import format_seconds
from xgpt.report.policy_words import value_of
from xgpt.report.table import fact, table


def sweep_table(rows: Sequence[tuple[float, Schedule | str]]) -> str:
    """A line a bound (in seconds): its schedule, or why there is none."""
    has_margin = any(isinstance(answer, Schedule) and answer.margin.factor > 1
                     for _, answer in rows)
    header = ("bound", "policy", "queries/s", "latency", "encode", "iterations", "groups",
              "TP", *(("margin",) if has_margin else ()))
    body = [_row(bound_s, answer, has_margin) for bound_s, answer in rows]
    lines = [table(header, body, right=(2, 4, 5, 6, 8))]
    refused = [why for _, why in rows if isinstance(why, str)]
    return "\n".join([*lines, fact("infeasible", refused[-1])] if refused else lines)


def _row(bound_s: float, answer: Schedule | str, has_margin: bool) -> tuple[str, ...]:
    if isinstance(answer, str):
        return (format_seconds(bound_s), "infeasible", *("-",) * (7 if has_margin else 6))
    e, deployment = answer.estimate, answer.estimate.deployment
    iterations = value_of(e, "decode_iterations")
    shared = (format_seconds(bound_s), e.policy, f"{e.figures.throughput_qps:.4g}",
              format_seconds(e.figures.latency_s), str(e.figures.encode_batch),
              "-" if iterations is None else str(iterations), str(deployment.num_groups),
              f"{deployment.tp_degree} x {deployment.tp_gpus}" if deployment.tp_degree > 1 else "-")
    return (*shared, f"{answer.margin.factor - 1:.1%}") if has_margin else shared
