"""Plain tables for the terminal: ASCII, at most 80 columns, no dependency."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from xgpt.core.constraint import Constraint
from xgpt.core.schedule import JOB_STATUS, Estimate, Schedule
from xgpt.core.units import format_bytes, format_seconds
from xgpt.report.figures import comparisons, lost_to_bound, percent, plain
from xgpt.report.output import number, text_at
from xgpt.report.policy_words import controls_line
from xgpt.report.words import (
    counted,
    layers_of,
    loading_words,
    margin_words,
    proved_against,
    pruned_words,
    ranks_of,
)

WIDTH = 80
_GAP = "  "
_LEAST_WRAPPED = 20  # columns
_LEFT_OF_FACTS = 13  # columns of the labels of `schedule_table`


def schedule_table(schedule: Schedule) -> str:
    """What was chosen, its predicted throughput and latency against the bound, what the bound and
    the margin cost, memory, and what the search proved."""
    e = schedule.estimate
    facts = [
        ("chosen", _chosen(e)),
        ("parallel", _parallel(e)),
        ("throughput", _throughput(e)),
        ("latency", _latency(schedule)),
        ("this job", schedule.explanation[0]) if schedule.proof.status == JOB_STATUS
        and schedule.explanation else ("the bound", _bound_cost(schedule)),
        *([("margin", margin_words(schedule))] if schedule.margin.note else []),
        ("step times", _step_times(e)),
        ("memory", _memory(e)),
        ("search", f"{_status(schedule)}, {counted(schedule.proof.nodes, 'configuration')} in "
                   f"{format_seconds(schedule.proof.seconds)}"),
        *([("given up", pruned_words(schedule))] if schedule.proof.pruned else []),
        *_marks(e),
    ]
    return "\n".join(fact(label, value) for label, value in facts)


def estimate_table(estimate: Estimate, constraint: Constraint) -> str:
    """The same figures of an Estimate that no search stands behind."""
    facts = [
        ("simulated", _chosen(estimate)),
        ("parallel", _parallel(estimate)),
        ("throughput", _throughput(estimate)),
        ("latency", _latency_against(estimate.figures.latency_s, constraint.latency_s,
                                     constraint.kind, constraint.quantile)),
        ("step times", _step_times(estimate)),
        ("memory", _memory(estimate)),
        *_marks(estimate),
    ]
    return "\n".join(fact(label, value) for label, value in facts)


def summary_table(metrics: Mapping[str, Any]) -> str:
    """The end of a run: queries done, and predicted beside measured with their ratio."""
    queries, num_errors = number(metrics, "queries") or 0.0, number(metrics, "errors") or 0.0
    first = f"{counted(queries, 'query')} done"
    if num_errors:
        first += f", {counted(num_errors, 'error')} (errors.jsonl)"
    if text_at(metrics, "status") == "stopped":
        first += ", stopped early: the same command goes on"
    rows = comparisons(metrics)
    if not rows:
        return _ascii(first)
    body = [(row.label, row.predicted, row.measured, row.ratio_text, row.verdict_text)
            for row in rows]
    header = ("", "predicted", "measured", "ratio", "")
    remarks = [loading_words(metrics), text_at(metrics, "attribution", "sentence")]
    return "\n".join([_ascii(first), table(header, body, right=(1, 2, 3)),
                      *(textwrap.fill(_ascii(text), WIDTH) for text in remarks if text)])


def stage_table(schedule: Schedule) -> str:
    """One line a stage: its ranks, layers, phase and memory."""
    e = schedule.estimate
    body = []
    for stage in e.deployment.stages:
        memory_bytes = e.figures.memory_bytes
        held = [memory_bytes[rank] for rank in stage.ranks if rank < len(memory_bytes)]
        memory = format_bytes(max(held)) if held else "-"
        phase = {"both": "encode, decode"}.get(stage.role, stage.role)
        body.append((str(stage.index), ranks_of(stage), layers_of(stage), phase, memory))
    return table(("stage", "ranks", "layers", "phase", "memory"), body, right=(0, 4))


def _marks(e: Estimate) -> list[tuple[str, str]]:
    """What an estimate says of itself besides its figures, but for where its times are from."""
    return [("note", note) for note in e.notes if not note.startswith("times: ")]


def _throughput(e: Estimate) -> str:
    return (f"{plain(e.figures.throughput_qps)} queries/s, "
            f"{plain(e.figures.output_tokens_per_s)} output tokens/s in steady state")


def _step_times(e: Estimate) -> str:
    figures = e.figures
    return (f"encode {format_seconds(figures.encode_s)}, decode iteration "
            f"{format_seconds(figures.decode_iteration_s)}, period "
            f"{format_seconds(figures.period_s)}")


def _chosen(e: Estimate) -> str:
    return f"{controls_line(e)}; {e.figures.decode_batch:.1f} queries decode at once"


def _parallel(e: Estimate) -> str:
    deployment = e.deployment
    stages = counted(len(deployment.stages), "stage")
    if len(deployment.pools) > 1:
        first, *others = deployment.pools
        stages = ", ".join([f"{counted(len(first.stages), 'stage')} to {first.name}",
                            *(f"{len(pool.stages)} to {pool.name}" for pool in others)])
    if deployment.tp_degree > 1 and deployment.tp_gpus:
        return (f"{stages}; tensor parallelism of {deployment.tp_degree} on {deployment.tp_gpus} "
                "devices")
    return f"{stages}; no tensor parallelism"


def _latency(schedule: Schedule) -> str:
    return _latency_against(schedule.estimate.figures.latency_s, schedule.bound.limit_s,
                            schedule.bound.kind, schedule.bound.quantile)


def _latency_against(latency_s: float, bound_s: float, kind: str, quantile: float) -> str:
    latency = format_seconds(latency_s)
    of = "of all queries" if kind == "queries" else "of the output lengths"
    meaning = f"{quantile * 100:g} % {of}"
    if math.isinf(bound_s):
        return f"{latency} for {meaning}; no bound"
    verb = "within" if latency_s <= bound_s else "OVER"
    return f"{latency} for {meaning}, {verb} the bound of {format_seconds(bound_s)}"


def _bound_cost(schedule: Schedule) -> str:
    if math.isinf(schedule.bound.limit_s):
        return "none was set"
    lost, free = lost_to_bound(schedule), schedule.proof.unbounded_qps
    if lost is None or free is None:
        return "its cost was not computed"
    if not lost:
        return "costs nothing"
    return (f"costs {percent(lost, digits=1)} of the throughput "
            f"({plain(free)} queries/s without it)")


def _status(schedule: Schedule) -> str:
    most_qps = schedule.proof.bound_qps
    if schedule.proof.status == JOB_STATUS:
        return schedule.proof.status if math.isinf(most_qps) else (
            f"{schedule.proof.status} (the steady state gives at most {plain(most_qps)} queries/s)")
    if not math.isfinite(schedule.proof.gap):
        return f"{schedule.proof.status}, no gap proved"
    gap = f"gap {percent(schedule.proof.gap, digits=2)}"
    status = schedule.proof.status.removesuffix(" gap")  # "within gap", "optimal", ...
    return (f"{schedule.proof.status}, {gap}" if status == schedule.proof.status else
            f"{status} {gap}{proved_against(schedule)}")


def _memory(e: Estimate) -> str:
    sizes = e.figures.memory_bytes
    if not sizes:
        return "-"
    least, most = format_bytes(min(sizes)), format_bytes(max(sizes))
    spread = most if least == most else f"{least} to {most}"
    fits = "" if e.figures.fits else ": DOES NOT FIT"
    return f"{spread} of {format_bytes(e.figures.memory_capacity_bytes)} per rank{fits}"


def fact(label: str, value: str) -> str:
    return textwrap.fill(_ascii(value), WIDTH, initial_indent=label.ljust(_LEFT_OF_FACTS),
                         subsequent_indent=" " * _LEFT_OF_FACTS, break_on_hyphens=False)


def table(header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int]) -> str:
    """Aligned columns; where they exceed the width, a last column of words goes on in lines of its
    own, or else the widest column is shortened."""
    cells = [[_ascii(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    excess = sum(widths) + len(_GAP) * (len(widths) - 1) - WIDTH
    last = len(header) - 1
    if excess > 0 and last not in right and widths[last] - excess >= _LEAST_WRAPPED:
        widths[last] -= excess
        cells = [line for row in cells for line in _wrapped(row, widths[last])]
    elif excess > 0:
        widest = widths.index(max(widths))
        widths[widest] = max(widths[widest] - excess, 4)
    lines = [_line(row, widths, right) for row in cells]
    lines.insert(1, "-" * (sum(widths) + len(_GAP) * (len(widths) - 1)))
    return "\n".join(lines)


def _wrapped(row: Sequence[str], width: int) -> list[list[str]]:
    """The row in as many lines as its last cell needs."""
    parts = textwrap.wrap(row[-1], width, break_on_hyphens=False) or [""]
    return [[*(row[:-1] if i == 0 else [""] * (len(row) - 1)), part]
            for i, part in enumerate(parts)]


def _line(row: Sequence[str], widths: Sequence[int], right: Sequence[int]) -> str:
    shown = [cell if len(cell) <= width else cell[: width - 3] + "..."
             for cell, width in zip(row, widths, strict=True)]
    return _GAP.join(cell.rjust(width) if i in right else cell.ljust(width)
                     for i, (cell, width) in enumerate(zip(shown, widths, strict=True))).rstrip()


def _ascii(text: str) -> str:
    return text.encode("ascii", "backslashreplace").decode("ascii")
