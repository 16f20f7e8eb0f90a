"""Whole commands with real ranks label a table of texts. Each answer is one of the choices. A run
that was killed goes on to the same answers."""

import csv
import json
import signal
from pathlib import Path

import openai_batch
import pytest
from by_data_sheets import COMMAND
from job_folder import read_lines
from mpi_runs import call, said, stopped_under_way

pytest.importorskip("llguidance", reason="forms need the extra `structured`")
pytestmark = pytest.mark.mpi
CHOICES = ["positive", "negative", "no idea, really"]
TEXTS = ["Lovely, \"quiet\" rooms.\nAgain!", "",
         *(f"Room {i} was {'co' * (i % 5)}ld." for i in range(18))]
SCHEDULE = "policy: rra, encode_batch: 3, decode_iterations: 4, replicas: 1"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bytes")
    openai_batch.write_model(folder)
    return folder


def labelled(folder: Path, model: Path, schedule: str, more: str = "") -> Path:
    """A job of 20 rows, one of them without a text."""
    folder.mkdir()
    with (folder / "reviews.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("id", "text", "stars"), *(
            (f"r{i}", text, i % 5) for i, text in enumerate(TEXTS))])
    (folder / "job.yaml").write_text(f"""
model: {model}
cluster: local
workload:
  requests: reviews.csv
  prompt: "Say which of {{{{the}}}}: {{text}}"
  system: You label.
  choices: {json.dumps(CHOICES)}
schedule: {{{schedule}}}
run: {{ranks: 2, dtype: float32, threads_per_rank: 1}}
output: out
{more}""")
    return folder / "job.yaml"


def answers(folder: Path) -> dict[str, list[int]]:
    return {line["id"]: line["output_ids"] for line in read_lines(folder / "out/results.jsonl")}


def test_a_table_is_labelled_and_a_killed_run_goes_on_to_the_same_answers(tmp_path, model, cache):
    whole = labelled(tmp_path / "whole", model, f"{SCHEDULE}, tp_degree: 2, tp_gpus: 2")
    told = said(call("submit", whole, env=cache, xgpt=COMMAND))
    assert "max_tokens is 16, " in told
    with (whole.parent / "out/results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["id"], row["text"], row["stars"]) for row in rows] == [
        (f"r{i}", text, str(i % 5)) for i, text in enumerate(TEXTS)]
    assert list(rows[0])[:5] == ["id", "text", "stars", "answer", "finish_reason"]
    labels = [row["answer"] for row in rows]
    assert labels[1] == "" and "columns of the prompt are empty: text" in rows[1]["error"]
    assert {*labels[:1], *labels[2:]} <= {*CHOICES}
    assert {row["finish_reason"] for row in rows} == {"stop", ""}

    killed = labelled(tmp_path / "killed", model, f"{SCHEDULE}, tp_degree: 1")
    stopped_under_way(["submit", killed], killed.parent / "out/results.jsonl", cache,
                      number=signal.SIGKILL, count=4, xgpt=COMMAND)
    call("submit", killed, env=cache, xgpt=COMMAND)
    assert answers(killed.parent) == answers(whole.parent) and len(answers(whole.parent)) == 19


def test_a_schema_of_the_job_and_one_of_a_line_are_kept_by_a_deterministic_run(
        tmp_path, model, cache):
    (tmp_path / "schema.json").write_text(json.dumps(openai_batch.SCHEMA))
    own = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": ["own"]}}}
    wrong = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"items": {"type": 5}}}}
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [
        {"prompt": "a"}, {"prompt": "b", "response_format": own},
        {"prompt": "c", "response_format": wrong}, {"prompt": "d", "forced_tokens": 4}]))
    job = tmp_path / "job.yaml"
    job.write_text(f"""
model: {model}
cluster: local
workload: {{requests: lines.jsonl, json_schema: schema.json, max_tokens: 60}}
run: {{ranks: 1, dtype: float32, threads_per_rank: 1, deterministic: true}}
output: out
""")
    call("submit", job, env=cache, xgpt=COMMAND)
    first, second = read_lines(tmp_path / "out/results.jsonl")
    assert json.loads(first["text"]).keys() == {"colour", "is_big"}
    assert json.loads(second["text"]) == "own"
    errors = [line["error"] for line in read_lines(tmp_path / "out/errors.jsonl")]
    assert errors[0].startswith("response_format.json_schema.schema.items: ")
    assert "forced_tokens goes with no form" in errors[1]
