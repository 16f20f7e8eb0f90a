# owner tb
"""Toy jobs that vLLM executes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from faults import tree
from job_folder import write_job


def vllm_job(folder: Path, model: Path, python: str, requests: list[dict[str, Any]],
             schedule: str, more: str = "", ranks: int = 1) -> Path:
    """`more`: keys of the section run."""
    job = write_job(folder, model, requests, schedule=schedule, ranks=ranks)
    job.write_text(job.read_text().replace(
        "run: {", f"run: {{engine: vllm, engine_python: {python}, {more}"))
    return job


def engine_of(launcher: int) -> int | None:
    """A process with an engine, once there is one."""
    return next((pid for pid in tree(launcher)
                 if b"xrunner.backends.vllm.engine_process" in words_of(pid)), None)


def words_of(pid: int) -> list[bytes]:
    """The command of a process; none if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []
