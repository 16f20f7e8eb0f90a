"""Runs for `offload.py`: xgpt by `xgpt submit`, peers by their drivers, each in a memory cgroup
with its files dropped from the page cache, and the rate of the disk."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from memory_group import GroupRun, MemoryGroup, drop
from workload import Query, write_job, write_workload

from xgpt.core.system.machine import Contention

DRIVERS = Path(__file__).resolve().parent / "peers"
XGPT = [sys.executable, "-c", "from xgpt.cli.main import main; main()"]
LIMIT_S = 1500.0  # of a command
_PLANS = 3  # most repetitions until all sizes are measured
_READ_BYTES, _PIECE_BYTES = 2**31, 2**23


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One run. `load`: the comparison that it belongs to. `run_s`: without loading. `terms`,
    `tiers`: of the metrics' key `offload`. `error`: why there are no figures."""

    load: str
    name: str
    round: int
    requests: int = 0
    output_tokens: int = 0
    run_s: float = 0.0
    whole_s: float = 0.0
    predicted_s: float | None = None
    terms: list[dict[str, Any]] = field(default_factory=list)
    tiers: list[dict[str, Any]] = field(default_factory=list)
    placement: dict[str, Any] = field(default_factory=dict)
    controls: dict[str, Any] = field(default_factory=dict)
    peak_bytes: int = 0
    anonymous_bytes: int = 0
    others_share: float = 0.0
    disk_bytes_per_s: float = 0.0
    error: str = ""

    @property
    def tokens_per_s(self) -> float:
        return self.output_tokens / self.run_s if self.run_s else 0.0

    def moved_bytes(self, *terms: str) -> float:
        """Bytes of these terms, of all ranks."""
        return sum(row["measured_bytes"] for row in self.terms if row["term"] in terms)


