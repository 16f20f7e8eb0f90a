"""Lock of an output folder: one run at a time writes there.

Two locks hold it. The operating system's (flock) is exact on one machine and ends with the last
process that has it, ranks included. On some shared file systems it does not reach other machines,
so a file names the owner: host, process, start time. The owner touches it every few seconds. It is
taken over if its process has gone or, from another host, if it was not touched for a minute by the
file system's clock."""

import fcntl
import json
import os
import shlex
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from xgpt.core.errors import XgptError

_FILE, _OWNER = ".lock", ".owner.json"
_TRIES, _PAUSE_S = 5, 0.05  # chosen: `is_locked` holds the lock for an instant, a run for good
_TOUCH_S, STALE_S = 10.0, 60.0  # chosen


class FolderTaken(XgptError):
    """Another process has the folder. `who`: its description."""

    who = ""


@contextmanager
def output_lock(output: Path) -> Iterator[int]:
    """Holds the folder's lock; yields its descriptor. A child that inherits the descriptor keeps
    the lock while it lives, even if this process is killed. Raises FolderTaken if another run has
    it: their lines would mix in results.jsonl."""
    with (output / _FILE).open("w") as file:
        _lock(output, file)
        with _owned(output):
            yield file.fileno()


def is_locked(output: Path) -> bool | None:
    """Whether a run, or a rank of one, is alive in the folder; None if unknown."""
    is_known = True
    try:
        with (output / _FILE).open("rb") as file:
            # shared: two callers do not take each other for a run
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    except OSError:
        is_known = False
    if (owner := _read(output / _OWNER)) is not None:
        return not _is_gone(output, owner)
    return False if is_known else None


def _lock(output: Path, file: IO[str]) -> None:
    for rest in reversed(range(_TRIES)):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if not rest:
                raise _refusal(output) from None
            time.sleep(_PAUSE_S)
        except OSError:  # no flock on this file system: the other lock holds
            return


@contextmanager
def _owned(output: Path) -> Iterator[None]:
    path, mine = output / _OWNER, _me()
    while not _create(path, mine):
        owner = _read(path)
        if owner is not None and not _is_gone(output, owner):
            raise _refusal(output)
        _take_away(path, owner)
    is_over = threading.Event()

    def touch() -> None:
        while not is_over.wait(_TOUCH_S):
            with suppress(OSError):
                os.utime(path)

    thread = threading.Thread(target=touch, name="lock", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        with suppress(OSError):
            if _read(path) == mine:
                path.unlink()


def _create(path: Path, content: dict[str, object]) -> bool:
    """Creates the file; False if it exists. Hard links are atomic on shared file systems too."""
    new = path.with_name(f"{path.name}.{socket.gethostname()}.{os.getpid()}")
    new.write_text(json.dumps(content) + "\n", encoding="utf-8")
    try:
        os.link(new, path)
    except FileExistsError:
        return False
    except OSError:  # no links on this file system
        with suppress(FileExistsError), path.open("x", encoding="utf-8") as file:
            file.write(json.dumps(content) + "\n")
            return True
        return False
    finally:
        new.unlink(missing_ok=True)
    return True


def _take_away(path: Path, judged: dict[str, object] | None) -> None:
    """Removes the file of an owner that is gone; of two processes that try, one succeeds."""
    aside = path.with_name(f"{path.name}.gone.{socket.gethostname()}.{os.getpid()}")
    with suppress(FileNotFoundError):
        os.rename(path, aside)
        if _read(aside) != judged:  # a new owner's, created in between
            with suppress(OSError):
                os.link(aside, path)
        aside.unlink(missing_ok=True)


def _is_gone(output: Path, owner: dict[str, object]) -> bool:
    me, path = _me(), output / _OWNER
    if owner.get("host") == me["host"] and owner.get("boot") == me["boot"]:
        return _started(owner.get("pid")) != owner.get("started")
    return (age := _age_s(output, path)) is not None and age > STALE_S


def _age_s(output: Path, path: Path) -> float | None:
    """Seconds since the file was touched, by the file system's clock; None if unknown."""
    probe = output / f".clock.{socket.gethostname()}.{os.getpid()}"
    try:
        probe.touch()
        return probe.stat().st_mtime - path.stat().st_mtime
    except OSError:
        return None
    finally:
        with suppress(OSError):
            probe.unlink(missing_ok=True)


def _refusal(output: Path) -> FolderTaken:
    owner = _read(output / _OWNER) or {}
    who = (f" (process {owner['pid']} on {owner['host']})" if {"pid", "host"} <= owner.keys()
           else "")
    taken = FolderTaken(
        f"{output}: another run is writing there{who} (see `xgpt status`); wait for it, or give "
        "this one another `output`. If its host is dead, the folder is free "
        f"{STALE_S:.0f} s after its last sign of life")
    taken.who = f"another xgpt{who}, since {owner.get('since')}: {owner.get('command')}"
    return taken


def _me() -> dict[str, object]:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        boot = ""
    return {"host": socket.gethostname(), "boot": boot, "pid": os.getpid(),
            "started": _started(os.getpid()), "since": time.strftime("%Y-%m-%d %H:%M:%S"),
            "command": shlex.join(sys.argv)}


def _started(pid: object) -> str | None:
    """Start time of a process in ticks since boot; None if it has ended or is a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    state, *rest = text.rpartition(")")[2].split()
    return None if state == "Z" else rest[18]


def _read(path: Path) -> dict[str, object] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


STOP_FILE = "stop"


class StopRequest:
    """The request to stop a run: a file, empty if a signal to the launcher made it. One by a user
    (`xgpt stop`) has text: it ends a Slurm job, which otherwise returns to the queue near its time
    limit."""

    def __init__(self, output: Path) -> None:
        self._path = output / STOP_FILE

    @property
    def is_made(self) -> bool:
        return self._path.exists()

    @property
    def is_by_user(self) -> bool:
        return self._path.is_file() and self._path.stat().st_size > 0

    def make(self) -> None:
        """Asks the run to stop; an existing request stays unchanged."""
        self._path.touch()

    def make_by_user(self) -> None:
        self._path.write_text("by xgpt stop\n", encoding="utf-8")

    def withdraw(self) -> None:
        self._path.unlink(missing_ok=True)
