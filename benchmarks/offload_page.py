"""The page of `offload.py`, from its outcomes."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from offload_runs import Outcome
from runner import machine, table, today

PLANNED, ROWS, MEMORY = "xgpt, as planned", "xgpt, row order, device batch 8", "xgpt, in memory"
RESIDENT, WHOLE, ZERO = ("accelerate, embedding in memory", "accelerate, disk_offload",
                         "ZeRO-Inference")
PEERS = {RESIDENT: ("accelerate", "run_accelerate.py", "--mode", "layers"),
         WHOLE: ("accelerate", "run_accelerate.py", "--mode", "all"),
         ZERO: ("zero", "run_zero_inference.py")}
BITS = (16, 4)
GOALS = {ROWS: 4.0, RESIDENT: 3.0, WHOLE: 3.0}  # times as quick
_FLOOR_GOAL, _BITS_GOAL, _OFF_GOAL = 0.85, 1.5, 0.15
_TERMS = ("read", "write", "up", "down", "compute")


def page(outcomes: Sequence[Outcome]) -> str:
    """All parts that have outcomes."""
    counted = [one for one in outcomes if one.round > 0 and not one.error]
    parts = [_heading(counted)]
    loads = dict.fromkeys(one.load for one in counted)
    for load in loads:
        found = [one for one in counted if one.load == load]
        if load == "placements":
            parts.append("\n".join(_placements(found)))
        elif load in ("lengths", "bits"):
            parts.append("\n".join(_pair(load, found)))
        else:
            parts.append("\n".join(_gain(load, found)))
    return "\n\n".join(parts + ["\n".join(_failures(outcomes))])


def _heading(outcomes: Sequence[Outcome]) -> str:
    others = max((one.others_share for one in outcomes), default=0.0)
    rates = [one.disk_bytes_per_s / 1e9 for one in outcomes] or [0.0]
    return (
        f"# Models larger than the memory, {machine()}, 2 threads\n\n"
        f"{today()}. Each run in a memory cgroup, whose limit counts the page cache; the model's "
        "files were dropped from the cache first. Medians (and ranges) of rounds in turns. The "
        "time of a run is without loading. Just before each run the disk gave "
        f"{statistics.median(rates):.2f} GB/s ({min(rates):.2f} to {max(rates):.2f}) past the "
        f"page cache. Other processes used at most {others:.0%} of the cores during a run.")


def _by_name(found: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    return {name: [one for one in found if one.name == name]
            for name in dict.fromkeys(one.name for one in found)}


def _gain(load: str, found: Sequence[Outcome]) -> Iterator[str]:
    rows = _by_name(found)
    best = _median([one.tokens_per_s for one in rows.get(PLANNED, [])])
    yield f"## {load}\n"
    yield from table(["", "tokens/s", f"{PLANNED}, is", "goal", "requests", "run (s)",
                      "whole command (s)", "most memory but the cache"])
    for name, runs in rows.items():
        rate = _median([one.tokens_per_s for one in runs])
        goal = GOALS.get(name)
        yield _row(name, _spread([one.tokens_per_s for one in runs], 2),
                   f"{best / rate:.2f} times" if best and rate else "",
                   "" if goal is None else f"{goal:.0f}", runs[0].requests,
                   _spread([one.run_s for one in runs], 1),
                   _spread([one.whole_s for one in runs], 1),
                   f"{max(one.anonymous_bytes for one in runs) / 2**20:.0f} MiB")
    if PLANNED in rows:
        yield ""
        yield from _floor(rows)
        yield ""
        yield from _terms(rows[PLANNED])


def _floor(rows: dict[str, list[Outcome]]) -> Iterator[str]:
    """Reading alone: the run's own bytes at the rate of the disk just before it."""
    runs = rows[PLANNED]
    reading = _median([one.moved_bytes("read") / one.disk_bytes_per_s for one in runs])
    run_s = _median([one.run_s for one in runs])
    computing = _median([one.run_s for one in rows.get(MEMORY, [])])
    floor = max(reading, computing)
    alone = f"{computing:.1f} s" if computing else "not measured"
    size = _median([one.moved_bytes("read") for one in runs]) / 1e9
    yield (f"Reading alone: {reading:.1f} s ({size:.1f} GB). Computing alone, the same requests in "
           f"memory without a limit: {alone}. The run, {run_s:.1f} s: {floor / run_s:.2f} of the "
           f"longer one (goal {_FLOOR_GOAL}).")
    yield f"Placement: `{runs[-1].placement}`, `{runs[-1].controls}`."


