"""A run, a sweep or several runs as Markdown: the tables of their pages, and links to pictures."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from urllib.parse import quote

from xgpt.report import figures
from xgpt.report.bounds import check_bound
from xgpt.report.chart import Chart
from xgpt.report.comparison import Run, differences, figure_rows
from xgpt.report.comparison import headline as comparison_headline
from xgpt.report.next_steps import next_steps
from xgpt.report.output import Output, text_at
from xgpt.report.policy_words import schedule_sentences
from xgpt.report.sweep_charts import by_scenario, title_of
from xgpt.report.sweep_page import headline as sweep_headline
from xgpt.report.sweep_page import lacking, winners
from xgpt.report.sweep_rows import OK, SweepRows, number_of
from xgpt.report.sweep_table import bound_text
from xgpt.report.words import banner, clean, headline

_MOST_POINTS = 300  # of a sweep
_SPECIAL = str.maketrans({mark: f"\\{mark}" for mark in "\\`*_[]<>|#~"})


def run_markdown(output: Output, pictures: Sequence[tuple[Chart, Path]]) -> str:
    """The report of one run."""
    metrics = figures.metrics_of(output)
    check = check_bound(output)
    parts = [f"# {_text(headline(output, metrics))}", _text(f"{check.sentence}.")]
    if (note := banner(output)) is not None:
        parts.append(_text(note))
    rows = figures.comparisons(metrics)
    if (unpredicted := figures.why_not_predicted(metrics)) is not None:
        parts += ["## Measured", _table(
            ("quantity", "measured"), [(row.label, row.measured) for row in rows]),
            _text(unpredicted)]
    else:
        parts += ["## Predicted against measured", _table(
            ("quantity", "predicted", "measured", "ratio", ""), [
                (row.label, row.predicted, row.measured, row.ratio_text, row.verdict_text)
                for row in rows])]
    if (why := text_at(metrics, "attribution", "sentence")) is not None:
        parts.append(_text(f"Why: {why}."))
    if (schedule := output.schedule) is not None:
        parts += ["## The schedule", *map(_text, (
            *schedule_sentences(schedule.estimate), *schedule.explanation))]
        parts += ["## Considered and not chosen", _table(
            ("alternative", "queries/s", "why not"), [
                (row.label, "-" if row.throughput_qps is None else figures.plain(
                    row.throughput_qps), row.reason) for row in schedule.rejected])]
    steps = next_steps(output, metrics, check)
    parts += ["## What to try next", "\n".join(
        f"- {_text(step.why)}\n\n      xgpt {_line(step.command)}\n" for step in steps)
    ] if steps else []
    return _joined([*parts, *_pictures(pictures)])


def comparison_markdown(runs: Sequence[Run], pictures: Sequence[tuple[Chart, Path]]) -> str:
    """Several runs beside one another."""
    header = ("", *(run.name for run in runs))
    return _joined([
        f"# {_text(comparison_headline(runs))}",
        _table(header, [(name, *cells) for name, cells in figure_rows(runs)]),
        "## What the jobs differ in",
        _table(header, [(key, *cells) for key, cells in differences(runs)]),
        *_pictures(pictures)])


def sweep_markdown(sweep: SweepRows, pictures: Sequence[tuple[Chart, Path]]) -> str:
    """A sweep: the best policy of each scenario and bound, and what has no schedule."""
    solved = [row for row in sweep.rows if row.get("status") == OK]
    best = [winner for name, rows in by_scenario(sweep.rows).items()
            for winner in winners(name, rows)]
    return _joined([
        f"# {_text(str(sweep.meta.get('name')))}", _text(f"{sweep_headline(sweep.rows)}."),
        "## The best policy, and where it changes",
        _table(("scenario", "bound", "best", "queries/s", "ahead of the next", "control variables",
                "why another than under the tighter bound"), best),
        "## All points", _table(
            ("scenario", "bound", "policy", "queries/s", "latency", "schedule"), [
                (str(row.get("scenario")), bound_text(row), title_of(str(row.get("policy"))),
                 figures.quantity(number_of(row, "throughput_qps"), "").rstrip(),
                 figures.quantity(number_of(row, "latency_s"), "s"),
                 str(row.get("controls") or "-")) for row in solved[:_MOST_POINTS]]),
        *([f"and {len(solved) - _MOST_POINTS} more, in sweep.jsonl"]
          if len(solved) > _MOST_POINTS else []),
        "## Without a schedule", _table(("scenario", "policy", "bound", "why"),
                                        lacking(sweep.rows)), *_pictures(pictures)])


def _pictures(pictures: Sequence[tuple[Chart, Path]]) -> list[str]:
    return [f"![{_text(chart.title)}]({quote(path.as_posix())})"
            + (f"\n\n{_text(chart.caption)}" if chart.caption else "") for chart, path in pictures]


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(_text(cell) for cell in row) + " |" for row in (header, *rows)]
    lines.insert(1, "|" + "---|" * len(header))
    return "\n".join(lines) if len(lines) > 2 else "None."


def _text(text: str) -> str:
    """As words that Markdown takes for nothing else, in one line."""
    return " ".join(clean(text).split()).translate(_SPECIAL)


def _line(command: str) -> str:
    """A command to copy, in one line; what its paths would do to a terminal is an escape."""
    return clean(command).replace("\n", "\\n")


def _joined(parts: Sequence[str]) -> str:
    return "\n\n".join(parts) + "\n"
