"""Requests that come on standard input: read once, and kept in the output folder, so that the same
command goes on without them, on another machine or after a kill."""

import os
import shutil
import sys
import tempfile
import weakref
from functools import lru_cache
from pathlib import Path
from typing import IO, BinaryIO

from xgpt.app.telling import Teller
from xgpt.core.errors import wrong
from xgpt.job.job import Job

KEPT_FILE = "standard-input"
_BYTES_IN_MEMORY = 2**26


def standard_input(job: Job, tell: Teller, *, is_kept: bool) -> IO[bytes]:
    """What came, to be read from its start; where nothing does, what an earlier run of this job
    kept. `is_kept`: for a run, which leaves it in the output folder. Raises InputError."""
    # a process that was started without one has None
    kept, came = job.output / KEPT_FILE, _copied(sys.stdin and sys.stdin.buffer).file
    if came.seek(0, os.SEEK_END) > 0:
        if is_kept:
            _keep(came, kept, job)
        return came
    try:
        earlier = kept.open("rb")  # closed with the last reference to it
    except OSError:
        raise wrong(job.source, "workload.requests", "-", "nothing came on standard input: `cat "
                    "prompts.jsonl | xgpt submit JOB.yaml`, or name a file") from None
    with earlier:
        shutil.copyfileobj(earlier, came)
    tell.say(f"nothing came on standard input: the requests are those that {kept} has of an "
             "earlier run")
    return came


class _Copy:
    """All that comes on a stream; of a terminal nothing, where nobody would know that he is to
    type."""

    def __init__(self, stream: BinaryIO | None) -> None:
        self.file: IO[bytes]
        self.file = tempfile.SpooledTemporaryFile(_BYTES_IN_MEMORY)  # noqa: SIM115 (kept by it)
        weakref.finalize(self, self.file.close)
        if stream is not None and not stream.isatty():
            shutil.copyfileobj(stream, self.file)


@lru_cache(1)
def _copied(stream: BinaryIO | None) -> _Copy:
    """Once a process: a command may open its job twice."""
    return _Copy(stream)


def _keep(came: IO[bytes], kept: Path, job: Job) -> None:
    temporary = kept.with_name(f".{kept.name}.{os.getpid()}.tmp")
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        came.seek(0)
        with temporary.open("wb") as file:
            shutil.copyfileobj(came, file)
        os.replace(temporary, kept)
    except OSError as cause:
        raise wrong(job.source, "output", str(job.output),
                    f"a folder that can be written to: {cause.strerror}") from None
