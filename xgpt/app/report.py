"""Writes the report of a run, of a sweep, or of several runs to compare: as a page or as pictures.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from xgpt.core.errors import XgptError, wrong
from xgpt.job.sweep_file import SWEEP_FOLDER
from xgpt.report import figures
from xgpt.report.chart import Chart, write_image
from xgpt.report.output import read_output
from xgpt.report.page import (
    comparison_charts,
    read_runs,
    run_charts,
    write_comparison,
    write_report,
)
from xgpt.report.results_file import write_results
from xgpt.report.sweep_page import sweep_charts, write_sweep_page
from xgpt.report.sweep_rows import SWEEP_FILE, read_sweep
from xgpt.requests.spool import num_queries
from xgpt.run_folder.files import RunFolder
from xgpt.run_folder.state import has_begun

Form = Literal["html", "png"]


def write_reports(folders: Sequence[Path], form: Form = "html", out: Path | None = None,
                  ) -> list[Path]:
    """Writes the report of a run or a sweep, or a comparison of several runs, and returns the paths
    written: a page, or a picture per chart. For a job without a run it is its sweep's. `out`: by
    default in the folder, for a comparison in the current one. Raises XgptError where a folder has
    neither, MissingExtraError for pictures without matplotlib."""
    folders = [_with_a_report(folder) for folder in folders]
    first, *others = folders
    for folder in folders:
        if not _has_run(folder):
            raise XgptError(f"{folder}: it has no run whose ranks have started, and no sweep")
    if others and (sweeps := [folder for folder in folders if _is_sweep(folder)]):
        raise wrong("command line", "DIR", str(sweeps[0]), "the folder of a run: sweeps are "
                    "reported one by one")
    if form == "png":
        folder = out or (Path("compare") if others else first / "report-pictures")
        folder.mkdir(parents=True, exist_ok=True)
        pictures = {folder / f"{chart.name}.png": chart for chart in _charts(folders)}
        for path, chart in pictures.items():
            write_image(chart, path)
        return list(pictures)
    if others:
        return [write_comparison(folders, out or Path("compare.html"))]
    return [(write_sweep_page if _is_sweep(first) else write_report)(first, out)]


def write_tables(places: Sequence[RunFolder]) -> list[Path]:
    """Writes the table of a run's results so far, if its job has the key `results`, and returns its
    path in a list; an empty list for several runs."""
    if len(places) > 1 or (table := places[0].results) is None or (
            num_queries(places[0].output) is None):
        return []
    write_results(places[0].output, table, places[0].quote_formulas)
    return [table]


def _with_a_report(folder: Path) -> Path:
    """The folder itself, or that of the job's sweep below it where the job has not run."""
    below = folder / SWEEP_FOLDER
    return below if not _has_run(folder) and _is_sweep(below) else folder


def _has_run(folder: Path) -> bool:
    return has_begun(folder) or _is_sweep(folder)


def _is_sweep(folder: Path) -> bool:
    return (folder / SWEEP_FILE).is_file()


def _charts(folders: Sequence[Path]) -> list[Chart]:
    if len(folders) > 1:
        return comparison_charts(read_runs(folders))
    if _is_sweep(folders[0]):
        return sweep_charts(read_sweep(folders[0]).rows)
    output = read_output(folders[0], 0)
    return run_charts(output, figures.metrics_of(output))
