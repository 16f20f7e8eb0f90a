"""Reports of what folders hold, a run, a sweep, or several runs beside one another: as a page, as
Markdown, or as pictures."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal
from urllib.parse import quote

from xgpt.core.errors import XgptError, wrong
from xgpt.core.system.whole_file import write_atomically
from xgpt.job.sweep_file import SWEEP_FOLDER
from xgpt.report import figures
from xgpt.report.chart import Chart, can_draw, write_image
from xgpt.report.comparison import (
    Run,
    comparison_charts,
    differences,
    figure_rows,
    read_runs,
    write_comparison,
)
from xgpt.report.comparison import headline as comparison_headline
from xgpt.report.figures import check_bound
from xgpt.report.output import Output, read_output, text_at
from xgpt.report.page import next_steps, run_charts, write_report
from xgpt.report.results_file import write_results
from xgpt.report.sweep_page import sweep_charts, write_sweep_page
from xgpt.report.sweep_rows import (
    OK,
    SWEEP_FILE,
    SweepRows,
    all_winners,
    bound_text,
    lacking,
    number_of,
    read_sweep,
    title_of,
)
from xgpt.report.sweep_rows import headline as sweep_headline
from xgpt.report.table import schedule_facts
from xgpt.report.words import banner, clean, headline, policy_sentence
from xgpt.requests.spool import num_queries
from xgpt.run_folder.files import Place
from xgpt.run_folder.state import has_begun

Form = Literal["html", "md", "png"]
COMPARISON, REPORT, PICTURES = "compare", "report", "report-pictures"
_MOST_POINTS = 300  # of a sweep
_SPECIAL = str.maketrans({mark: f"\\{mark}" for mark in "\\`*_[]<>|#~"})


def write_reports(folders: Sequence[Path], form: Form = "html", out: Path | None = None,
                  ) -> list[Path]:
    """Writes the report of a run's or a sweep's folder, or of several runs' to compare, and returns
    what was written, the report first. Of a job that was swept and has not run, it is the sweep's.
    By default it lies in the folder; a comparison where the command is given. Raises
    XgptError where a folder holds neither."""
    folders = [_with_a_report(folder) for folder in folders]
    for folder in folders:
        if not _has_run(folder):
            raise XgptError(f"{folder}: no run whose ranks have started is there, and no sweep")
    if len(folders) > 1 and (sweeps := [folder for folder in folders if _is_sweep(folder)]):
        raise wrong("command line", "DIR", str(sweeps[0]), "the folder of a run: sweeps are "
                    "reported one by one")
    if form == "html":
        return [_page(folders, out)]
    default = folders[0] / (PICTURES if form == "png" else f"{REPORT}.md") if (
        len(folders) == 1) else Path(f"{COMPARISON}.md" if form == "md" else COMPARISON)
    return _pictures(_charts(folders), out or default) if form == "png" else _markdown(
        folders, out or default)


def write_tables(places: Sequence[Place]) -> list[Path]:
    """Writes the table of a run's results so far, where its job asks for one; none of several,
    which are compared."""
    if len(places) > 1 or (table := places[0].results) is None or (
            num_queries(places[0].output) is None):
        return []
    write_results(places[0].output, table, places[0].quote_formulas)
    return [table]


def _with_a_report(folder: Path) -> Path:
    """The folder of a job's sweep where the job itself has not run: it lies below the job's."""
    below = folder / SWEEP_FOLDER
    return below if not _has_run(folder) and _is_sweep(below) else folder


def _has_run(folder: Path) -> bool:
    return has_begun(folder) or _is_sweep(folder)


def _is_sweep(folder: Path) -> bool:
    return (folder / SWEEP_FILE).is_file()


def _page(folders: Sequence[Path], out: Path | None) -> Path:
    if len(folders) > 1:
        return write_comparison(folders, out or Path(f"{COMPARISON}.html"))
    write = write_sweep_page if _is_sweep(folders[0]) else write_report
    return write(folders[0], out)


def _charts(folders: Sequence[Path]) -> list[Chart]:
    if len(folders) > 1:
        return comparison_charts(read_runs(folders))
    if _is_sweep(folders[0]):
        return sweep_charts(read_sweep(folders[0]).rows)
    output = read_output(folders[0], 0)
    return run_charts(output, figures.metrics_of(output))


def _pictures(charts: Sequence[Chart], folder: Path) -> list[Path]:
    """One picture a chart. Raises MissingExtraError without matplotlib."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{chart.name}.png" for chart in charts]
    for chart, path in zip(charts, paths, strict=True):
        write_image([chart], path)
    return paths


