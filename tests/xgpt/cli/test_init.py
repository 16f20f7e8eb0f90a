"""`xgpt init`: a job file from options alone, from questions, and what it refuses."""

import json
import math
import os
import pty
import subprocess
import sys

import pytest
from click.testing import CliRunner, Result

import xgpt.cli.init as module
from xgpt.app import init as new_job
from xgpt.app.init import look_at
from xgpt.cli.main import cli
from xgpt.job.job_file import load_job

REVIEWS = 'id,stars,review\n1,5,"Lovely, ""quiet"" hotel.\nAgain!"\n2,1,Cold rooms all week.\n'


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "reviews.csv").write_text(REVIEWS)
    return tmp_path


def init(*arguments: str, answers: str | None = None) -> Result:
    return CliRunner().invoke(cli, ["init", *arguments], input=answers)


def done(result: Result) -> Result:
    assert result.exit_code == 0, result.output + repr(result.exception)
    return result


def test_without_a_word_it_takes_what_is_here(folder):
    result = done(init("--model", "opt-125m"))
    assert "column 'review' of reviews.csv" in " ".join(result.stderr.split())
    assert result.stdout.endswith("Next:  xgpt submit job.yaml\n")
    job = load_job(folder / "job.yaml")
    assert (job.name, job.model, job.cluster) == ("reviews", "opt-125m", "local")
    files = job.workload.requests
    assert files is not None and files.paths == (folder / "reviews.csv",)
    assert files.prompt == "review" and job.output == folder / "out" / "reviews"
    assert math.isinf(job.constraint.latency_s) and job.workload.max_tokens == 256
    text = (folder / "job.yaml").read_text()
    assert "2 prompts" in text and max(map(len, text.splitlines())) <= 100


def test_every_question_has_an_option(folder):
    done(init("jobs/mine.yaml", "--prompts", "reviews.csv", "--column", "id", "--model", "opt-125m",
              "--max-tokens", "32", "--latency", "90s"))
    job = load_job(folder / "jobs" / "mine.yaml")
    assert job.workload.requests is not None and job.workload.requests.prompt == "id"
    assert job.workload.requests.paths == (folder / "reviews.csv",), "named from the job's folder"
    assert (job.name, job.constraint.latency_s, job.workload.max_tokens) == ("mine", 90.0, 32)


def test_the_job_is_planned_as_it_is(folder):
    (folder / "q.jsonl").write_text("".join(
        json.dumps({"tokens": [5] * (20 + i)}) + "\n" for i in range(30)))
    done(init("--prompts", "q.jsonl", "--model", "opt-125m"))
    text = (folder / "job.yaml").read_text()
    assert "requests: q.jsonl\n" in text and "characters" not in text
    planned = CliRunner().invoke(cli, [
        "schedule", "job.yaml", "--set", "cluster=a40-4", "--json", "--set",
        "schedule={policy: rra, encode_chunk: 0, tp_degree: 1}"], catch_exceptions=False)
    assert planned.exit_code == 0
    assert json.loads(planned.stdout)["figures"]["throughput_qps"] > 0


def test_it_tells_what_prompts_share(folder):
    (folder / "q.jsonl").write_text("".join(
        json.dumps({"tokens": [*range(40), 50 + i, 9]}) + "\n" for i in range(30)))
    shown = done(init("--prompts", "q.jsonl", "--model", "opt-125m")).stdout
    table = shown[shown.index("prefix tokens kept"):].splitlines()
    assert table[2].split() == ["16,384", "92", "%", "92", "%"] and table[5].split()[0] == "all"
    assert "saved" not in done(init("b.yaml", "--prompts", "reviews.csv", "--model",
                                    "opt-125m")).stdout


def test_on_a_terminal_it_asks_and_proposes(folder, monkeypatch):
    monkeypatch.setattr(module, "can_ask", lambda: True)
    monkeypatch.setattr(module, "model_here", lambda: "opt-125m")
    # the file, a column that is none, the column, the model, the cap, a bound that is none, a bound
    result = done(init(answers="\nnope\n\n\n100\nsoon\n10s\n"))
    asked = result.output
    assert "stars" in asked and "Lovely" in asked and "[review]" in asked
    assert "inf for no limit" in asked and "'soon'" in asked
    job = load_job(folder / "job.yaml")
    assert job.workload.max_tokens == 100 and job.constraint.latency_s == 10.0
    assert max(map(len, asked.splitlines())) <= 120


def test_it_writes_over_nothing_without_being_told(folder):
    (folder / "job.yaml").write_text("mine")
    init("--model", "opt-125m")
    assert (folder / "job.yaml").read_text() == "mine"
    done(init("--model", "opt-125m", "--force"))
    assert load_job(folder / "job.yaml").model == "opt-125m"


def test_a_model_that_is_only_planned_is_said_to_be(folder):
    result = done(init("--model", "gpt3-175b"))
    assert "not run here" in " ".join(result.stderr.split()) and "xgpt schedule" in result.stdout
    assert "It can be planned for, but not run here" in " ".join(
        (folder / "job.yaml").read_text().replace("# ", "").split())


