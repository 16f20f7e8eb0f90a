"""Rows of a sweep whose requests arrive over time, so that a point has a capacity: the best
deployment of each workload, what a workload costs with that of another, and charts."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from operator import itemgetter

from xgpt.core.units import format_seconds
from xgpt.report.chart import PALETTE, Axis, Chart, Series
from xgpt.report.figures import plain
from xgpt.report.sweep_rows import GIVEN_UP, OK, Row, grouped, lacking, number_of, title_of
from xgpt.report.table import paragraph, table
from xgpt.report.words import counted

LINES = ("rate", "scale")  # axes along which a deployment is followed
WORTH = "capacity per price of an hour (or per device, without prices)"
_FIGURES = {"ttft_p90_s": "TTFT P90", "tpot_p99_s": "TPOT P99"}
_MOST_ROWS, _MOST_REASONS = 30, 3  # chosen
ServedTable = tuple[str, Sequence[str], Sequence[Sequence[str]]]  # title, header, rows


def are_served(rows: Iterable[Row]) -> bool:
    """Whether the requests of any row arrive over time."""
    return any(row.get("deployment") is not None for row in rows)


def worth_of(row: Row) -> float:
    """Capacity per price of a point; 0 without a schedule."""
    return (number_of(row, "capacity_per_price") or 0.0) if row.get("status") == OK else 0.0


def best_points(rows: Iterable[Row]) -> dict[str, Row]:
    """The point of the highest worth of each workload, by its scenario."""
    return {name: max(own, key=worth_of) for (name,), own in grouped(
        filter(worth_of, rows), "scenario").items()}


def bests_elsewhere(rows: Collection[Row]) -> list[str]:
    """Keys of points that were given up, and whose deployment is the best of another workload."""
    best = {row["deployment"] for row in best_points(rows).values()}
    return [row["key"] for row in rows if row["status"] == GIVEN_UP and row["deployment"] in best]


def served_tables(rows: Sequence[Row]) -> list[ServedTable]:
    """The points along a rate or a scale, or else the best deployment of each workload; where
    workloads vary, these and how many times as much one costs with that of another."""
    lines, best, one = lines_of(rows), best_points(rows), len({row["scenario"] for row in rows}) < 2
    shown = [row for row in rows if row.get("ttft_p90_s")] if lines else [*best.values()]
    found: list[ServedTable] = [(
        f"{'each point: the' if lines else 'the best'} {WORTH}",
        ("workload", *lines, "capacity", "per price", "attained",
         *_FIGURES.values(), "deployment")[one:],
        [(str(row["scenario"]), *(str(row.get(axis)) for axis in lines),
          *("-" if value is None else form(value) for value, form in (
              (number_of(row, "capacity_qps"), plain), (worth_of(row) or None, plain),
              (number_of(row, "attainment"), "{:.1%}".format),
              *((number_of(row, name), format_seconds) for name in _FIGURES))),
          row["deployment"] or f"{row.get('chosen')}, {row.get('replicas')} x TP "
          f"{row.get('tp_degree')} PP {row.get('stages')}")[one:] for row in shown[:_MOST_ROWS]])]
    if len(best) > 1 and not lines:
        worth = {(row["scenario"], row["deployment"]): worth_of(row) for row in rows}
        found.append((
            "times the cost of a workload with the best deployment of another",
            ("workload", *(f"that of {name}" for name in best)),
            [(name, *(f"{worth_of(own) / other:.2f}" if (
                other := worth.get((name, its["deployment"]), 0.0)) else "-"
                for its in best.values())) for name, own in best.items()]))
    return found


def served_headline(rows: Sequence[Row]) -> str:
    """The number of points, and how many of them have which status."""
    counts = Counter(str(row.get("status")) for row in rows)
    return f"{counted(len(rows), 'point')}, as predicted: " + ", ".join(
        f"{count} {status}" for status, count in counts.items())


def served_text(rows: Sequence[Row]) -> str:
    """The headline, the tables as text, and why points have no capacity."""
    said = [paragraph(served_headline(rows))]
    for title, header, body in filter(itemgetter(2), served_tables(rows)):
        said += [paragraph(title), table(header, body, [
            at for at, name in enumerate(header) if name not in ("workload", "deployment")])]
    return "\n".join([*said, *(paragraph(f"no capacity: {why}")
                               for *_, why in lacking(rows)[:_MOST_REASONS])])


def served_charts(rows: Sequence[Row]) -> list[Chart]:
    """For each workload the worth against TTFT P90 and against TPOT P99, Pareto points joined."""
    drawn = list[Chart]()
    for place, ((scenario,), own) in enumerate(grouped(
            filter(worth_of, rows), "scenario").items()):
        for name, words in _FIGURES.items():
            points = sorted((row for row in own if row.get(name) is not None), key=itemgetter(name))
            groups = grouped(points, "policy")
            groups["Pareto",] = [row for at, row in enumerate(points) if worth_of(row) > max(
                map(worth_of, points[:at]), default=0.0)]
            drawn.append(Chart(
                name=f"{name}-{place}", title=f"{scenario}: {words}", y=Axis(
                    label=WORTH, from_zero=True), x=Axis(label=f"{words}, seconds", from_zero=True),
                series=[Series(
                    label=title_of(line), colour=PALETTE[at % len(PALETTE)],
                    kind="line+dots" if line == "Pareto" else "dots",
                    x=[row[name] for row in them], y=[worth_of(row) for row in them],
                    notes=[str(row["deployment"] or row.get("controls")) for row in them])
                    for at, ((line,), them) in enumerate(groups.items())]))
    return drawn


def lines_of(rows: Sequence[Row]) -> list[str]:
    """The axes of LINES that vary."""
    return [axis for axis in LINES if len({row.get(axis) for row in rows}) > 1]