def _markdown(folders: Sequence[Path], path: Path) -> list[Path]:
    """The text, and beside it the pictures that it shows; without matplotlib the text alone."""
    charts = _charts(folders) if can_draw() else []
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn = _pictures(charts, path.with_name(f"{path.stem}-pictures")) if charts else []
    shown = [(chart, place.relative_to(path.parent))
             for chart, place in zip(charts, drawn, strict=True)]
    if len(folders) > 1:
        text = _comparison_markdown(read_runs(folders), shown)
    elif _is_sweep(folders[0]):
        text = _sweep_markdown(read_sweep(folders[0]), shown)
    else:
        text = run_markdown(read_output(folders[0], 0), shown)
    write_atomically(path, text)
    return [path, *drawn]


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
            policy_sentence(schedule.estimate), *schedule.explanation)),
            _table(("", ""), schedule_facts(schedule))]
        parts += ["## Considered and not chosen", _table(
            ("alternative", "queries/s", "why not"), [
                (row.label, "-" if row.throughput_qps is None else figures.plain(
                    row.throughput_qps), row.reason) for row in schedule.rejected])]
    steps = next_steps(output, metrics, check)
    parts += ["## What to try next", "\n".join(
        f"- {_text(step.why)}\n\n      xgpt {_line(step.command)}\n" for step in steps)
    ] if steps else []
    return _joined([*parts, *_shown(pictures)])


def _comparison_markdown(runs: Sequence[Run], pictures: Sequence[tuple[Chart, Path]]) -> str:
    """Several runs beside one another."""
    header = ("", *(run.name for run in runs))
    return _joined([
        f"# {_text(comparison_headline(runs))}",
        _table(header, [(name, *cells) for name, cells in figure_rows(runs)]),
        "## What the jobs differ in",
        _table(header, [(key, *cells) for key, cells in differences(runs)]),
        *_shown(pictures)])


def _sweep_markdown(sweep: SweepRows, pictures: Sequence[tuple[Chart, Path]]) -> str:
    """A sweep: the best policy of each scenario and bound, and what has no schedule."""
    solved = [row for row in sweep.rows if row.get("status") == OK]
    return _joined([
        f"# {_text(str(sweep.meta.get('name')))}", _text(f"{sweep_headline(sweep.rows)}."),
        "## The best policy, and where it changes",
        _table(("scenario", "bound", "best", "queries/s", "latency", "others, queries/s",
                "control variables", "why another than under the tighter bound"),
               all_winners(sweep.rows)),
        "## All points", _table(
            ("scenario", "bound", "policy", "queries/s", "latency", "schedule"), [
                (str(row.get("scenario")), bound_text(row), title_of(str(row.get("policy"))),
                 figures.quantity(number_of(row, "throughput_qps"), "").rstrip(),
                 figures.quantity(number_of(row, "latency_s"), "s"),
                 str(row.get("controls") or "-")) for row in solved[:_MOST_POINTS]]),
        *([f"and {len(solved) - _MOST_POINTS} more, in sweep.jsonl"]
          if len(solved) > _MOST_POINTS else []),
        "## Without a schedule", _table(("scenario", "policy", "bound", "why"),
                                        lacking(sweep.rows)), *_shown(pictures)])


def _shown(pictures: Sequence[tuple[Chart, Path]]) -> list[str]:
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
