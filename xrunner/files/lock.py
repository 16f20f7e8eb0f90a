"""One run at a time writes into an output folder.

Two locks hold it. The operating system's (flock) is exact on one machine: it goes with the last
process that has it, ranks included. It does not reach other machines on every shared file system,
so a file says besides who has the folder: host, process, and since when. Its owner touches it every
few seconds; it is taken over when its process is not there any more, or, of another host, when it
has not been touched for a minute by the file system's own clock."""

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
_TRIES, _PAUSE_S = 5, 0.05  # `is_locked` holds the lock for an instant; a run holds it for good
_TOUCH_S, STALE_S = 10.0, 60.0


class Taken(XgptError):
    """Another process has the folder: `who`, in words."""

    who = ""


@contextmanager
def output_lock(output: Path) -> Iterator[int]:
    """Holds the folder's lock; yields the descriptor that carries it. A child that inherits it
    keeps the lock as long as it lives, even if this process is killed. Raises Taken when
    another run has it: two would mix their lines in results.jsonl."""
    with (output / _FILE).open("w") as file:
        _lock(output, file)
        with _owned(output):
            yield file.fileno()


def is_locked(output: Path) -> bool | None:
    """Whether a run, or a part of one, is alive in the folder; None where that cannot be told."""
    is_known = True
    try:
        with (output / _FILE).open("rb") as file:
            # shared: two who ask do not take each other for a run
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
        except OSError:  # a file system that cannot: the other lock holds
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
    """Whether the file is this process's now. A link is made or not, on shared file systems too."""
    new = path.with_name(f"{path.name}.{socket.gethostname()}.{os.getpid()}")
    new.write_text(json.dumps(content) + "\n", encoding="utf-8")
    try:
        os.link(new, path)
    except FileExistsError:
        return False
    except OSError:  # no links there
        with suppress(FileExistsError), path.open("x", encoding="utf-8") as file:
            file.write(json.dumps(content) + "\n")
            return True
        return False
    finally:
        new.unlink(missing_ok=True)
    return True


def _take_away(path: Path, judged: dict[str, object] | None) -> None:
    """Removes the file of an owner that is gone: of two who judge so, the one who moves it."""
    aside = path.with_name(f"{path.name}.gone.{socket.gethostname()}.{os.getpid()}")
    with suppress(FileNotFoundError):
        os.rename(path, aside)
        if _read(aside) != judged:  # a new owner's, who came in between
            with suppress(OSError):
                os.link(aside, path)
        aside.unlink(missing_ok=True)


def _is_gone(output: Path, owner: dict[str, object]) -> bool:
    me, path = _me(), output / _OWNER
    if owner.get("host") == me["host"] and owner.get("boot") == me["boot"]:
        return _started(owner.get("pid")) != owner.get("started")
    return (age := _age_s(output, path)) is not None and age > STALE_S


def _age_s(output: Path, path: Path) -> float | None:
    """Seconds since the file was touched, by the clock of who keeps the files; None where that
    cannot be told."""
    probe = output / f".clock.{socket.gethostname()}.{os.getpid()}"
    try:
        probe.touch()
        return probe.stat().st_mtime - path.stat().st_mtime
    except OSError:
        return None
    finally:
        with suppress(OSError):
            probe.unlink(missing_ok=True)


def _refusal(output: Path) -> Taken:
    owner = _read(output / _OWNER) or {}
    who = (f" (process {owner['pid']} on {owner['host']})" if {"pid", "host"} <= owner.keys()
           else "")
    taken = Taken(f"{output}: another run is writing there{who} (see `xgpt status`); wait for "
                  "it, or give this one another `output`. If its host is dead, the folder is "
                  f"free {STALE_S:.0f} s after its last sign of life")
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
    """When the process began, in ticks since the machine did; None of one that is not there,
    or has ended and nobody has waited for it."""
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
    """Of a signal to the launcher the file is empty. One that a user makes (`xgpt stop`) says so:
    it ends a job of Slurm's, which goes back to the queue after a warning of its time limit."""

    def __init__(self, output: Path) -> None:
        self._path = output / STOP_FILE

    @property
    def is_made(self) -> bool:
        return self._path.exists()

    @property
    def is_by_user(self) -> bool:
        return self._path.is_file() and self._path.stat().st_size > 0

    def make(self) -> None:
        """Asks the run to stop; a request that there is stays as it is."""
        self._path.touch()

    def make_by_user(self) -> None:
        self._path.write_text("by xgpt stop\n", encoding="utf-8")

    def withdraw(self) -> None:
        self._path.unlink(missing_ok=True)
