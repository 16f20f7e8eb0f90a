"""Every number of a job file has a stated range, and beyond it is refused by its key."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from xgpt.core.errors import InputError
from xgpt.job.job_file import load_job

SCHEMA = Path(__file__).resolve().parents[3] / "docs/schema/job.schema.json"
BASE = """\
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
def test_no_number_is_without_a_range(tmp_path: Path, value: str) -> None:
    assert len(KEYS) > 50
    path, taken = tmp_path / "job.yaml", []
    path.write_text(BASE, encoding="utf-8")
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
