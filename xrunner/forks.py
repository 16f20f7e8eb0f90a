"""Several ranks that are forks of one process, which has imported what they would, and read weights
that they may hold. mpiexec has started a stand-in for each (xgpt/core/stand_in.py), which asks
for its fork; the fork is given the stand-in's descriptors, environment, folder, cores and network,
and is a rank like one that mpiexec started itself.

Only a process that has computed with one thread forks: those of a library would be missing in the
forks, which would wait for them for ever."""

import ctypes
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from xgpt.core.lifeline import NAME as LIFELINE
from xgpt.core.lifeline import begin_rank
from xgpt.core.stand_in import ENDED, FORKS, NAMESPACES, TIE
from xrunner import worker
from xrunner.loading import Shelf
from xrunner.plan import load_plan
from xrunner.rank import leave

MOST_BYTES, MOST_FILES = 2**18, 253  # of a word
REFUSED = b"no"
_NEW_USER, _NEW_NET = 0x10000000, 0x40000000  # of sched.h
_KINDS = (_NEW_USER, _NEW_NET)  # of NAMESPACES
NAME = FORKS
_NUMBERED = {TIE, LIFELINE}  # what of the environment names a descriptor


class _Fork(NamedTuple):
    pid: int
    end: int  # a descriptor that tells of its end
    stand_in: int  # and one over which its stand-in is told


class Forks:
    """Ranks of one run. `num_threads`: of this process, before it has computed."""

    def __init__(self, line: socket.socket, shelf: Shelf, num_threads: int) -> None:
        """`line`: over which the stand-ins ask; `shelf`: with what was read ahead."""
        self._line, self._shelf, self._num_threads = line, shelf, num_threads
        self._poll, self._by_file = select.poll(), dict[int, _Fork]()
        self._asked = 0
        self._count = 1  # as the first one says

    def serve(self, word: str, files: list[int]) -> int:
        """Forks for who asks so, and for the others; returns when all have ended."""
        self._begin(word, files)
        self._poll.register(self._line, select.POLLIN)
        while self._by_file or self._asked < self._count:
            for file, _ in self._poll.poll():
                if file == self._line.fileno():
                    if not self._hear():
                        self._asked = self._count  # nobody is left who would ask
                elif (fork := self._by_file.get(file)) is not None:
                    self._look_at(fork, file)
        return 0

    def _hear(self) -> bool:
        word, files, *_ = socket.recv_fds(self._line, MOST_BYTES, MOST_FILES)
        module, _, argument = word.decode().partition("\0")
        if module == NAME:
            self._begin(argument, files)
        elif not word:
            self._poll.unregister(self._line)
        return bool(word)

    def _begin(self, word: str, files: list[int]) -> None:
        given = json.loads(word)
        self._asked, self._count = self._asked + 1, given["count"]
        pid = None
        try:
            if self._may_fork(given, files):
                parent = os.getpid()
                pid = os.fork()
                if pid == 0:
                    _be_rank(given, files, self._shelf, parent,
                             others=(self._line.fileno(), *self._by_file))
        except OSError:  # no more processes, or memory: the rank may be started yet
            pass
        finally:
            for file in files[1:]:
                os.close(file)
            if self._asked == self._count:
                self._shelf.clear()  # what the forks hold stays with them
        if pid is not None:
            self._watch(_Fork(pid, os.pidfd_open(pid), files[0]))  # of those that were closed
        elif files:
            _tell(files[0], REFUSED)
            os.close(files[0])

    def _watch(self, fork: _Fork) -> None:
        self._by_file |= {fork.end: fork, fork.stand_in: fork}
        for file in (fork.end, fork.stand_in):
            self._poll.register(file, select.POLLIN)

    def _may_fork(self, given: dict[str, Any], files: list[int]) -> bool:
        """Not where the stand-in does not ask, or this process's limit has kept a descriptor of its
        back."""
        are_all = len(files) == 1 + len(_KINDS) + len(given["files"])
        is_alone = len(os.listdir("/proc/self/task")) <= self._num_threads
        return given["asks"] and are_all and is_alone and hasattr(os, "pidfd_open") and (
            load_plan(Path(given["argument"])).device_kind == "cpu")

    def _look_at(self, fork: _Fork, file: int) -> None:
        """It has ended, or its stand-in has."""
        if file == fork.stand_in:
            os.kill(fork.pid, signal.SIGKILL)
        _, status = os.waitpid(fork.pid, 0)
        _tell(fork.stand_in, ENDED + str(status).encode())
        for own in (fork.end, fork.stand_in):
            self._poll.unregister(own)
            del self._by_file[own]
            os.close(own)


def _tell(stand_in: int, word: bytes) -> None:
    with suppress(OSError):  # it is gone
        os.write(stand_in, word)


def _be_rank(given: dict[str, Any], files: list[int], shelf: Shelf, parent: int,
             others: Iterable[int]) -> NoReturn:
    """In the fork: a rank's life, as `python -m mpi4py -m xrunner.worker` leads it. `others`:
    descriptors of `parent`'s, which it forked, that are none of its."""
    code = 1
    try:
        for file in others:
            os.close(file)
        stand_in, *networks = files[:1 + len(_KINDS)]
        if not _enter(networks):
            _tell(stand_in, REFUSED)
            os._exit(0)
        _tell(stand_in, str(os.getpid()).encode())
        for file in (stand_in, *networks):
            os.close(file)
        _take_place(given, files[1 + len(_KINDS):])
        begin_rank()
        if os.getppid() != parent:  # it was gone before this one was tied to it
            os._exit(code)
        import mpi4py  # noqa: F401 (by which it is known that there are others)

        code = worker.main([given["argument"]], shelf)
        leave(code)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # a fork never goes back into the code that forked it
        sys.excepthook(*sys.exc_info())
    finally:
        _leave(code)
    raise AssertionError("it has left")


def _leave(code: int) -> NoReturn:
    """Ends the fork, and all ranks where it failed."""
    with suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    mpi = sys.modules.get("mpi4py.MPI")
    if code and mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.COMM_WORLD.Abort(code)
    os._exit(code)


def _enter(networks: list[int]) -> bool:
    """Goes into these namespaces, which the launcher made for the ranks (xgpt/launch/isolated.py);
    False where the system does not permit it."""
    library = ctypes.CDLL(None, use_errno=True)
    own = [os.stat(f"/proc/self/ns/{kind}").st_ino for kind in NAMESPACES]
    return all(os.fstat(file).st_ino == ours or library.setns(file, kind) == 0
               for file, ours, kind in zip(networks, own, _KINDS, strict=True))


def _take_place(given: dict[str, Any], files: list[int]) -> None:
    """The stand-in's descriptors, of which the standard ones alone go by their numbers; its
    environment, folder and cores, to which mpiexec may have bound it."""
    numbers = dict(zip(given["files"], files, strict=True))
    for number in {0, 1, 2} & numbers.keys():
        os.dup2(numbers[number], number)
    os.setsid()  # as mpiexec has it, and for the system's scheduler to know ranks apart
    os.environ.clear()
    os.environ.update(given["environment"])
    for name in _NUMBERED & os.environ.keys():
        own, *rest = os.environ[name].split(":")
        os.environ[name] = ":".join([str(numbers[int(own)]), *rest])
    if given["folder"] is not None:
        os.chdir(given["folder"])
    if set(given["cores"]) != os.sched_getaffinity(0):
        os.sched_setaffinity(0, given["cores"])
