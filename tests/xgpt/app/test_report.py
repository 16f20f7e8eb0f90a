"""`xgpt report`: which folder gets which report, in which form."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_run import HOSTILE, HOSTILE_TEXTS, write_fake_run, write_fake_sweep

from xgpt.app import report
from xgpt.app.report import write_reports
from xgpt.core.errors import InputError, XgptError
from xgpt.report.chart import can_draw
from xgpt.report.comparison import differences, figure_rows, headline, read_runs
from xgpt.report.words import tight

pytest.importorskip("jinja2", reason="a page needs jinja2 (extra: run)")
needs_matplotlib = pytest.mark.skipif(not can_draw(), reason="matplotlib is not installed")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs in folders of the same name, whose jobs differ in one key."""
    folder = tmp_path_factory.mktemp("runs")
    made = [write_fake_run(folder / name / "out", num_queries=count)
            for name, count in (("a", 8), ("b", 12))]
    job = json.loads((made[1] / "job.json").read_text())
    job["constraint"]["latency_s"] = 20
    job["model"] = HOSTILE
    (made[1] / "job.json").write_text(json.dumps(job))
    return made


def test_runs_are_named_by_what_tells_them_apart_and_differences_are_told(runs: list[Path]) -> None:
    read = read_runs(runs)
    assert [run.name for run in read] == ["a/out", "b/out"]
    assert [run.name for run in read_runs(runs[:1])] == ["out"]
    told = dict(differences(read))
    assert told["constraint.latency_s"] == ["30", "20"]
    assert set(told) == {"constraint.latency_s", "model", "workload.requests"}
    rows = dict(figure_rows(read))
    assert rows["Queries"] == ["8", "12"] and rows["Policy"] == ["RRA", "RRA"]
    assert all("(predicted 2.05 queries/s)" in cell for cell in rows["Throughput"])


def test_a_comparison_holds_every_run_and_escapes(runs: list[Path], tmp_path: Path) -> None:
    (path,) = write_reports(runs, "html", tmp_path / "both.html")
    page = path.read_text("utf-8")
    assert f"<h1>{tight(headline(read_runs(runs)))}.</h1>" in page
    assert HOSTILE not in page and "unsafe-eval" not in page
    assert page.count("data-chart=") == 4


def test_the_headline_tells_which_run_is_fastest(runs: list[Path]) -> None:
    first, second = read_runs(runs)
    half = dict(first.metrics) | {"throughput_qps": {"measured": 1.0}}
    twice = dict(second.metrics) | {"throughput_qps": {"measured": 2.5}}
    both = [first._replace(metrics=half), second._replace(metrics=twice)]
    assert headline(both) == ("b/out is 2.50 times as fast as a/out: 2.50 queries/s against "
                              "1.00 queries/s")
    assert headline([first._replace(metrics={}), second]) == "2 runs beside one another"


def test_a_run_that_has_answered_nothing_is_compared_and_named(runs: list[Path],
                                                              tmp_path: Path) -> None:
    empty = write_fake_run(tmp_path / "empty", num_queries=3)
    for name in ("metrics.json", "results.jsonl"):
        (empty / name).unlink()
    (path,) = write_reports([runs[0], empty], "html", tmp_path / "c.html")
    assert "Without an answer yet: empty" in path.read_text("utf-8")


@needs_matplotlib
def test_markdown_has_the_tables_links_its_pictures_and_escapes(runs: list[Path],
                                                               tmp_path: Path) -> None:
    path, *pictures = write_reports(runs[:1], "md", tmp_path / "run.md")
    text = path.read_text("utf-8")
    assert "| Throughput |" in text and "## What to try next" in text
    assert f"(run-pictures/{pictures[0].name})" in text
    assert all(picture.read_bytes().startswith(b"\x89PNG") for picture in pictures)
    assert HOSTILE_TEXTS[0] not in text and "\\<best\\>" in text
    both = write_reports(runs, "md", tmp_path / "both.md")[0].read_text("utf-8")
    assert "constraint.latency\\_s | 30 | 20" in both and HOSTILE not in both


@needs_matplotlib
def test_a_sweep_has_all_forms(tmp_path: Path) -> None:
    folder = write_fake_sweep(tmp_path / "out")
    assert write_reports([folder]) == [folder / "report.html"]
    pictures = write_reports([folder], "png")
    assert [path.name for path in pictures] == ["gain.png", "all.png", "scenario-0.png",
                                                "scenario-1.png"]
    text = write_reports([folder], "md")[0].read_text("utf-8")
    assert "RRA keeps no tighter bound" in text and HOSTILE not in text


def test_without_matplotlib_markdown_is_text_alone(runs: list[Path], tmp_path: Path,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "can_draw", lambda: False)
    assert write_reports(runs[:1], "md", tmp_path / "x.md") == [tmp_path / "x.md"]
    assert "![" not in (tmp_path / "x.md").read_text("utf-8")


def test_of_a_job_that_was_swept_alone_the_sweep_is_reported(tmp_path: Path) -> None:
    folder = write_fake_sweep(tmp_path / "job" / "sweep")
    assert write_reports([tmp_path / "job"]) == [folder / "report.html"]
    assert "## All points" in write_reports([tmp_path / "job"], "md")[0].read_text("utf-8")
    run = write_fake_run(tmp_path / "both", num_queries=3)
    write_fake_sweep(run / "sweep")
    assert write_reports([run]) == [run / "report.html"]


def test_folders_without_a_report_are_refused(runs: list[Path], tmp_path: Path) -> None:
    with pytest.raises(XgptError, match="no run whose ranks have started is there, and no sweep"):
        write_reports([runs[0], tmp_path])
    with pytest.raises(InputError, match="sweeps are reported one by one"):
        write_reports([runs[0], write_fake_sweep(tmp_path / "s")])
