"""What would keep a table of results from being written is found before the run; what stands in its
place is kept."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import fake_run
import pytest

from jobs import job
from xgpt.app.checks import make_folder
from xgpt.app.place import place_of
from xgpt.app.report import write_tables
from xgpt.app.run_folder import make_room
from xgpt.app.telling import LogTeller
from xgpt.core.errors import InputError, MissingExtraError
from xgpt.core.job import Job
from xgpt.core.spool import Record
from xrunner.plan import RunPlan


def job_of(folder: Path, results: str) -> Job:
    return job(folder, output="out", results=json.dumps(results))


def plan_of(job: Job) -> RunPlan:
    return RunPlan(
        name="job", output=job.output, model_dir=job.output, model_name="m", served_by="",
        requests="", is_chat=False, max_tokens=5, dtype="float32", weight_dtype="float32", seed=0,
        temperature=0.0, top_k=None, top_p=1.0, ignore_eos=False, threads_per_rank=1,
        query_kv_tokens=20)


def test_its_folder_is_made(tmp_path: Path) -> None:
    make_folder(job_of(tmp_path, "new/deep/answers.csv"))
    assert (tmp_path / "new" / "deep").is_dir()


def test_a_folder_that_cannot_be_made_is_wrong_input(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="results.*a folder that can be made"):
        make_folder(job_of(tmp_path, "file/answers.csv"))


def test_parquet_without_pyarrow_is_told_with_its_command(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match=r"answers.parquet.*pip install .*\[parquet\]"):
        make_folder(job_of(tmp_path, "answers.parquet"))


def test_what_stood_there_is_kept_under_another_name(tmp_path: Path) -> None:
    job = job_of(tmp_path, "answers.csv")
    make_folder(job)
    assert job.results is not None
    job.results.write_text("somebody's own")
    make_room(job.output, plan_of(job), LogTeller(), job.results)
    (kept,) = tmp_path.glob("answers-*.csv")
    assert kept.read_text() == "somebody's own" and not job.results.exists()


def test_of_a_job_that_goes_on_it_stays(tmp_path: Path) -> None:
    job = job_of(tmp_path, "answers.csv")
    make_folder(job)
    assert job.results is not None
    plan_of(job).save()
    job.results.write_text("id\n")
    make_room(job.output, plan_of(job), LogTeller(), job.results)
    assert job.results.is_file()


def test_a_report_of_a_folder_writes_the_table_that_its_job_asked_for(tmp_path: Path) -> None:
    out, table = tmp_path / "out", tmp_path / "answers.csv"
    out.mkdir()
    said = {"name": "job", "constraint": {"latency_s": "inf"}, "results": str(table)}
    (out / "job.json").write_text(json.dumps(said))
    assert write_tables([place_of(out)]) == []  # nothing was read yet
    fake_run.write_spool(out, [Record(id=f"q{i}", line=i + 1) for i in range(3)])
    (out / "results.jsonl").write_text('{"index": 0, "text": "yes"}\n')
    assert write_tables([place_of(out)]) == [table]
    assert [line[:7] for line in table.read_text().splitlines()] == ["id,text", "q0,yes,"]
    assert write_tables([place_of(out)] * 2) == []
