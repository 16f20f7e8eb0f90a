"""The native operators, compiled beside what a command on this machine's cores does until it needs
them."""

import atexit
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from xgpt.core.job import Job
from xgpt.core.local import why_no_torch
from xgpt.core.run_section import LOCAL_CLUSTER
from xrunner.backends.engine import engine_of
from xrunner.checkpoint.source import cache_dir
from xrunner.ops import build

_GRACE_S = 1.0  # for the compiler to take its files away


def begin_compiling(job: Job) -> subprocess.Popen[bytes] | None:
    """Starts the process that compiles them, where they are not there yet; who needs them waits for
    it (xrunner.ops.build.why_not_native). A command that ends before ends it, too. None where the
    job needs none."""
    if job.cluster != LOCAL_CLUSTER or why_no_torch("cpu") is not None or (
            engine_of(job).identity is not None):
        return None
    return start_compiling(cache_dir() / "native")


def start_compiling(cache: Path) -> subprocess.Popen[bytes]:
    """A process of its own, not a thread: what a thread has started is waited for at the end, and a
    command that fails at once, or is interrupted, would last as long as the compiler. It ends with
    this one though that is killed."""
    process = subprocess.Popen(
        [sys.executable, "-I", build.__file__, str(cache), str(os.getpid())],
        start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL)
    atexit.register(_end, process)
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends it with its compilers, unless it has ended; it takes its files away."""
    if process.poll() is not None:
        return
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
            return
