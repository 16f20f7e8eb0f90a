"""Holding the files of a run to their schemas (docs/schema/)."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

SCHEMAS = Path(__file__).resolve().parents[2] / "docs" / "schema"
OF_FILE = {"schedule.json": "schedule", "profile.json": "profile", "metrics.json": "metrics",
           "measured.json": "measured", "progress.json": "progress",
           "expected.json": "expected",
           "results.jsonl": "results-line", "held.jsonl": "results-line",
           "errors.jsonl": "errors-line", "steps.jsonl": "steps-line"}


@cache
def validator(name: str) -> Draft202012Validator:
    schema = json.loads((SCHEMAS / f"{name}.schema.json").read_text("utf-8"))
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def faults(name: str, value: Any) -> list[str]:
    """What keeps a value from being of a schema."""
    return [f"{name}: {error.json_path}: {error.message[:200]}; the schemas are made by "
            "docs/schema/make.py" for error in validator(name).iter_errors(value)]


def faults_of_folder(output: Path) -> list[str]:
    """Of all files of a run's output that have a schema."""
    found = []
    for file, name in OF_FILE.items():
        path = output / file
        if not path.is_file():
            continue
        content = path.read_text("utf-8")
        values = content.splitlines() if file.endswith("l") else [content]
        found += [fault for each in values for fault in faults(name, json.loads(each))]
    return found
