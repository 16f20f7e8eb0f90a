"""Runs a command of ranks, watches it until it ends, and can ask it to end early."""

from __future__ import annotations

import os
import re
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import FrameType
from typing import IO, NamedTuple

from xgpt.core.errors import StoppedEarly, XgptError, is_out_of_memory
from xgpt.core.system.lifeline import DONE, Lifeline, without_other_launchers
from xgpt.launch.rank_watch import RankWatch
from xgpt.launch.stop_signals import handled_signals, raise_if_stopped

# Keeps the memory of a layer's large temporaries, which come and go thousands of times: returned to
# the system, it is mapped again page by page (measured: 5 % of an encode). glibc's names.
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(32 * 2**20), "MALLOC_TRIM_THRESHOLD_": str(2**30)}
# CUDA counts the fastest GPU first; nvidia-smi, which the plan rests on, counts by slot.
_GPU_ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def environment_of_ranks() -> dict[str, str]:
    """Environment of ranks: this process's variables, which take precedence, and ours for memory,
    order of GPUs and unbuffered output. They affect the time of steps."""
    return {**_ALLOCATOR, **_GPU_ORDER, **os.environ, "PYTHONUNBUFFERED": "1"}


_ROOT = Path(__file__).resolve().parents[2]  # that holds our packages


def own_modules() -> dict[str, str]:
    """Variables that keep `python -m` from importing modules of the current folder: a user's
    `random.py` or `torch.py` there would replace Python's. If this process has xgpt itself from
    there (a source tree), the folder stays on the path."""
    variables = {"PYTHONSAFEPATH": "1"}
    if sys.path[:1] in ([""], [str(_ROOT)]) and Path.cwd() == _ROOT:
        more = os.environ.get("PYTHONPATH")
        variables["PYTHONPATH"] = str(_ROOT) if not more else f"{_ROOT}{os.pathsep}{more}"
    return variables


_MOST_TOLD = 3000  # chosen: last characters shown of the output of failed ranks
_POLL_S = 0.1  # chosen, as these
_GRACE_S = 20.0  # between asking a run to stop and ending it
_END_S = 5.0  # between asking ranks to end and killing them


# MPICH's message about a rank's end; the process that it names may be any that it ended itself.
_BANNER = re.compile(r"^=+\n=   BAD TERMINATION.*\n=   PID \d+ RUNNING AT (\S+)\n(?:=.*\n)*"
                     r"YOUR APPLICATION TERMINATED WITH THE EXIT STRING: (.*)\n?"
                     r"(?:(?:This typically refers|Please see the FAQ).*\n?)*", re.M)


_SHARED = "/dev/shm"  # shared memory for messages between ranks on one machine
_FEW_FILES = 64  # chosen: a rank of two opens some 40
_LITTLE_BYTES = 32 * 2**20  # chosen: of room there; MPICH takes some 9 MB per rank


class Started(NamedTuple):
    """A running command, and the file of its output. `lifeline`: ends the ranks when closed.
    `line`: socket on which waiting ranks report the end of a run. `num_ranks`: ranks that mpiexec
    starts on this machine; 0 if unknown."""

    process: subprocess.Popen[bytes]
    messages: IO[bytes]
    lifeline: Lifeline
    line: socket.socket | None = None
    num_ranks: int = 0


def start(command: Sequence[str], *, inherited: tuple[int, ...] = (), count: int = 0,
          is_managed: bool = False) -> Started:
    """Starts the command of ranks. `is_managed`: whether they see this process's Slurm allocation.
    Raises StoppedEarly if a stop signal came before."""
    raise_if_stopped()
    if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:  # inherited: exit codes of children
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # would be lost, here and in mpiexec
    messages = tempfile.TemporaryFile()  # noqa: SIM115 (closed by watch_to_end)
    # a session of its own: the terminal's Ctrl-C must reach us, not kill the ranks mid-line
    lifeline = Lifeline()
    environment = environment_of_ranks() if is_managed else without_other_launchers(
        environment_of_ranks())
    process = subprocess.Popen(command, stdout=messages, stderr=subprocess.STDOUT,
                               stdin=subprocess.DEVNULL,
                               env={**environment, **own_modules(), **lifeline.name},
                               start_new_session=True, pass_fds=(*inherited, lifeline.end))
    lifeline.close_ranks_end()
    return Started(process, messages, lifeline, num_ranks=count)


def run_watched(command: Sequence[str], *, watch: Callable[[], None],
                ask_to_stop: Callable[[], None] | None,
                inherited: tuple[int, ...] = (), is_managed: bool = False) -> None:
    """Runs the command of all ranks, as Launcher.run does (xgpt.launch.launcher)."""
    watch_to_end(start(command, inherited=inherited, is_managed=is_managed),
                 watch=watch, ask_to_stop=ask_to_stop)


