"""The corpus of wrong commands (wrong_commands.txt): each ends with its exit code, in words that
say what is allowed, prints nothing on stdout and leaves no file."""

import json
import shlex
from pathlib import Path

import pytest
from fake_run import write_fake_run
from job_folder import xgpt

from jobs import job_file

ROWS = [tuple(part.strip() for part in line.split(" | "))
        for line in Path(__file__).with_name("wrong_commands.txt").read_text("utf-8").splitlines()
        if line and not line.startswith("#")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("commands")
    job_file(folder, constraint="{latency_s: 11.5}")
    (folder / "folder").mkdir()
    (folder / "prompts.csv").write_text("id,prompt\n1,Why?\n")
    (folder / "bare.csv").write_text("nr,question\n")
    (folder / "empty.jsonl").touch()
    write_fake_run(folder / "run", num_queries=2)
    return folder


@pytest.mark.parametrize(("command", "code", "said"), ROWS, ids=[row[0][:60] for row in ROWS])
def test_a_wrong_command_ends_in_words(folder, monkeypatch, command, code, said):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    before = sorted(folder.rglob("*"))
    words = ["a" * 300 if word == "LONG" else word for word in shlex.split(command)]
    done = xgpt(*words)
    told = " ".join(done.stderr.split())
    assert (done.returncode, done.stdout) == (int(code), ""), told
    assert all(words in told for words in said.split(" / ")), told
    assert "Traceback" not in told and "fault of xgpt" not in told
    assert sorted(folder.rglob("*")) == before


def test_five_mistakes_are_five_lines_and_as_many_objects(tmp_path):
    path = job_file(tmp_path, model="opt-13c", cluster="a40-5", constraint="{latency_s: -1}",
                    workload="{requests: {count: 0}, task: S}", schdule="auto")
    done = xgpt("schedule", path)
    assert done.returncode == 2 and done.stdout == ""
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    keys = ("model", "cluster", "workload.requests.count", "constraint.latency_s", "schdule")
    lines = [path.read_text().splitlines().index(line) + 1 for key in keys for line in
             path.read_text().splitlines() if line.startswith(key.partition(".")[0])]
    assert sorted(zip(lines, keys, strict=True)) == sorted(
        (mistake["line"], mistake["key"]) for mistake in json.loads(
            xgpt("schedule", path, "--json").stdout)["mistakes"])
    for line, key in zip(lines, keys, strict=True):
        assert any(f"job.yaml:{line}: {key}" in error for error in errors), (key, errors)
    assert len(errors) == 5 and "did you mean 'opt-13b'" in done.stderr
