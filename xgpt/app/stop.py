"""Ending a job in good order, wherever it is."""

from pathlib import Path

from xgpt.app.status import job_status
from xgpt.core.errors import XgptError
from xgpt.launch.slurm_jobs import take_back
from xrunner.io.lock import is_locked
from xrunner.io.stop import StopRequest

_ASKED = "asked to stop: it ends in a few seconds, and the same command goes on from there"


def is_asked_to_stop(output: Path) -> bool:
    """Whether the run that works in the folder is to stop; a request of an earlier one is none."""
    return StopRequest(output).is_made and is_locked(output) is not False


def stop_job(output: Path) -> str:
    """Takes a waiting job out of Slurm's queue, or asks a run to stop; says which. Raises XgptError
    where nothing is to be stopped."""
    status = job_status(output)
    if status is None:
        raise XgptError(f"{output}: no run has started there")
    record, said = status.record, status.said
    if record is not None and said is not None and said.is_waiting:
        take_back(record.job_id, record.cluster)
        return f"Slurm's job {record.job_id} waited, and is out of the queue"
    is_unknown = record is not None and status.trouble is not None
    if not status.is_active and not is_unknown:
        raise XgptError(f"{output}: no run works there (state: {status.state})")
    StopRequest(output).make_by_user()
    if is_unknown:
        return f"{status.trouble}; a run there that goes on is {_ASKED}"
    return _ASKED if said is None else f"Slurm's job {record.job_id if record else ''} is {_ASKED}"
