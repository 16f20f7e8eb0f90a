"""Why a schedule was chosen and what the alternatives would lose, as lines for the terminal."""

from __future__ import annotations

from xgpt.core.schedule import Rejected, Schedule
from xgpt.core.units import format_seconds
from xgpt.report.figures import lost_to, percent, plain
from xgpt.report.table import fact

_POLICY, _DEGREE, _FREE, _BARE = ("policy ", "tp_degree ", "without a latency bound",
                                  "without a margin")
_NO_PLAN = ", tp_degree 1, tp_gpus 0"


def choice_table(schedule: Schedule) -> str:
    """Why it was chosen, the best of each other policy and degree, and what the bound excluded."""
    lines = [fact("why" if index == 0 else "", sentence)
             for index, sentence in enumerate(schedule.explanation)]
    lines += [fact(_label(row), _alternative(row, schedule)) for row in schedule.rejected]
    return "\n".join(lines)


def _label(row: Rejected) -> str:
    what = row.label.partition(":")[0]
    if what.startswith(_POLICY):
        return f"best {what.removeprefix(_POLICY)}"
    if what.startswith(_DEGREE):
        return f"tp degree {what.removeprefix(_DEGREE)}"
    return {_FREE: "no bound", _BARE: "no margin"}.get(what, "instead")


def _alternative(row: Rejected, schedule: Schedule) -> str:
    what, _, point = row.label.partition(": ")
    is_known = what.startswith((_POLICY, _DEGREE, _FREE, _BARE))
    point = (point if is_known else row.label).removesuffix(_NO_PLAN)
    if row.throughput_qps is None:
        return f"{row.reason} ({point})" if point else row.reason
    share = lost_to(row, schedule)
    more = row.throughput_qps / schedule.estimate.figures.throughput_qps - 1
    words = [f"{plain(row.throughput_qps)} queries/s",
             f"{percent(share, digits=1)} less" if share is not None else
             f"{percent(more, digits=1)} more" if more > 5e-4 else "as many"]
    if row.latency_s is not None:
        words.append(f"latency {format_seconds(row.latency_s)}")
    return f"{', '.join(words)}: {point}" if point else ", ".join(words)
