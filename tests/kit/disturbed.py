"""A real job that is at work, to be disturbed, and what it leaves: for the tests of faults."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from faults import ToyJob, alive, await_lines, below, wait

RRA = "policy: rra, encode_batch: 6, decode_iterations: 4, tp_degree: 1, replicas: 1"
TOGETHER_S = 10.0


def start(folder: Path, *, ranks: int = 2, count: int = 1500, after: int = 20,
          **more: Any) -> tuple[ToyJob, subprocess.Popen[str], dict[str, list[int]]]:
    """A job at work: (it, its command, what that started)."""
    job = ToyJob(folder=folder, schedule=RRA, ranks=ranks, count=count, **more).write()
    process = job.start()
    assert await_lines(job, process, after), process.communicate()
    return job, process, below(process.pid)


def end(process: subprocess.Popen[str], own: dict[str, list[int]]) -> dict[str, Any]:
    """What `--json` printed, once all are gone."""
    printed, told = process.communicate(timeout=200)
    wait(lambda: not alive([pid for pids in own.values() for pid in pids]), "all ends", TOGETHER_S)
    assert "Traceback" not in told, told
    facts: dict[str, Any] = json.loads(printed) if printed else {}
    return {**facts, "code": process.returncode, "told": told}
