"""What makes a point of a sweep the same one: a key of what it asks, and a fingerprint of what it
is answered with."""

import hashlib
import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from xgpt.core.job import Job
from xgpt.core.json_values import plain
from xgpt.core.sweep_file import SweepPoint, SweepSpec

_ROOT = Path(__file__).resolve().parents[3]
# whose code, tables and rows decide what is planned
_PLANNING = ("xgpt/core", "xprofiler", "xsimulator", "xscheduler", "xrunner/rules")
_SUFFIXES = (".py", ".yaml")


def key_of(point: SweepPoint, spec: SweepSpec) -> str:
    """16 hex digits of all that a point asks. What the point is called, where its file lies and
    where its results go is not part of it."""
    return _digest([plain(_asked(point.job)), point.share, spec.horizon, spec.has_margin])


def common_key(point: SweepPoint) -> str:
    """The same of the point without its bound: points that have it in common share a planner."""
    return _digest(plain(_asked(_unbounded(point.job))))


def fingerprint_of(job: Job, times: str = "") -> str:
    """Of the planning code, and of the files that the job is planned by. `times`: a digest of what
    was measured here."""
    requests = () if job.workload.requests is None else job.workload.requests.paths
    files = (job.profile, *requests, job.workload.input_tokens.path,
             job.workload.output_tokens.path, Path(job.model) / "config.json")
    return _digest([_code(), times, *(_file_digest(path) for path in files if path is not None)])


def digest_of(text: str) -> str:
    """16 hex digits."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _asked(job: Job) -> dict[str, Any]:
    words: dict[str, Any] = plain(job)
    return {name: value for name, value in words.items()
            if name not in ("name", "source", "output", "slurm")}


def _unbounded(job: Job) -> Job:
    return replace(job, constraint=job.constraint.with_latency(limit_s=float("inf")))


def _digest(value: Any) -> str:
    return digest_of(json.dumps(value, sort_keys=True, separators=(",", ":")))


def _file_digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


@cache
def _code() -> str:
    digest = hashlib.sha256()
    for folder in _PLANNING:
        for path in sorted((_ROOT / folder).rglob("*")):
            if path.suffix in _SUFFIXES and "measure" not in path.parts:
                digest.update(path.relative_to(_ROOT).as_posix().encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()