def watch_to_end(started: Started, *, watch: Callable[[], None],
                 ask_to_stop: Callable[[], None] | None) -> None:
    """Waits until the ranks have ended, or until waiting ranks are done with this run. Raises as
    Launcher.run, and StoppedEarly as `start`."""
    process, messages, lifeline, line, num_ranks = started
    is_done, gone = False, None
    with ExitStack() as stack:
        stack.enter_context(messages)
        stopper = _Stopper(process, ask_to_stop)
        ends = stack.enter_context(closing(RankWatch(process.pid, num_ranks)))
        try:
            raise_if_stopped()
            with stopper, _ended(process, line) as wait:
                while process.poll() is None and not is_done and gone is None:
                    watch()
                    stopper.check()
                    gone = ends.look()
                    wait(_POLL_S)
                    is_done = line is not None and DONE in words_of(line)
            watch()
        finally:
            if not is_done:
                stopper.kill()
                lifeline.close()  # for ranks whose own launcher was killed
        if is_done:
            ends.close()
            stack.pop_all()  # the next run's messages go there too
            return
        if stopper.was_asked and ask_to_stop is None:
            raise StoppedEarly("interrupted; nothing was kept of this step")
        if (process.returncode != 0 or gone is not None) and not stopper.was_asked:
            messages.seek(0)
            text = messages.read().decode(errors="replace").strip()
            if len(text) > _MOST_TOLD:
                text = f"...\n{text[-_MOST_TOLD:]}"
            raise RanksFailed(process.returncode, text, first=ends.first, gone=gone)


def words_of(line: socket.socket, flags: int = 0) -> bytes:
    """The bytes that have arrived on a socket; b"" if none have, or none will."""
    try:
        return line.recv(2**16, socket.MSG_DONTWAIT | flags)
    except OSError:
        return b""


@contextmanager
def _ended(process: subprocess.Popen[bytes],
           line: socket.socket | None) -> Iterator[Callable[[float], object]]:
    """A function that waits for so many seconds or, on Linux, until the process ends or something
    arrives on the socket."""
    try:
        file = os.pidfd_open(process.pid)
    except (AttributeError, OSError):  # not Linux
        yield time.sleep
        return
    try:
        files: list[int | socket.socket] = [file] if line is None else [file, line]

        def wait(seconds: float) -> None:
            heard, _, _ = select.select(files, [], [], seconds)
            if line is not None and line in heard and not words_of(line, flags=socket.MSG_PEEK):
                files.remove(line)  # its other end is closed: nothing will come

        yield wait
    finally:
        os.close(file)


class RanksFailed(XgptError):
    """The ranks failed, or something ended them. `is_told`: they reported the reason, and would
    fail again."""

    def __init__(self, code: int, printed: str, *, first: str | None = None,
                 gone: str | None = None) -> None:
        """`printed`: output of the ranks and their launcher. `first`: the rank that ended first, in
        words. `gone`: a rank that ended before it was connected, in words."""
        banner = "" if first is not None or "xgpt: " in printed else r"A rank on \1 ended: \2"
        printed = _BANNER.sub(banner, printed).strip()
        told = re.findall(r"^xgpt: (.*(?:\n(?!xgpt: |Abort\().*)*)", printed, re.M)
        self.is_told = bool(told) or is_out_of_memory(printed)
        if told:
            super().__init__("\n".join(dict.fromkeys(line.strip() for line in told)))
            return
        if self.is_told:
            said = [line for line in printed.splitlines() if is_out_of_memory(line)][-1].strip()
            super().__init__(f"memory ran out in a rank ({said}): look at `ulimit -v`, `ulimit "
                             "-u` and the container's limits, or use fewer ranks or requests at "
                             "a time")
            return
        said = f":\n{printed}" if printed else ""
        if gone is not None:
            super().__init__(f"{gone} ended before it had met the others, which waited for it: "
                             f"they were ended{said}")
            return
        # launchers report a signal as a shell does, as itself, or in words alone
        who = "" if first is None else f"; {first} was the first to end"
        super().__init__(f"the ranks failed (exit code {code}){who}{said}{''.join(_why(code))}")


def _why(code: int) -> Iterator[str]:
    """Yields possible reasons for a rank's end that the user can do something about."""
    def is_of(number: int) -> bool:
        return code in (-number, number, 128 + number)

    if is_of(signal.SIGKILL):
        yield ("\nSignal 9 ended a rank from outside: often the system does, when memory runs out "
               "(`dmesg` tells)")
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= files < _FEW_FILES:  # MPICH's words do not say so
        yield (f"\nA process may open {files} files here, too few for a rank: raise that (`ulimit "
               "-n 1024`)")
    room = _room_bytes(_SHARED)
    if room is not None and room < _LITTLE_BYTES:
        yield (f"\n{_SHARED}, through which ranks speak to each other, has {room / 2**20:.1f} MB "
               "of room: they need some 10 MB each (a container's is set by `--shm-size`)")
    elif is_of(signal.SIGBUS):
        yield (f"\nA bus error ended a rank: {_SHARED} was full, or a file was cut off that it was "
               "reading")


def _room_bytes(folder: str) -> int | None:
    """Free bytes in the folder's file system; None if there is no such folder."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


class _Stopper:
    """Turns a stop signal into a request to stop, and a second one into an end."""

    def __init__(self, process: subprocess.Popen[bytes], ask: Callable[[], None] | None) -> None:
        self._process, self._ask, self._asked_at = process, ask, 0.0
        self.was_asked = self._is_killing = False
        self._previous: dict[int, object] = {}

    def __enter__(self) -> _Stopper:
        for number in handled_signals():
            self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.was_asked or self._ask is None:
            self.was_asked = True
            self.kill()
            return
        self.was_asked, self._asked_at = True, time.monotonic()
        self._ask()

    def check(self) -> None:
        if self.was_asked and self._asked_at and time.monotonic() - self._asked_at > _GRACE_S:
            self.kill()

    def kill(self) -> None:
        if not self._is_killing:  # a signal comes in between
            self._is_killing = True
            end(self._process)


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends a command that `start` started, with all of its session, unless it has ended."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(timeout=_END_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
