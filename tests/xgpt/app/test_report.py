"""`xgpt report`: which folder gets which report, in which form."""

import json
import sys
from pathlib import Path

import fake_run
import pytest
from fake_run import HOSTILE, write_fake_run, write_fake_sweep

from jobs import job
from xgpt.app.report import write_reports, write_tables
from xgpt.app.running.prepare import keep_earlier_results, make_folder
from xgpt.app.teller import LogTeller
from xgpt.core.errors import InputError, MissingExtraError, XgptError
from xgpt.job.job import Job
from xgpt.report.chart import can_draw
from xgpt.report.page import differences, figure_rows, headline, read_runs
from xgpt.report.words import tight
from xgpt.requests.spool import Record
from xgpt.run_folder.files import find_run
from xrunner.plan import RunPlan

pytest.importorskip("jinja2", reason="a page needs jinja2 (extra: run)")
needs_matplotlib = pytest.mark.skipif(not can_draw(), reason="matplotlib is not installed")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs in folders of the same name, whose jobs differ in one key."""
    folder = tmp_path_factory.mktemp("runs")
    made = [write_fake_run(folder / name / "out", num_queries=count)
            for name, count in (("a", 8), ("b", 12))]
    job = json.loads((made[1] / "job.json").read_text())
    job["constraint"]["latency_s"] = 20
    job["model"] = HOSTILE
    (made[1] / "job.json").write_text(json.dumps(job))
    return made


def test_runs_and_the_fastest_are_named_by_what_tells_them_apart_and_differences_told(runs):
    read = read_runs(runs)
    assert [run.name for run in read] == ["a/out", "b/out"]
    assert [run.name for run in read_runs(runs[:1])] == ["out"]
    told = dict(differences(read))
    assert told["constraint.latency_s"] == ["30", "20"]
    assert set(told) == {"constraint.latency_s", "model", "workload.requests"}
    rows = dict(figure_rows(read))
    assert rows["Requests"] == ["8", "12"] and rows["Policy"] == ["RRA", "RRA"]
    assert all("(predicted 2.05 requests/s)" in cell for cell in rows["Throughput"])
    first, second = read_runs(runs)
    half = dict(first.metrics) | {"throughput_qps": {"measured": 1.0}}
    twice = dict(second.metrics) | {"throughput_qps": {"measured": 2.5}}
    both = [first._replace(metrics=half), second._replace(metrics=twice)]
    assert headline(both) == ("b/out is 2.50 times as fast as a/out: 2.50 requests/s against "
                              "1.00 requests/s")
    assert headline([first._replace(metrics={}), second]) == "2 runs"


def test_a_comparison_holds_every_run_also_without_answers_and_escapes(runs, tmp_path):
    (path,) = write_reports(runs, "html", tmp_path / "both.html")
    page = path.read_text("utf-8")
    assert f"<h1>{tight(headline(read_runs(runs)))}.</h1>" in page
    assert HOSTILE not in page and "unsafe-eval" not in page
    assert page.count("data-chart=") == 2
    empty = write_fake_run(tmp_path / "empty", num_queries=3)
    for name in ("metrics.json", "results.jsonl"):
        (empty / name).unlink()
    (path,) = write_reports([runs[0], empty], "html", tmp_path / "c.html")
    assert "Runs without an answer yet: empty" in path.read_text("utf-8")


@needs_matplotlib
def test_pictures_are_of_the_charts(runs, tmp_path):
    for folders in (runs[:1], runs):
        pictures = write_reports(folders, "png", tmp_path / f"pictures-{len(folders)}")
        assert pictures and all(
            picture.read_bytes().startswith(b"\x89PNG") for picture in pictures)
    pictures = write_reports([write_fake_sweep(tmp_path / "out")], "png")
    assert [path.name for path in pictures] == ["all.png", "scenario-0.png", "scenario-1.png"]


def test_of_a_job_that_was_swept_alone_the_sweep_is_reported(tmp_path, runs):
    folder = write_fake_sweep(tmp_path / "job" / "sweep")
    assert write_reports([tmp_path / "job"]) == [folder / "report.html"]
    run = write_fake_run(tmp_path / "both", num_queries=3)
    write_fake_sweep(run / "sweep")
    assert write_reports([run]) == [run / "report.html"]
    with pytest.raises(XgptError, match="it has no run whose ranks have started, and no sweep"):
        write_reports([runs[0], tmp_path])
    with pytest.raises(InputError, match="sweeps are reported one by one"):
        write_reports([runs[0], write_fake_sweep(tmp_path / "s")])


def job_of(folder: Path, results: str) -> Job:
    return job(folder, output="out", results=json.dumps(results))


def plan_of(job: Job) -> RunPlan:
    return RunPlan(
        name="job", output=job.output, model_dir=job.output, model_name="m", served_by="",
        requests="", is_chat=False, max_tokens=5, dtype="float32", weight_dtype="float32", seed=0,
        temperature=0.0, top_k=None, top_p=1.0, ignore_eos=False, threads_per_rank=1,
        query_kv_tokens=20)


def test_the_folder_of_a_table_is_made_and_what_keeps_it_from_being_written_is_told(
        tmp_path, monkeypatch):
    make_folder(job_of(tmp_path, "new/deep/answers.csv"))
    assert (tmp_path / "new" / "deep").is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="results.*a folder that can be made"):
        make_folder(job_of(tmp_path, "file/answers.csv"))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match=r"answers.parquet.*pip install .*\[parquet\]"):
        make_folder(job_of(tmp_path, "answers.parquet"))


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_table_that_stands_there_is_kept_or_goes_on(tmp_path, goes_on):
    job = job_of(tmp_path, "answers.csv")
    make_folder(job)
    job.results.write_text("somebody's own")
    if goes_on:
        plan_of(job).save()
    keep_earlier_results(job.output, plan_of(job), LogTeller(), job.results)
    kept = [path.read_text() for path in tmp_path.glob("answers-*.csv")]
    assert kept == ["somebody's own"] * (not goes_on) and job.results.exists() == goes_on


def test_a_report_of_a_folder_writes_the_table_that_its_job_asked_for(tmp_path):
    out, table = tmp_path / "out", tmp_path / "answers.csv"
    out.mkdir()
    said = {"name": "job", "constraint": {"latency_s": "inf"}, "results": str(table)}
    (out / "job.json").write_text(json.dumps(said))
    assert write_tables([find_run(out)]) == []  # nothing was read yet
    fake_run.write_spool(out, [Record(id=f"q{i}", line=i + 1) for i in range(3)])
    (out / "results.jsonl").write_text('{"index": 0, "text": "yes"}\n')
    assert write_tables([find_run(out)]) == [table]
    assert [line[:7] for line in table.read_text().splitlines()] == ["id,answ", "q0,yes,"]
    assert write_tables([find_run(out)] * 2) == []
