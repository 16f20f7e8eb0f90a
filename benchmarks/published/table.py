"""The table of benchmarks/validated.py: how far predictions are off, source by source."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from published.compared import Compared, errors_of, joined
from xgpt.report.table import paragraph, shown_width, table

_HEADER = ("operator", "of", "cases", "mean", "median", "bias", "P90", "worst")
_RIGHT = range(2, 8)
_NARROW = 72  # columns of a terminal below which the spread is left out
_BRIEF = (0, 1, 2, 3, 5)  # what of the header is kept then


def validation_table(compared: Sequence[Compared], *, by_model: bool = False) -> str:
    """A table for each source; the models of a source together unless `by_model`."""
    sources: dict[str, list[Compared]] = defaultdict(list)
    for part in compared:
        sources[part.source].append(part)
    return "\n\n".join(_section(source, own, by_model) for source, own in sources.items())


def chooser_table(choosers: Sequence[Any]) -> str:
    """The table of choices that predictions would have made."""
    rows = [(f"{c.left_out} left out" if c.left_out else "all fitted", c.margin,
             f"{c.choices.cases:,}", _percent(c.choices.none), _percent(c.choices.broken),
             _percent(c.choices.exact), _percent(c.choices.regret)) for c in choosers]
    return "\n".join((
        "as a chooser of the configuration of most throughput within a bound",
        table(("points", "margin", "cases", "no answer", "broken", "best", "regret"), rows,
              right=range(2, 7)),
        paragraph("no answer and best: of the cases; broken: of the answers; regret: throughput "
                  "that answers which keep their bound miss.")))


def levels_table(figures: Mapping[str, Any]) -> str:
    """The levels of doubt, and how often a promised confidence was kept."""
    promised = [confidence for confidence, _ in next(iter(figures["kept"].values()))]
    levels = [(name, f"{row['cases']:,}", _percent(row["fitted"]), _percent(row["mean"]),
               f"{row['bias']:+.0%}", *(f"{math.exp(log):.2f}" for _, log in row["quantiles"]))
              for name, row in figures["levels"].items()]
    kept = [(name, *(_percent(share) for _, share in rows))
            for name, rows in figures["kept"].items()]
    chances = [f"{confidence:.0%}" for confidence in promised]
    return "\n".join((
        "levels of doubt: measured over computed time that is not exceeded with a probability",
        table(("level", "cases", "fitted", "left out", "bias", *chances), levels,
              right=range(1, 12)), "",
        "promised with a probability, and kept by runs whose group was left out",
        table(("left out", *chances), kept, right=range(1, 9))))


def _section(source: str, parts: Sequence[Compared], by_model: bool) -> str:
    groups: dict[tuple[str, ...], list[Compared]] = defaultdict(list)
    for part in parts:
        of = (f"{part.model}, " if by_model else "") + f"{part.gpu}, {part.engine}"
        groups[part.operator, of, part.left_out].append(part)
        if part.left_out:
            groups[part.operator, "ALL", part.left_out].append(part)
    rows = [(f"{operator}, {left_out} left out" if left_out else operator, of, *_cells(joined(own)))
            for (operator, of, left_out), own in groups.items()
            if any(len(part.measured_s) for part in own)]
    if shown_width() < _NARROW:
        brief = [[row[i] for i in _BRIEF] for row in (_HEADER, *rows)]
        lines = [source, table(brief[0], brief[1:], right=range(2, len(_BRIEF)))]
    else:
        lines = [source, table(_HEADER, rows, right=_RIGHT)]
    skipped: Mapping[str, int] = _skipped(parts)
    if skipped:
        lines.append(paragraph("not compared: " + "; ".join(
            f"{count:,} ({why})" for why, count in skipped.items())))
    return "\n".join(lines)


def _cells(found: Compared) -> tuple[str, ...]:
    e = errors_of(found)
    return (f"{e.cases:,}", _percent(e.mean), _percent(e.median), f"{e.bias:+.0%}",
            _percent(e.p90), _percent(e.worst))


def _skipped(parts: Sequence[Compared]) -> dict[str, int]:
    counts: dict[str, int] = defaultdict(int)
    for part in parts:
        if part.skipped:
            counts[part.why] += part.skipped
    return counts


def _percent(share: float) -> str:
    return "-" if share != share else f"{share:.1%}" if share < 1 else f"{share:.0%}"
