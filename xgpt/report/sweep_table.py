"""A sweep's rows for the terminal: in full, or the best policy beside the others where there are
many points. A point without a schedule says why, in as many lines as that takes."""

import math
import textwrap
from collections import Counter
from collections.abc import Sequence

from xgpt.core.units import format_seconds
from xgpt.report.sweep_rows import INFEASIBLE, OK, REFUSED, Row, number_of
from xgpt.report.table import fact, shown_width, table
from xgpt.report.words import counted

MANY_POINTS, MANY_POLICIES = 40, 3  # from which on only the best policy gets a line


def sweep_text(rows: Sequence[Row]) -> str:
    """The table of all scenarios, and how many points have a schedule."""
    by_scenario: dict[str, list[Row]] = {}
    for row in rows:
        by_scenario.setdefault(row["scenario"], []).append(row)
    policies = {row["policy"] for row in rows}
    is_brief = len(rows) >= MANY_POINTS and len(policies) >= MANY_POLICIES
    parts = []
    for scenario, own in by_scenario.items():
        text = _best_table(own) if is_brief else _full_table(own)
        text += _reasons([row for row in own if not is_brief or row["status"] == REFUSED])
        parts.append(f"{scenario}\n{text}" if len(by_scenario) > 1 else text)
    if len(by_scenario) > 1:
        parts.append(_summary(rows, is_brief))
    return "\n\n".join(parts)


def _full_table(rows: Sequence[Row]) -> str:
    """A line a point."""
    has_margin = any((number_of(row, "margin") or 1.0) > 1.0005 for row in rows)
    is_run = any(row["measured_status"] for row in rows)
    has_copies = any((number_of(row, "replicas") or 1) > 1 for row in rows)
    header = ["bound", "policy", *["copies"] * has_copies, "queries/s", "latency"]
    header += ["margin"] * has_margin + ["measured"] * is_run + ["schedule"]
    body = []
    for row in rows:
        cells = [bound_text(row), row["chosen"] or row["policy"],
                 *[str(row.get("replicas") or row.get("copies") or "-")] * has_copies,
                 _qps(row, "throughput_qps"), _seconds(row, "latency_s")]
        if has_margin:
            margin = number_of(row, "margin")
            cells.append("-" if margin is None else f"{margin - 1:.1%}")
        if is_run:
            cells.append(row["measured_status"] if row["measured_qps"] is None and
                         row["measured_status"] else _qps(row, "measured_qps"))
        body.append([*cells, schedule_words(row)])
    return table(header, body, right=tuple(range(2, len(header) - 1)))


def _best_table(rows: Sequence[Row]) -> str:
    """A line a bound: the best policy, and what the others reach."""
    by_bound: dict[str, list[Row]] = {}
    for row in rows:
        by_bound.setdefault(row["bound"], []).append(row)
    body = []
    for own in by_bound.values():
        ranked = sorted((row for row in own if row["status"] == OK),
                        key=lambda row: -row["throughput_qps"])
        without = [row["policy"] for row in own if row["status"] != OK]
        others = [f"{row['policy']} {row['throughput_qps']:.3g}" for row in ranked[1:]]
        words = ", ".join(others) + (
            ("; " if others else "") + f"no schedule: {', '.join(without)}" if without else "")
        best = ranked[0] if ranked else own[0]
        body.append([bound_text(own[0]), best["policy"] if ranked else "none",
                     _qps(best, "throughput_qps"), _seconds(best, "latency_s"), words])
    return table(("bound", "best", "queries/s", "latency", "others, queries/s"), body,
                 right=(2, 3))


def _reasons(rows: Sequence[Row]) -> str:
    """Why points have no schedule, each reason once, in lines of their own."""
    points: dict[str, list[str]] = {}
    for row in rows:
        if row["status"] != OK:
            points.setdefault(" ".join(str(row["reason"]).split()), []).append(
                row["policy"] if row["status"] == REFUSED else
                f"{row['policy']} at {bound_text(row)}")
    return "".join("\n" + textwrap.fill(
        f"{', '.join(dict.fromkeys(own))}: {reason}", shown_width(), break_on_hyphens=False,
        break_long_words=False, subsequent_indent="  ") for reason, own in points.items())


def schedule_words(row: Row) -> str:
    """The control variables of a row."""
    if row["status"] != OK:
        return "no schedule" if row["status"] == INFEASIBLE else "cannot be planned"
    words = str(row["controls"]).partition(": ")[2] or str(row["controls"])
    degree = row["tp_degree"] or 1
    return words + (f"; TP {degree} on {row['tp_gpus']}" if degree > 1 else "")


def bound_text(row: Row) -> str:
    """The bound in seconds, with the share that it was given as."""
    bound_s = number_of(row, "bound_s")
    if bound_s is None:
        return str(row["bound"])
    text = "none" if math.isinf(bound_s) else format_seconds(bound_s)
    return f"{text} ({row['bound']})" if str(row["bound"]).endswith("%") else text


def _summary(rows: Sequence[Row], is_brief: bool) -> str:
    solved = [row for row in rows if row["status"] == OK]
    text = f"{counted(len(rows), 'point')}, {len(solved)} with a schedule"
    if is_brief:
        best: dict[tuple[str, str], Row] = {}
        for row in solved:
            place = row["scenario"], row["bound"]
            if place not in best or row["throughput_qps"] > best[place]["throughput_qps"]:
                best[place] = row
        wins = Counter(row["policy"] for row in best.values())
        text += "; the best is " + ", ".join(
            f"{policy} {counted(count, 'time')}" for policy, count in wins.most_common())
        if len(solved) < len(rows):
            text += ". Why a point has none is told in its row, as `reason`"
    return fact("sweep", text)


def _qps(row: Row, name: str) -> str:
    value = number_of(row, name)
    return "-" if value is None else f"{value:.4g}"


def _seconds(row: Row, name: str) -> str:
    value = number_of(row, name)
    return "-" if value is None else format_seconds(value)
