"""What `xgpt schedule` shows when asked for more than the schedule: what more of each limit would
bring, ways to go on from a deployed schedule, and drifting lengths."""

import math
import textwrap
from collections.abc import Callable, Sequence

from xgpt.core.constraint import Constraint
from xgpt.core.units import format_bytes, format_seconds
from xgpt.report.figures import plain
from xgpt.report.table import fact, paragraph, shown_width, table
from xscheduler.drift import DriftRow
from xscheduler.live.given_stages import Way
from xscheduler.live.reschedule import Reschedule, variables
from xscheduler.price import Offer

_INDENT = "  "


def offers_table(offers: Sequence[Offer]) -> str:
    """What a little more of each limit would bring."""
    return "\n".join(["What more would bring", *(
        textwrap.fill(offer.sentence, shown_width(), initial_indent=_INDENT, break_on_hyphens=False,
                      subsequent_indent=2 * _INDENT) for offer in offers)])


def reschedule_table(ways: Reschedule) -> str:
    """The three ways to go on from a deployed schedule, and which is recommended."""
    lines = [fact("keep", _way(ways.keep)), fact("adjust", _way(ways.adjust)),
             fact("redeploy", _way(ways.redeploy) + _cost(ways)), fact("advice", ways.sentence)]
    return "\n".join(["From the schedule that is deployed", *lines])


def _way(way: Way) -> str:
    if way.estimate is None:
        return way.reason or "-"
    e = way.estimate
    text = (f"{plain(e.figures.throughput_qps)} queries/s, latency "
            f"{format_seconds(e.figures.latency_s)}: {variables(e)}")
    return text if way.reason is None else f"not admissible, {way.reason} ({text})"


def _cost(ways: Reschedule) -> str:
    if ways.loading is None:
        return ""
    loading, queries = ways.loading, ways.break_even_queries
    pays = ("never made up for" if math.isinf(queries) else
            "nothing else is admissible" if queries == 0 else
            f"made up for after {math.ceil(queries):,} queries")
    return (f"; loads {format_bytes(loading.total_bytes)}, {format_seconds(loading.from_dram_s)} "
            f"from DRAM or {format_seconds(loading.from_ssd_s)} from SSD: {pays}")


def drift_table(rows: Sequence[DriftRow], constraint: Constraint) -> str:
    """The schedule under changed output lengths, beside the best schedule for each."""
    body = [(row.statistic, _change(row), _known(row.kept.throughput_qps, plain),
             "-" if row.best is None else _known(row.best.throughput_qps, plain),
             _known(row.kept.queries_s, format_seconds), _kept(row.keeps_queries),
             _known(row.kept.sequence_s, format_seconds), _kept(row.keeps_sequence))
            for row in rows]
    text = table(("changed", "by", "queries/s", "best", "all", "", "one query", ""), body,
                 right=(1, 2, 3, 4, 6))
    share = f"{constraint.quantile * 100:g} %"
    words = (f"Replayed as it is, while output lengths differ. best: the best schedule for those "
             f"lengths, without a margin. all: the latency that {share} of all queries keep. one "
             f"query: the mean latency of one as long as the planned {share} quantile. over: over "
             f"the bound by more than the replay's scatter of 2 %.")
    return f"When output lengths change\n{text}\n{paragraph(words)}"


def _change(row: DriftRow) -> str:
    is_skewness = row.statistic == "skewness"
    change = row.change if is_skewness else row.change - 1
    return "-" if change == 0 else f"{change:+.1f}" if is_skewness else f"{change:+.0%}"


def _known(value: float, text: Callable[[float], str]) -> str:
    return "-" if math.isnan(value) else text(value)


def _kept(is_kept: bool | None) -> str:
    return "over" if is_kept is False else ""
