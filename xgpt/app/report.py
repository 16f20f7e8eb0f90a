"""Reports of what folders hold, a run, a sweep, or several runs beside one another: as a page, as
Markdown, or as pictures."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from xgpt.app.place import Place
from xgpt.core.errors import XgptError, wrong
from xgpt.core.spool import num_queries
from xgpt.core.sweep_file import SWEEP_FOLDER
from xgpt.core.whole_file import write_atomically
from xgpt.report import figures, markdown
from xgpt.report.chart import Chart
from xgpt.report.comparison import comparison_charts, read_runs, write_comparison
from xgpt.report.image import can_draw, write_image
from xgpt.report.output import read_output
from xgpt.report.page import run_charts, write_report
from xgpt.report.results_file import write_results
from xgpt.report.sweep_charts import sweep_charts
from xgpt.report.sweep_page import write_sweep_page
from xgpt.report.sweep_rows import SWEEP_FILE, read_sweep

Form = Literal["html", "md", "png"]
COMPARISON, REPORT, PICTURES = "compare", "report", "report-pictures"


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
    return any((folder / name).is_file() for name in ("schedule.json", "results.jsonl", SWEEP_FILE))


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
        text = markdown.comparison_markdown(read_runs(folders), shown)
    elif _is_sweep(folders[0]):
        text = markdown.sweep_markdown(read_sweep(folders[0]), shown)
    else:
        text = markdown.run_markdown(read_output(folders[0], 0), shown)
    write_atomically(path, text)
    return [path, *drawn]
