"""Ranks on several hosts: what mpiexec is told, and whether the hosts can serve at all.

The hosts share their file system: the same paths hold xgpt's environment, the output folder and
the cache. mpiexec waits for ever for a host that does not answer, so each is asked beforehand."""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from xgpt.core.errors import InputError, Mistake, wrong
from xgpt.launch.isolated import TRANSPORTS
from xgpt.launch.launcher import RankProgram
from xgpt.launch.local import mpi_command
from xgpt.launch.process import run_watched

_SSH = "ssh"
# without a terminal nobody can answer a question of ssh's
_SSH_OPTIONS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
_ASK_TIMEOUT_S = 20.0
_NO_PYTHON, _NO_FILE = 41, 42  # exit codes of the question below


@dataclass(frozen=True, slots=True, kw_only=True)
class HostsLauncher:
    """Starts `ranks_each` consecutive ranks on each host, in this order. `program`: is called as
    `PROGRAM HOST COMMAND...` (ssh's way). `source`: the job file, for messages."""

    names: tuple[str, ...]
    ranks_each: int
    threads_per_rank: int
    program: str | None
    source: Path
    interface: str | None = None  # over which they talk

    @property
    def is_here(self) -> bool:
        return False

    def command(self, ranks: RankProgram) -> list[str]:
        """The options are MPICH's, which are Intel MPI's too."""
        options = ["-launcher", _SSH]
        if self.program is not None:
            options += ["-launcher-exec", _path_of(self.program)]
        if (interface := self.interface) is not None:
            options += ["-iface", interface]
            for transport in TRANSPORTS:  # RDMA's devices have other names: the user's word counts
                if transport not in os.environ:
                    options += ["-genv", transport, interface]
        return mpi_command(ranks, [*options, "-hosts", ",".join(self.names), "-ppn",
                                   str(ranks.per_node or self.ranks_each)])

    def run(self, ranks: RankProgram, *, watch: Callable[[], None],
            ask_to_stop: Callable[[], None] | None = None) -> None:
        check_hosts(self, ranks.argument)
        run_watched(self.command(ranks), watch=watch, ask_to_stop=ask_to_stop,
                    inherited=ranks.inherited)


def check_hosts(hosts: HostsLauncher, argument: Path) -> None:
    """Asks all hosts at once whether they have this Python, see `argument`, and have the cores.
    Raises InputError with every host that cannot serve."""
    if shutil.which(_path_of(hosts.program or _SSH)) is None:
        raise wrong(hosts.source, "run.launcher", hosts.program or _SSH,
                    "no such program on this machine")
    with ThreadPoolExecutor(max_workers=min(len(hosts.names), 32)) as pool:
        reasons = list(pool.map(lambda name: _refusal(hosts, name, argument), hosts.names))
    mistakes = [Mistake(file=str(hosts.source), line=None, key="run.hosts", value=name,
                        allowed=reason)
                for name, reason in zip(hosts.names, reasons, strict=True) if reason is not None]
    if mistakes:
        raise InputError(mistakes)


def _refusal(hosts: HostsLauncher, name: str, argument: Path) -> str | None:
    """Why the host cannot serve, or None if it can."""
    python, seen = shlex.quote(sys.executable), shlex.quote(str(argument))
    question = (f"test -x {python} || exit {_NO_PYTHON}; test -r {seen} || exit {_NO_FILE}; "
                "getconf _NPROCESSORS_ONLN")
    try:
        done = subprocess.run([*_ask(hosts.program), name, question], capture_output=True,
                              text=True, errors="replace", stdin=subprocess.DEVNULL,
                              timeout=_ASK_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"cannot be reached: no answer within {_ASK_TIMEOUT_S:.0f} s"
    if done.returncode == _NO_PYTHON:
        return f"has no {sys.executable}: xgpt must be installed at the same path on every host"
    if done.returncode == _NO_FILE:
        return (f"does not see {argument}: the output folder and xgpt's cache must be shared by "
                "all hosts")
    if done.returncode != 0:
        return f"cannot be reached: {_last_line(done.stderr)} (exit code {done.returncode})"
    needed = min(hosts.ranks_each * hosts.threads_per_rank, os.cpu_count() or 1)
    cores = _last_line(done.stdout)
    if cores.isdigit() and int(cores) < needed:
        return (f"has {cores} cores, and would run {hosts.ranks_each} ranks of "
                f"{hosts.threads_per_rank} threads: lower run.ranks or run.threads_per_rank")
    return None


def _ask(program: str | None) -> Sequence[str]:
    return (_SSH, *_SSH_OPTIONS) if program is None else (_path_of(program),)


def _path_of(program: str) -> str:
    return shutil.which(program) or str(Path(program).expanduser())


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else "no message"