def test_as_json_it_asks_nothing(folder):
    told = json.loads(done(init("--model", "opt-125m", "--json")).stdout)
    assert told["job"] == "job.yaml" and told["prompts"] == 2


@pytest.mark.parametrize("name", ["odd: name #1.csv", "caf\u00e9 'x' \"y\".csv", "-.csv"])
def test_names_that_yaml_would_misread(folder, name):
    (folder / name).write_text('no,"a: b # c"\n1,What is it?\n')
    done(init("--prompts", name, "--model", "opt-125m"))
    files = load_job(folder / "job.yaml").workload.requests
    assert files is not None and files.paths == (folder / name,) and files.prompt == "a: b # c"


@pytest.mark.parametrize(("name", "content", "column"), [
    ("a.json", '[{"q": 1, "question": "Why?"}, {"prompt": "p"}]', None),
    ("b.jsonl", '{"no": 1, "question": "Why so?"}\nnot json\n', "question"),
    ("c.txt", "one\ntwo\n", None), ("t.parquet", {"n": [1, 2], "text": ["a b c", "d"]}, "text")])
def test_the_likeliest_column_of_every_format_is_taken(folder, name, content, column):
    if isinstance(content, dict):
        pa = pytest.importorskip("pyarrow", reason="Parquet needs the extra `parquet`")
        pytest.importorskip("pyarrow.parquet").write_table(pa.table(content), folder / name)
    else:
        (folder / name).write_text(content)
    done(init("--prompts", name, "--model", "opt-125m"))
    assert load_job(folder / "job.yaml").workload.requests.prompt == column


def test_a_cap_leaves_room_for_the_longest_prompt(folder):
    spec = new_job.catalog.model("opt-125m")  # of 2,048 positions
    (folder / "long.txt").write_text("x" * 5700 + "\n")
    assert new_job.usual_max_tokens(spec, look_at(folder / "long.txt", None)) == 2048 - 1900
    (folder / "longer.txt").write_text("x" * 9000 + "\n")
    assert new_job.usual_max_tokens(spec, look_at(folder / "longer.txt", None)) == 256
    assert new_job.usual_max_tokens(spec, look_at(folder / "reviews.csv", "review")) == 256


def test_ctrl_c_at_a_question_leaves_no_file(folder):
    head, tail = pty.openpty()
    process = subprocess.Popen([sys.executable, "-m", "xgpt.cli.main", "init"], stdin=tail,
                               stdout=tail, stderr=tail, cwd=folder, start_new_session=True)
    os.close(tail)
    seen = b""
    while b"Which file" not in seen:
        seen += os.read(head, 4096)
    os.write(head, b"\x04")  # the end of the input
    assert process.wait(timeout=30) == 1
    os.close(head)
    assert not (folder / "job.yaml").exists()


def test_semicolons_are_found_and_told(folder):
    (folder / "fragen.csv").write_text("nr;frage\n1;Was ist, bitte, das?\n2;Und das hier?\n")
    said = " ".join(done(init("--prompts", "fragen.csv", "--model", "opt-125m")).stderr.split())
    assert "the cells of fragen.csv are divided by ';'" in said and "2 prompts" in said
    assert "column 'frage' of fragen.csv (it has nr, frage)" in said


def test_a_prompt_of_columns_labels_and_a_schema_become_keys(folder):
    (folder / "schema.json").write_text('{"type": "object"}')
    done(init("--prompts", "reviews.csv", "--model", "opt-125m", "--prompt", "Good? \"{review}\"",
              "--system", "You label: yes", "--choices", "yes, no"))
    workload = load_job(folder / "job.yaml").workload
    assert workload.requests is not None and workload.choices == ("yes", "no")
    assert workload.requests.terms[3:5] == ('Good? "{review}"', "You label: yes")
    assert workload.max_tokens == 4, "three bytes, and the end"
    done(init("jobs/b.yaml", "--prompts", "reviews.csv", "--model", "opt-125m", "--json-schema",
              "schema.json", "--max-tokens", "9"))
    job = load_job(folder / "jobs" / "b.yaml")
    assert job.workload.requests is not None and job.workload.max_tokens == 9
    assert json.loads(job.workload.requests.terms.form) == {
        "structured_outputs": {"json": {"type": "object"}}}


@pytest.mark.parametrize(("options", "words"), [
    (["--prompt", "Good?"], "names a column in braces"),
    (["--prompt", "Good? {text}"], "no column 'text'"),
    (["--prompt", "{review}", "--column", "review"], "--column"),
    (["--choices", "a,a"], "'a' is there twice"), (["--choices", "a,,b"], "none empty"),
    (["--json-schema", "none.json"], "No such file"),
    (["--choices", "a", "--json-schema", "none.json"], "left out beside --json-schema")])
def test_wrong_keys_of_prompts_and_answers_leave_no_file(folder, options, words):
    result = init("--prompts", "reviews.csv", "--model", "opt-125m", *options)
    assert result.exit_code != 0 and words in str(result.exception) + result.output
    assert not (folder / "job.yaml").exists()
