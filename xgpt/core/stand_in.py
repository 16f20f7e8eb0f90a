"""`python stand_in.py LINE COUNT COMMAND...`: stands in the place of one of COUNT ranks that
mpiexec starts, while the rank itself is a fork of a process that has imported what COMMAND would
(xrunner/forks.py). That hears over the socket of descriptor LINE, and is handed this process's
descriptors, environment, folder, cores and network. This one ends as the fork does; where it is
ended, the fork is. Where there is no such fork it becomes COMMAND.

Its name becomes "for PID" of the fork, by which whoever finds this one finds that
(xgpt/launch/first_end.py). Run as a file, with the standard library alone: it stands before every
start of ranks."""

import ctypes
import errno
import json
import os
import resource
import select
import signal
import socket
import sys
from contextlib import ExitStack, suppress
from typing import Any

# Whom it asks, and what that is told of a rank's network; what it hears: a process id, and then
# ENDED with that one's status. Anything else: it is to become COMMAND.
FORKS, NAMESPACES, ENDED = "xrunner.forks", ("user", "net"), b"ended "
# how MPICH's mpiexec ties a process to itself; another's may ask who it is that speaks
TIE = "PMI_FD"
_MOST_WORD, _MOST_FILES = 2**17, 250
_PR_SET_NAME = 15
_SILENT_S = 5.0  # after the fork's end; to say it takes no time


def main(line: int, count: int, command: list[str]) -> None:
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, its:
        files = [file for file in _open_files() if file not in (
            line, ours.fileno(), its.fileno())]
        asks = TIE in os.environ and len(files) <= _MOST_FILES
        _hand_over(line, {"argument": command[-1], "count": count, "asks": asks, "files": files,
                          "environment": dict(os.environ), "folder": _folder(),
                          "cores": sorted(os.sched_getaffinity(0))}, its.fileno())
        its.close()
        said = ours.recv(64) if asks else b""
        if said.isdigit():
            ctypes.CDLL(None).prctl(_PR_SET_NAME, b"for " + said)
            said = _seen_to_end(int(said), ours) or ours.recv(64) or (
                ENDED + str(int(signal.SIGKILL)).encode())
        if said.startswith(ENDED):
            _end_as(int(said.removeprefix(ENDED)))
    os.close(line)
    os.execv(command[0], command)


def _seen_to_end(fork: int, ours: socket.socket) -> bytes:
    """What is to be heard of this fork where it has ended and who forked it, which should say so,
    does not: it was stopped (SIGSTOP), and mpiexec would wait for ever. Nothing where it does."""
    with suppress(OSError, AttributeError):  # the system has no such descriptors, or it is gone
        end = os.pidfd_open(fork)
        told, _, _ = select.select([ours.fileno(), end], [], [])
        if told == [end]:
            told, _, _ = select.select([ours.fileno()], [], [], _SILENT_S)
        if not told and (status := _status_of(fork)) is not None:
            return ENDED + str(status).encode()
    return b""


def _status_of(pid: int) -> int | None:
    """How a process has ended that nobody has waited for; None of another."""
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        state, *numbers = file.read().rpartition(")")[2].split()
    return int(numbers[-1]) if state == "Z" else None  # the last of them


def _hand_over(line: int, rank: dict[str, Any], reply: int) -> None:
    """Sends word of this rank, and what is its own; of one that does not ask, or has too much, that
    it is no fork: who waits for it need not."""
    with suppress(OSError), socket.socket(fileno=os.dup(line)) as ahead:  # it may be gone
        if rank["asks"]:
            with suppress(OSError), ExitStack() as stack:  # there are no such, or it is too long
                files = [reply, *(stack.enter_context(open(f"/proc/self/ns/{kind}", "rb")).fileno()
                                  for kind in NAMESPACES), *rank["files"]]
                _send(ahead, rank, files)
                return
        _send(ahead, {**rank, "asks": False, "environment": {}, "files": []}, [reply])


def _send(ahead: socket.socket, rank: dict[str, Any], files: list[int]) -> None:
    word = json.dumps(rank)
    if len(word) > _MOST_WORD:
        raise OSError(errno.EMSGSIZE, "too long")
    socket.send_fds(ahead, [f"{FORKS}\0{word}".encode()], files)


def _folder() -> str | None:
    """None for one that is no longer there."""
    with suppress(OSError):
        return os.getcwd()
    return None


def _open_files() -> list[int]:
    found = []
    for file in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # what listed them
            os.fstat(file)
            found.append(file)
    return sorted(found)


def _end_as(status: int) -> None:
    """Ends this process like the one that ended with this status."""
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(OSError):  # of SIGKILL
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
