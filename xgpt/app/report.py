"""The page of a finished or stopped run."""

from __future__ import annotations

from pathlib import Path

from xgpt.core.errors import XgptError
from xgpt.core.job import Job
from xgpt.report.page import write_report


def report_job(job: Job) -> Path:
    """Writes report.html from what the job's output folder holds. Raises XgptError where no run
    has started."""
    if not (job.output / "schedule.json").is_file():
        raise XgptError(f"{job.output}: no run has started there")
    return write_report(job.output)
