"""How a job file names its requests and the file of its results; every mistake says its remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from xgpt.core.errors import InputError
from xgpt.job.job import Job
from xgpt.job.job_file import load_job
from xgpt.requests.request_files import STDIN, RequestFiles

JOB = """
model: opt-13b
cluster: a40-4
workload:
  requests: PLACE
  output_tokens: {mean: 5, std: 1, max: 9}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "b[1]").mkdir()  # a folder's own brackets are no pattern
    root = tmp_path / "b[1]"
    for name in ("c.jsonl", "a.jsonl", "b.csv", "x[0].jsonl", "data.parquet"):
        (root / name).touch()
    (root / "deep" / "er").mkdir(parents=True)
    (root / "deep" / "er" / "a.jsonl").touch()
    return root


def job(folder: Path, requests: str, *more: str) -> Job:
    path = folder / "job.yaml"
    path.write_text(JOB.replace("PLACE", requests) + "\n".join(more) + "\n")
    return load_job(path)


def files(folder: Path, requests: str) -> RequestFiles:
    found = job(folder, requests).workload.requests
    assert found is not None
    return found


def names(folder: Path, requests: str) -> list[str]:
    return [str(path.relative_to(folder)) for path in files(folder, requests).paths]


def refusal(folder: Path, requests: str, *more: str) -> str:
    with pytest.raises(InputError) as caught:
        job(folder, requests, *more)
    return str(caught.value)


def test_files_lists_and_patterns_are_found(folder: Path) -> None:
    assert names(folder, "c.jsonl") == ["c.jsonl"]
    assert names(folder, "[c.jsonl, b.csv]") == ["c.jsonl", "b.csv"]
    assert names(folder, "'*.jsonl'") == ["a.jsonl", "c.jsonl", "x[0].jsonl"]
    assert names(folder, "'x[0].jsonl'") == ["x[0].jsonl"]
    assert names(folder, "'**/a.jsonl'") == ["a.jsonl", "deep/er/a.jsonl"]
    # what two of them name is read once, where it was named first
    assert names(folder, "[c.jsonl, '?.jsonl']") == ["c.jsonl", "a.jsonl"]
    assert names(folder, "{file: '[ab].*'}") == ["a.jsonl", "b.csv"]
    assert files(folder, "'-'").paths == (STDIN,) and files(folder, "'-'").is_stdin
    bare = load_job(folder / "job.yaml", ["workload.requests=-"]).workload.requests
    assert bare is not None and bare.is_stdin


def test_columns_and_format_are_told_beside_the_file(folder: Path) -> None:
    found = files(folder, "{file: b.csv, format: tsv, prompt: question, id: nr, delimiter: ';', "
                  "options: false, carry: [topic, b]}")
    assert found == RequestFiles(
        paths=(folder / "b.csv",), format="tsv", prompt="question", id="nr", delimiter=";",
        has_options=False, carry=("topic", "b"))
    assert files(folder, "{file: b.csv, messages: chat}").messages == "chat"
    assert files(folder, "{file: b.csv, carry: []}").carry == ()


def test_requests_are_the_same_only_if_read_alike(folder: Path) -> None:
    assert files(folder, "a.jsonl").rules == files(folder, "{file: b.csv, format: jsonl}").rules
    plain = files(folder, "b.csv").rules
    assert files(folder, "{file: b.csv, carry: [x]}").rules == plain != ""
    others = [files(folder, text).rules for text in (
        "{file: b.csv, prompt: x}", "{file: b.csv, delimiter: ';'}", "{file: b.csv, format: text}",
        "{file: b.csv, options: false}", "[b.csv, a.jsonl]", "[a.jsonl, b.csv]", "a.jsonl")]
    assert len({plain, *others}) == 8


@pytest.mark.parametrize(("requests", "words"), [
    ("none.jsonl", ["job.yaml:5", "workload.requests", "no such file",
                    "there: a.jsonl, b.csv, c.jsonl"]),
    ("b.cvs", ["did you mean 'b.csv'?"]), ("'*.txt'", ["no file matches", "*.txt"]),
    ("deep", ["is a folder: name its files, for example deep/*.jsonl"]),
    ("-", ["needs quotes: '*.csv', '-'"]), ("*.csv", ["needs quotes: '*.csv', '-'"]),
    ("['-', a.jsonl]", ["standard input) stands alone"]), ("[]", ["a list of files"]),
    ("[a.jsonl, none.csv]", ["no such file", "none.csv"]), ("[[a]]", ["a list of files"]),
    ("{file: b.csv, count: 3}", ["either file or count"]),
    ("{file: b.csv, format: excel}", ["requests.format", "jsonl, json, text, csv, tsv, parquet"]),
    ("{file: b.csv, promt: x}", ["unknown key; did you mean 'prompt'?"]),
    ("{file: b.csv, prompt: a, messages: b}", ["either prompt or messages"]),
    ("{file: b.csv, delimiter: ';;'}", ["one character"]),
    ("{file: a.jsonl, format: text, delimiter: ';'}", ["only with CSV and TSV"]),
    ("{file: b.csv, carry: [a, a]}", ["a list of columns"]),
    ("{file: b.csv, options: 3}", ["true or false"]), ("{format: csv}", ["file: where they are"])])
def test_a_mistake_says_what_is_allowed(folder: Path, requests: str, words: list[str]) -> None:
    message = refusal(folder, requests)
    assert all(word in message for word in words), message


@pytest.mark.parametrize(("requests", "said", "name"), [
    ("a.jsonl", "", None), ("b.csv", "", "out/results.csv"), ("'-'", "", None),
    ("data.parquet", "", "out/results.parquet"), ("{file: a.jsonl, format: tsv}", "",
                                                   "out/results.tsv"),
    ("b.csv", "results: off", None), ("b.csv", "results: false", None),
    ("b.csv", "results: answers.parquet", "answers.parquet"),
    ("a.jsonl", "results: deep/x.csv.gz", "deep/x.csv.gz"), ("{count: 3}", "", None)])
def test_the_results_of_a_table_are_a_table_unless_told_otherwise(
        folder: Path, requests: str, said: str, name: str | None) -> None:
    text = "input_tokens: {mean: 5, std: 1, max: 9}" if "count" in requests else "max_tokens: 9"
    path = folder / "job.yaml"
    path.write_text(JOB.replace("PLACE", requests) + f"  {text}\n{said}\n")
    assert load_job(path).results == (None if name is None else folder / name)


@pytest.mark.parametrize(("said", "words"), [
    ("answers.xlsx", ["results", ".csv, .tsv, .parquet or .jsonl"]), ("b.csv", ["holds the requ"]),
    ("out/results.jsonl", ["written in any case"]), ("deep.csv", ["not a folder"]),
    ("3", ["a file whose name ends"]), ("x.parquet.gz", ["a file whose name ends"])])
def test_results_that_cannot_be_written_are_refused(
        folder: Path, said: str, words: list[str]) -> None:
    (folder / "deep.csv").mkdir()
    message = refusal(folder, "b.csv", f"results: {said}")
    assert all(word in message for word in words), message


def test_formulas_are_quoted_in_text_tables_alone(folder: Path) -> None:
    path = folder / "job.yaml"
    path.write_text(JOB.replace("PLACE", "b.csv") + "  max_tokens: 9\nquote_formulas: true\n")
    assert load_job(path).quote_formulas
    for place, said in (("b.csv", "results: x.parquet"), ("a.jsonl", "results: off")):
        assert "quote_formulas" in refusal(folder, place, f"{said}\nquote_formulas: true")
