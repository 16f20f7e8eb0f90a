"""One process at a time measures with an engine on a host: two would disturb each other. Hosts that
share the cache do not wait for each other. Nor do engines, of which one may take minutes to start;
what it takes of the machine meanwhile is seen (xprofiler/measure/disturbance.py)."""

import fcntl
import json
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from xgpt.app.stop import is_asked_to_stop
from xgpt.app.telling import Teller
from xgpt.core.engines import OWN_ENGINE
from xgpt.core.errors import StoppedEarly, wrong
from xgpt.core.units import format_seconds
from xrunner.io.lock import has_ended, this_process

_LOOK_S = 0.2  # between looks whether another process has ended measuring
_TELL_S = 60.0  # between two words of the waiting
_STALE_S = 5.0  # after which a lock is not its writer's who has ended: a new one writes at once


@contextmanager
def alone(folder: Path, output: Path, tell: Teller, engine: str = OWN_ENGINE) -> Iterator[None]:
    """Holds the lock of this host and engine; the wait for it is told once a minute, with who holds
    it. `output`: of the job that measures. Raises InputError where the cache cannot be written to,
    StoppedEarly where the job is asked to stop meanwhile."""
    host = re.sub(r"[^\w.-]", "_", socket.gethostname())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # not emptied: it says who holds the lock
        file = (folder / f".lock-{host}-{engine}").open("a+", encoding="utf-8")
    except OSError as cause:
        raise wrong("cache", "XDG_CACHE_HOME", str(folder),
                    f"a folder that can be written to: {cause.strerror}") from None
    with file:
        _take(file, output, tell)
        file.truncate(0)
        file.write(json.dumps({**this_process(), "since": time.strftime("%Y-%m-%d %H:%M:%S"),
                               "job": str(output)}))
        file.flush()
        yield


def _take(file: IO[str], output: Path, tell: Teller) -> None:
    """Returns with the lock, or without where the file system has none, or where its holder has
    ended and the system does not know it yet (a server of files that lost it)."""
    begin_s, told_s, gone_s = time.monotonic(), -_TELL_S, 0.0
    while not _is_taken(file):
        holder, waited_s = _holder(file), time.monotonic() - begin_s
        gone_s = (gone_s or waited_s) if has_ended(holder) else 0.0
        if gone_s and waited_s - gone_s > _STALE_S:
            tell.say(f"profile: {_words(holder)} has ended; its lock is not waited for")
            return
        if is_asked_to_stop(output):
            raise StoppedEarly("asked to stop before its profile was measured; the same "
                               "command goes on")
        if waited_s - told_s >= _TELL_S:
            told_s = waited_s
            long = f" for {format_seconds(waited_s)}" if waited_s > _LOOK_S else ""
            tell.say(f"profile: waiting{long}: {_words(holder)} is measuring on this host, and two "
                     "at once would disturb each other")
        time.sleep(_LOOK_S)


def _is_taken(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system that has no locks: nobody waits
        pass
    return True


def _holder(file: IO[str]) -> dict[str, object]:
    """What the holder wrote; nothing before it has."""
    try:
        file.seek(0)
        content = json.loads(file.read())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _words(holder: dict[str, object]) -> str:
    if not {"pid", "host", "since", "job"} <= holder.keys():
        return "another xgpt"
    return (f"process {holder['pid']} on {holder['host']} (since {holder['since']}, for the job in "
            f"{holder['job']})")
