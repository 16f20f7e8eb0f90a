"""The corpus of wrong job files (wrong_jobs.txt): each is refused with exit code 2, every mistake
by its file, line and key, and with the words that say what is allowed."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from xgpt.core.errors import EXIT_BAD_INPUT, InputError
from xgpt.job.job_file import load_job

BASE = {"model": "opt-13b", "cluster": "a40-4", "workload": "{task: S}"}
ROWS = [tuple(part.strip() for part in f"{line} | ".split(" | ")[:3])
        for line in Path(__file__).with_name("wrong_jobs.txt").read_text("utf-8").splitlines()
        if line and not line.startswith("#")]


@pytest.fixture
def folder(tmp_path):
    for name in ("a.jsonl", "b.csv", "c.jsonl", "x[0].jsonl", "data.parquet", "prompts.jsonl"):
        (tmp_path / name).touch()
    (tmp_path / "lengths.csv").write_text("input,output\n3,4\n")
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep.csv").mkdir()
    return tmp_path


def written(text):
    """(the job file, overrides) of a row: `KEY=VALUE` is an override, `= ` begins a whole file, and
    other parts, between ` ;; `, take the place of the base's keys or stand behind them."""
    text = text.encode().decode("unicode_escape")
    if text.startswith("="):
        return text[2:], []
    parts = text.split(" ;; ")
    overrides = [part for part in parts if re.match(r"[\w.]+=", part)]
    lines = "\n".join(part for part in parts if part not in overrides)
    own = set(re.findall(r"^(\w+):", lines, re.M))
    kept = "".join(f"{key}: {value}\n" for key, value in BASE.items() if key not in own)
    return f"{kept}{lines}\n", overrides


@pytest.mark.parametrize(("text", "keys", "said"), ROWS, ids=[row[0][:60] for row in ROWS])
def test_a_wrong_job_is_refused_by_file_line_and_key(folder, text, keys, said):
    content, overrides = written(text)
    path = folder / "job.yaml"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(InputError) as refused:
        load_job(path, overrides)
    mistakes, told = refused.value.mistakes, str(refused.value)
    assert refused.value.exit_code == EXIT_BAD_INPUT
    assert sorted({mistake.key for mistake in mistakes}) == keys.split(", "), told
    assert all(words in told for words in said.split(" / ") if words), told
    for mistake in mistakes:
        assert mistake.file in ("--set", str(path)), mistake
        assert mistake.line or mistake.file == "--set" or " " in mistake.key, mistake


SCHEMA = Path(__file__).resolve().parents[3] / "docs/schema/job.schema.json"
MOMENTS = """\
model: opt-13b
cluster: a40-4
workload:
  input_tokens: {mean: 4, std: 2, max: 9}
  output_tokens: {mean: 4, std: 2, max: 9}
"""
MAY_BE = {("run.seed", "9223372036854775807")}


def numbers(schema: Any, key: str = "") -> Iterator[str]:
    """The dotted names of all keys that may hold a number."""
    for name, value in schema.get("properties", {}).items():
        yield from numbers(value, f"{key}.{name}" if key else name)
    for form in schema.get("anyOf", ()):
        yield from numbers(form, key)
    kinds = schema.get("type", ())
    if {"integer", "number"} & {*([kinds] if isinstance(kinds, str) else kinds)}:
        assert "maximum" in schema, f"{key} has no largest value"
        yield key


KEYS = sorted(set(numbers(json.loads(SCHEMA.read_text(encoding="utf-8")))))


@pytest.mark.parametrize("value", [
    "9223372036854775807", "-9223372036854775808", "1e308", "-1e308", ".nan", "9" * 5000])
def test_no_number_is_without_a_range(tmp_path, value):
    assert len(KEYS) > 50
    path, taken = tmp_path / "job.yaml", []
    path.write_text(MOMENTS, encoding="utf-8")
    for key in KEYS:
        try:
            load_job(path, (f"{key}={value}",))
        except InputError as cause:
            # digits without end are no number, whose key it is
            if not [m for m in cause.mistakes if m.key.startswith(key) or m.key == "value"]:
                taken.append((key, value))
        else:
            taken.append((key, value))
    assert set(taken) <= MAY_BE
