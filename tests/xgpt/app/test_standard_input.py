"""Requests on standard input: read once a process, kept by a run, and found again without."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from runs import Told

from jobs import job as job_of
from xgpt.app.opened import open_job
from xgpt.app.standard_input import KEPT_FILE, standard_input
from xgpt.core.errors import InputError
from xgpt.core.job_file import load_job

LINES = b'{"tokens": [1, 2, 3]}\n{"tokens": [4]}\nbad\n'


@pytest.fixture
def job(tmp_path):
    return job_of(tmp_path, output="out", workload=(
        "{requests: '-', output_tokens: {mean: 5, std: 1, max: 9}}"))


def comes(monkeypatch: pytest.MonkeyPatch, raw: bytes) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(raw)))


def test_it_is_read_once_however_often_the_job_is_opened(job, monkeypatch):
    comes(monkeypatch, LINES)
    for _ in range(2):
        requests = open_job(job, Told(), "lengths").requests
        assert requests.input_tokens.tolist() == [3, 1] and len(requests.bad_lines) == 1
    assert not job.output.exists()


def test_a_run_keeps_it_and_goes_on_without(job, monkeypatch):
    comes(monkeypatch, LINES)
    assert standard_input(job, Told(), is_kept=True).seek(0, 2) == len(LINES)
    assert (job.output / KEPT_FILE).read_bytes() == LINES
    told, digests = Told(), []
    for raw in (b"", LINES):
        comes(monkeypatch, raw)
        requests = open_job(job, told, "lengths").requests
        digests.append(requests.digest)
    assert digests[0] == digests[1]
    assert sum("nothing came on standard input" in line for line in told.lines) == 1
    comes(monkeypatch, b'{"tokens": [9]}\n')
    other = open_job(job, told, "lengths").requests
    assert other is not None and other.digest != digests[0]


class Typed(io.BytesIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(("stream", "said"), [
    (io.BytesIO(), r"cat prompts.jsonl \| xgpt submit"), (None, r"cat prompts.jsonl \| xgpt"),
    (Typed(LINES), "nothing came"),  # a terminal is not waited for
    (io.BytesIO(b"What is it?\n"), "standard input.*format: text")])
def test_what_holds_no_requests_is_wrong_input(job, monkeypatch, stream, said):
    monkeypatch.setattr("sys.stdin", stream and io.TextIOWrapper(stream))
    with pytest.raises(InputError, match=said):
        open_job(job, Told(), "run")


def test_a_folder_that_cannot_keep_it_is_named(job, monkeypatch, tmp_path):
    comes(monkeypatch, LINES)
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="a folder that can be written to"):
        standard_input(replace(job, output=tmp_path / "file"), Told(), is_kept=True)


def test_files_without_a_request_say_what_may_be_meant(job, tmp_path):
    path = tmp_path / "prompts.jsonl"
    for content, said in (("What is it?\n", "line 1: not JSON.*format: text"), ("\n", "is empty")):
        path.write_text(content)
        with pytest.raises(InputError, match=said):
            open_job(load_job(job.source, ["workload.requests=prompts.jsonl"]), Told(), "lengths")
