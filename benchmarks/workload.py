"""The workload that comparisons share: 200 queries, all there at the start, each of which gives
exactly its number of tokens; and the job file with which xgpt runs them.

A workload file has lines {"input_ids": [...], "output_len": N}; `samples`: answers a line, drawn;
`targets`: the last so many inputs are scored, and nothing is written.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

QUERIES = 200


class Query(NamedTuple):
    input_ids: list[int]
    output_tokens: int
    samples: int = 1
    targets: int = 0


def read_or_draw(file: Path | None) -> list[Query]:
    """The file's queries; without one they are drawn: inputs about N(128, 81) on [1, 256], outputs
    about N(64, 30) on [1, 160]."""
    if file is not None:
        rows = [json.loads(line) for line in file.open(encoding="utf-8")]
        return [Query(row["input_ids"], row["output_len"]) for row in rows]
    rng = np.random.default_rng(20261121)
    inputs, outputs = draw(rng, 128, 81, 256), draw(rng, 64, 30, 160)
    return [Query(rng.integers(100, 30_000, size=n).tolist(), m)
            for n, m in zip(inputs, outputs, strict=True)]


def draw(rng: np.random.Generator, mean: float, std: float, most: int) -> list[int]:
    """Whole numbers of a normal law, those outside [1, most] drawn again."""
    found: list[int] = []
    while len(found) < QUERIES:
        value = round(rng.normal(mean, std))
        if 1 <= value <= most:
            found.append(value)
    return found


def write_workload(queries: Sequence[Query], path: Path) -> None:
    path.write_text("".join(json.dumps({
        "input_ids": query.input_ids, "output_len": query.output_tokens,
        "samples": query.samples, "targets": query.targets}) + "\n"
        for query in queries), encoding="utf-8")


def write_job(folder: Path, queries: Sequence[Query], model: str, run: dict[str, Any],
              sections: dict[str, Any]) -> Path:
    """job.yaml and its requests: as many tokens a second as there can be, whatever the latency.
    `sections`: more of the job, and other values."""
    (folder / "requests.jsonl").write_text("".join(
        json.dumps({"id": f"r{i:03d}", **_request(query)}) + "\n"
        for i, query in enumerate(queries)), encoding="utf-8")
    workload: dict[str, Any] = {"requests": "requests.jsonl"}
    if queries[0].targets:
        workload["score"] = True
    else:
        outputs = np.array([query.output_tokens for query in queries])
        workload |= {"input_tokens": "from_requests",
                     "output_tokens": {"mean": float(outputs.mean()), "std": float(outputs.std()),
                                       "max": int(outputs.max())}}
    job = {"name": "peers", "model": model, "cluster": "local", "workload": workload,
           "constraint": {"latency_s": "inf"}, "run": run, "output": "out", **sections}
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job, sort_keys=False), encoding="utf-8")
    return path


def _request(query: Query) -> dict[str, Any]:
    if query.targets:
        return {"tokens": query.input_ids[:-query.targets],
                "continuation_tokens": query.input_ids[-query.targets:]}
    drawn = {} if query.samples == 1 else {"samples": query.samples, "temperature": 1.0}
    return {"tokens": query.input_ids, "forced_tokens": query.output_tokens, **drawn}