def _terms(runs: Sequence[Outcome]) -> Iterator[str]:
    yield from table(["term", "measured (s)", "predicted (s)", "measured (GB)", "predicted (GB)"])
    for term in _TERMS:
        own = [row for one in runs for row in one.terms if row["term"] == term]
        if any(row["measured_s"] or row["predicted_s"] for row in own):
            yield _row(term, *(_some([row[f"{of}_{unit}"] for row in own], divisor)
                               for unit, divisor in (("s", 1.0), ("bytes", 1e9))
                               for of in ("measured", "predicted")))


def _placements(found: Sequence[Outcome]) -> Iterator[str]:
    rows, off = _by_name(found), list[float]()
    yield "## Predicted and measured\n"
    yield from table(["placement", "measured (s)", "predicted (s)", "off",
                      *(f"{term}: measured / predicted (s)" for term in _TERMS)])
    for name, runs in rows.items():
        measured = _median([one.run_s for one in runs])
        predicted = _median([one.predicted_s or 0.0 for one in runs])
        off.append(measured / predicted - 1 if predicted else float("nan"))
        cells = []
        for term in _TERMS:
            own = [row for one in runs for row in one.terms if row["term"] == term]
            cells.append(f"{_some([row['measured_s'] for row in own])} / "
                         f"{_some([row['predicted_s'] for row in own])}" if any(
                             row["measured_s"] or row["predicted_s"] for row in own) else "")
        yield _row(name, f"{measured:.2f}", f"{predicted:.2f}", f"{off[-1]:+.0%}", *cells)
    size = sorted(abs(one) for one in off)
    yield (f"\nOff by {statistics.median(size):.0%} at the median of {len(size)} placements (goal "
           f"{_OFF_GOAL:.0%}), {size[-1]:.0%} at the worst.")


def _pair(load: str, found: Sequence[Outcome]) -> Iterator[str]:
    rows = _by_name(found)
    first, *others = rows
    of_first = _median([one.tokens_per_s for one in rows[first]])
    title = {"lengths": "`rra` beside `ft` on lengths of ShareGPT",
             "bits": f"Weights in 4 bits where reading binds (goal {_BITS_GOAL} times)"}[load]
    yield f"## {title}\n"
    yield from table(["", "tokens/s", f"{first} is 1; this is", "requests", "run (s)",
                      "predicted (s)", "read (GB)"])
    for name in (first, *others):
        runs = rows[name]
        yield _row(name, _spread([one.tokens_per_s for one in runs], 2),
                   f"{_median([one.tokens_per_s for one in runs]) / of_first:.2f}",
                   runs[0].requests, _spread([one.run_s for one in runs], 1),
                   _some([one.predicted_s for one in runs]),
                   _some([one.moved_bytes("read") for one in runs], 1e9))


def _failures(outcomes: Sequence[Outcome]) -> Iterator[str]:
    if any(one.error for one in outcomes):
        yield "## Runs that ended without figures\n"
        yield from table(["load", "contender", "requests", "why"])
        for one in outcomes:
            if one.error:
                why = one.error.replace("\n", " ").replace("|", "/")
                yield _row(one.load, one.name, one.requests or "", why[-300:])


def _row(*cells: object) -> str:
    return f"| {' | '.join(str(cell) for cell in cells)} |"


def _some(values: Sequence[float | None], divisor: float = 1.0) -> str:
    there = [value / divisor for value in values if value is not None]
    return f"{statistics.median(there):.2f}" if there else "-"


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0


def _spread(values: Sequence[float], digits: int) -> str:
    if len(values) == 1:
        return f"**{values[0]:.{digits}f}**"
    return (f"**{_median(values):.{digits}f}** ({min(values):.{digits}f} to "
            f"{max(values):.{digits}f})")