class Kept:
    """Outcomes in a file of JSON lines, so that a page can be written from several calls."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, outcome: Outcome) -> Outcome:
        print(outcome, flush=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(outcome)) + "\n")
        return outcome

    def all(self) -> list[Outcome]:
        if not self._path.is_file():
            return []
        return [Outcome(**json.loads(line)) for line in self._path.open(encoding="utf-8")]


def equal_queries(count: int, inputs: int, outputs: int) -> list[Query]:
    """Requests of random tokens, all of one length."""
    rng = np.random.default_rng(20261129)
    return [Query(rng.integers(100, 30_000, size=inputs).tolist(), outputs) for _ in range(count)]


def sharegpt_queries(file: Path, count: int, divisor: int) -> list[Query]:
    """The first `count` lengths of the file's lines in an order of their own, divided."""
    rows = np.loadtxt(file, delimiter=",", skiprows=1, usecols=(0, 1))
    rng = np.random.default_rng(20261129)
    chosen = np.maximum(rng.permutation(rows)[:count] // divisor, 1).astype(int)
    return [Query(rng.integers(100, 30_000, size=n).tolist(), int(m)) for n, m in chosen]


class Turn(NamedTuple):
    """Whose turn it is in which round of a comparison; round 0 is not counted."""

    load: str
    name: str
    round: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a model's runs take place. `memory`: of each rank, as the job says it; `group_bytes`:
    of the cgroup; None limits nothing. `offload`: folder of the weights file, kept between runs."""

    model: Path
    dtype: str
    memory: str | None
    group_bytes: int | None
    offload: Path
    threads: int = 2


def run_xgpt(place: Place, queries: Sequence[Query], folder: Path, turn: Turn,
             schedule: dict[str, Any], ranks: int = 1) -> Outcome:
    """`xgpt submit` of the queries under `schedule`, planned before without a limit (profiles and
    the tiers' rates stay in the cache)."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    memory = {} if place.memory is None else {"memory": place.memory}
    job = write_job(folder, list(queries), str(place.model), {
        "dtype": place.dtype, "ranks": ranks,
        "threads_per_rank": max(place.threads // ranks, 1), "weights": "checkpoint",
        **({} if place.memory is None else {"offload": str(place.offload)})},
        {"constraint": {"latency_s": "inf", **memory}, "schedule": schedule})
    for _ in range(_PLANS):
        planned = subprocess.run([*XGPT, "schedule", str(job)], capture_output=True, text=True,
                                 check=False, timeout=LIMIT_S)
        if "could not be timed well" not in planned.stderr:  # else `submit` would measure again
            break
    if planned.returncode:
        return Outcome(**turn._asdict(), error=_end(planned.stderr + planned.stdout))
    run, rate, others = limited([*XGPT, "submit", str(job), "--json"], place)
    if run.code:
        return _failed(turn, run)
    metrics = json.loads((folder / "out" / "metrics.json").read_text("utf-8"))
    plan = json.loads((folder / "out" / "schedule.json").read_text("utf-8"))
    offload = metrics.get("offload", {})
    wall = json.loads(run.printed)["wall_s"]
    return Outcome(
        **turn._asdict(), requests=len(queries), run_s=wall["measured"],
        output_tokens=sum(query.output_tokens for query in queries), whole_s=run.seconds,
        predicted_s=wall.get("predicted"), terms=offload.get("terms", []),
        tiers=offload.get("tiers", []), placement=_found(plan, "placement") or {},
        controls=_found(plan, "controls") or {}, peak_bytes=run.peak_bytes,
        anonymous_bytes=run.anonymous_bytes, others_share=others, disk_bytes_per_s=rate)


def run_peer(place: Place, queries: Sequence[Query], folder: Path, turn: Turn,
             command: Sequence[str], *, is_limited_later: bool = False) -> Outcome:
    """A driver over the queries, as one batch."""
    folder.mkdir(parents=True, exist_ok=True)
    workload = folder / "workload.jsonl"
    write_workload(list(queries), workload)
    run, rate, others = limited(
        [command[0], str(DRIVERS / command[1]), *command[2:], "--model", str(place.model),
         "--workload", str(workload), "--dtype", place.dtype, "--threads", str(place.threads)],
        place, is_limited_later=is_limited_later)
    if run.code:
        return _failed(turn, run)
    said = json.loads(next(line for line in run.printed.splitlines()
                           if line.startswith('{"version"')))
    return Outcome(**turn._asdict(), requests=len(queries), run_s=said["run_s"],
                   output_tokens=said["output_tokens"], whole_s=run.seconds,
                   peak_bytes=run.peak_bytes, anonymous_bytes=run.anonymous_bytes,
                   others_share=others, disk_bytes_per_s=rate)


def limited(command: Sequence[str], place: Place, *,
            is_limited_later: bool = False) -> tuple[GroupRun, float, float]:
    """(the run in the group, the disk's bytes a second just before, others' share of the cores)"""
    files = sorted(place.model.glob("*.safetensors"), key=lambda file: file.stat().st_size)
    rate = disk_rate(files[-1])
    drop(place.model, *([place.offload] if place.offload.is_dir() else []))
    contention = Contention()
    with MemoryGroup(place.group_bytes or 2**62) as group:
        if group.why_none:
            print(group.why_none, flush=True)
        try:
            run = group.run(command, LIMIT_S, is_limited_later=is_limited_later)
        except subprocess.TimeoutExpired:
            run = GroupRun(124, "", f"not done after {LIMIT_S:.0f} s", LIMIT_S, 0, 0)
    return run, rate, contention.others_share() or 0.0


def disk_rate(file: Path) -> float:
    """Bytes a second of reading the file's first 2 GiB past the page cache, in pieces of 8 MiB;
    the better of one thread and two."""
    size = min(file.stat().st_size, _READ_BYTES) // _PIECE_BYTES * _PIECE_BYTES
    return max(_rate(file, size, threads) for threads in (1, 2))


def _rate(file: Path, size: int, threads: int) -> float:
    def read(first: int) -> None:
        piece = mmap.mmap(-1, _PIECE_BYTES)  # O_DIRECT wants whole pages
        handle = os.open(file, os.O_RDONLY | os.O_DIRECT)
        try:
            for at in range(first * _PIECE_BYTES, size, threads * _PIECE_BYTES):
                os.preadv(handle, [piece], at)
        finally:
            os.close(handle)

    workers = [threading.Thread(target=read, args=(number,)) for number in range(threads)]
    start = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return size / (time.perf_counter() - start)


def _failed(turn: Turn, run: GroupRun) -> Outcome:
    why = "killed: the limit of the cgroup was not enough" if run.is_killed else _end(
        run.complaints or run.printed)
    return Outcome(**turn._asdict(), whole_s=run.seconds, peak_bytes=run.peak_bytes,
                   anonymous_bytes=run.anonymous_bytes, error=f"exit code {run.code}: {why}")


def _end(text: str) -> str:
    return text.strip()[-400:]


def _found(value: Any, key: str) -> Any:
    """The first value of `key` anywhere in a schedule file."""
    if isinstance(value, dict):
        if value.get(key):
            return value[key]
        value = list(value.values())
    if isinstance(value, list):
        return next((found for one in value if (found := _found(one, key))), None)
    return None
