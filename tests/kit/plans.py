# owner tb
"""What ranks of a toy are told, the spool of its requests, and its results written."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from toys import write_spool

from xgpt.requests.spool import Spool
from xrunner.files.results import ResultWriter, count_results
from xrunner.plan import RunPlan
from xrunner.query import FinishedQuery


def plan_of(output: Path, model: Path, **changes: Any) -> RunPlan:
    values: dict[str, Any] = {
        "name": "toy", "output": output, "model_dir": model, "model_name": "toy",
        "served_by": "test", "requests": "test", "is_chat": False, "max_tokens": 8,
        "dtype": "float32", "weight_dtype": "float32", "seed": 2, "temperature": 0.5, "top_k": None,
        "top_p": 1.0, "ignore_eos": False, "threads_per_rank": 1, "query_kv_tokens": 40}
    return RunPlan(**{**values, **changes})


def spooled(plan: RunPlan, *requests: dict[str, Any] | str) -> tuple[Spool, list[dict[str, Any]]]:
    """(the spool, error records)"""
    path, errors = plan.output / "requests.jsonl", plan.output / "errors.jsonl"
    path.write_text("".join(
        (line if isinstance(line, str) else json.dumps(line)) + "\n" for line in requests))
    write_spool(plan, path)
    path.unlink()  # nobody needs it any more
    return Spool(plan.output), [json.loads(line) for line in errors.read_text().splitlines()
                                ] if errors.exists() else []


def open_writer(path: Path) -> ResultWriter:
    return ResultWriter(path, first_index=count_results(path), model="toy")


def written(path: Path, results: Iterable[FinishedQuery]) -> list[dict[str, Any]]:
    """The file's lines, once these are written to it."""
    writer = open_writer(path)
    for result in results:
        writer.write(result)
    writer.close()
    return [json.loads(line) for line in path.read_text().splitlines()]
