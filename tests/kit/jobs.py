# owner ta
"""Job files that a test writes in a line: what it says of a section replaces the default."""

from __future__ import annotations

from pathlib import Path

from xgpt.app.opened_job import OpenedJob, open_file
from xgpt.job.job import Job
from xgpt.job.job_file import load_job

USUAL = {"model": "opt-13b", "cluster": "a40-4", "workload": "{requests: {count: 400}, task: S}"}


def job_file(folder: Path, name: str = "job", /, **sections: str | None) -> Path:
    """A job file of these sections, each the text of its value. None leaves a usual one out."""
    path = folder / f"{name}.yaml"
    lines = {**USUAL, **sections}
    path.write_text("".join(f"{key}: {value}\n" for key, value in lines.items()
                            if value is not None), encoding="utf-8")
    return path


def job(folder: Path, *overrides: str, **sections: str | None) -> Job:
    return load_job(job_file(folder, **sections), overrides)


def opened(folder: Path, *overrides: str, **sections: str | None) -> OpenedJob:
    return open_file(job_file(folder, **sections), overrides)
