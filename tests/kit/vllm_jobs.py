# owner tb
"""Toy jobs that vLLM executes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from job_folder import write_job


def vllm_job(folder: Path, model: Path, python: str, requests: list[dict[str, Any]],
             schedule: str, more: str = "", ranks: int = 1) -> Path:
    """`more`: keys of the section run."""
    job = write_job(folder, model, requests, schedule=schedule, ranks=ranks)
    job.write_text(job.read_text().replace(
        "run: {", f"run: {{engine: vllm, engine_python: {python}, {more}"))
    return job


def engine_of(launcher: int) -> int | None:
    """The engine's process, once there is one."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().split(b"\0")
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
        if b"xrunner.backends.vllm.vllm_worker" in command and parent == launcher:
            return int(folder.name)
    return None
