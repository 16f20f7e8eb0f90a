"""Launchers of ranks: on this machine, on several hosts, and within an allocation of Slurm; their
interface, and the program that they start."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from xgpt.core.errors import MissingExtraError, Mistake, XgptError, refuse, wrong
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate, devices_of_copies
from xgpt.core.system.machine import usable_cores
from xgpt.job.job import Job
from xgpt.job.sections import SlurmSpec
from xgpt.launch.isolated import TRANSPORTS
from xgpt.launch.leftovers import remove_leftovers
from xgpt.launch.process import Started, run_watched, start, watch_to_end


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProgram:
    """`count` ranks of `python -m MODULE ARGUMENT`. They keep the descriptors `inherited` open (the
    output folder's lock). `per_node`: ranks on a node, if fewer than the launcher's own. `standby`:
    waiting ranks that may serve. `holds`: contents of their memory, by name in words.
    `devices_each`: devices that each rank alone has, where a rank is a replica of another engine;
    0: ranks are devices, and see all of their node."""

    module: str
    argument: Path
    count: int
    per_node: int | None = None
    inherited: tuple[int, ...] = ()
    standby: Waiting | None = None
    holds: Mapping[str, str] = field(default_factory=dict)
    devices_each: int = 0


class Waiting(Protocol):
    """Ranks that were started early (xgpt.launch.standby)."""

    def serve(self, ranks: RankProgram) -> Started | None:
        """Lets them work as `ranks`, and returns them; None if others must be started."""


class Launcher(Protocol):
    """Starts ranks on some machines."""

    @property
    def is_here(self) -> bool:
        """Whether all ranks see this machine's local folders, such as /tmp."""

    def run(self, ranks: RankProgram, *, watch: Callable[[], None],
            ask_to_stop: Callable[[], None] | None = None) -> None:
        """Starts the ranks and waits until all have ended, calling `watch` ten times a second.

        SIGINT, SIGTERM, SIGUSR1, SIGHUP and SIGQUIT call `ask_to_stop` (None: end the ranks at
        once), and the ranks finish in their own time. A second signal, the end of a grace period,
        or an exception of `watch` ends them. Raises XgptError with the end of the ranks' messages
        if they fail, StoppedEarly if they were ended at once, InputError if they cannot be started.
        """


def threads_per_rank(job: Job, problem: Problem) -> int:
    """Threads of each rank: the job's number, else an even share of the cores."""
    given = job.run.threads_per_rank
    return given or max(usable_cores() // problem.cluster.devices_per_node, 1)


def ranks_per_node(estimate: Estimate, devices_per_node: int) -> int | None:
    """Number of a schedule's ranks per node that keeps every replica within a node, or on whole
    nodes. None if no number does, for replicas of several shapes."""
    if estimate.others:
        return next((count for count in range(devices_per_node, 0, -1)
                     if _is_placed(devices_of_copies(estimate), count, devices_per_node)), None)
    each = estimate.deployment.devices_per_replica
    return max(devices_per_node // each * each, min(each, devices_per_node))


def rank_layout(estimate: Estimate, devices_per_node: int, *, per_replica: bool,
                ) -> dict[str, Any]:
    """Fields of the RankProgram that runs a schedule: `count`, `per_node` and `devices_each`, with
    a rank per device, or per replica (all of one shape)."""
    per_node = ranks_per_node(estimate, devices_per_node)
    if not per_replica:
        return {"count": estimate.num_devices, "per_node": per_node}
    each = estimate.deployment.devices_per_replica
    return {"count": estimate.num_devices // each, "devices_each": each,
            "per_node": per_node and max(per_node // each, 1)}


def _is_placed(copies: Sequence[int], count: int, devices_per_node: int) -> bool:
    """Whether replicas on so many devices each, one after the other, lie within nodes or on whole
    ones with `count` ranks per node."""
    first = 0
    for each in copies:
        is_whole = count == devices_per_node and first % count == 0 and each % count == 0
        if not is_whole and first // count != (first + each - 1) // count:
            return False
        first += each
    return True


_HERE, _PROXY = ("-launcher", "fork", "-rmk", "user"), "hydra_pmi_proxy"
_MOST_NAME = 63  # characters of a host's name for MPICH; the system allows one more


class LocalLauncher:
    """Starts ranks on this machine, in a network namespace of their own if permitted
    (xgpt.launch.isolated); a single rank needs no MPI."""

    is_here = True

    def command(self, ranks: RankProgram) -> list[str]:
        if ranks.count == 1:
            return [sys.executable, "-m", ranks.module, str(ranks.argument)]
        return local_mpi_command(ranks)

    def run(self, ranks: RankProgram, *, watch: Callable[[], None],
            ask_to_stop: Callable[[], None] | None = None) -> None:
        if ranks.count > 1 or ranks.devices_each > 1:
            remove_leftovers()
        started = None if ranks.standby is None else ranks.standby.serve(ranks)
        watch_to_end(started or start(self.command(ranks), inherited=ranks.inherited,
                                      count=ranks.count if ranks.count > 1 else 0),
                     watch=watch, ask_to_stop=ask_to_stop)


def mpi_command(ranks: RankProgram, options: Sequence[str] = ()) -> list[str]:
    """The command that starts the ranks through mpiexec, with these options."""
    # `-m mpi4py` aborts every rank when one fails; without it the others would wait for ever
    return [find_mpiexec(), *options, "-n", str(ranks.count), sys.executable, "-m", "mpi4py", "-m",
            ranks.module, str(ranks.argument)]


def local_mpi_command(ranks: RankProgram) -> list[str]:
    """The command that starts ranks on this machine alone, unreachable from outside. Raises
    InputError, MissingExtraError."""
    refuse_long_name()
    # ignore resource managers; another MPI's mpiexec has no such options
    is_hydra = Path(find_mpiexec()).resolve().with_name(_PROXY).exists()
    # by the standard library alone: site-packages would take longer than the command
    return [sys.executable, "-I", "-S", str(Path(__file__).with_name("isolated.py")),
            *mpi_command(ranks, _HERE if is_hydra else ())]


def refuse_long_name() -> None:
    """Raises InputError if this machine's name is too long for MPICH, whose ranks would crash."""
    if len(name := socket.gethostname()) > _MOST_NAME:
        raise wrong("this machine", "host name", name, f"at most {_MOST_NAME} characters, which is "
                    "what MPI's ranks can have (`run: {ranks: 1}` needs none)")


def find_mpiexec() -> str:
    """Path of mpiexec: this environment's, which fits mpi4py, before any other on the PATH. Raises
    MissingExtraError."""
    beside = Path(sys.executable).with_name("mpiexec")
    path = str(beside) if beside.is_file() else shutil.which("mpiexec")
    if path is None:
        raise MissingExtraError("mpich", "run", "running more than one rank")
    return path


_SSH = "ssh"
# without a terminal nobody can answer ssh's questions
_SSH_OPTIONS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
_ASK_TIMEOUT_S = 20.0
_NO_PYTHON, _NO_FILE, _NO_ENGINE = 41, 42, 43  # exit codes of the question below


@dataclass(frozen=True, slots=True, kw_only=True)
class HostsLauncher:
    """Starts `ranks_each` consecutive ranks on each host, in this order. `program`: called like
    ssh, `PROGRAM HOST COMMAND...`. `source`: the job file, for messages.

    Hosts share a file system: the same paths hold xgpt's environment, the output folder and the
    cache. mpiexec waits for ever for a host that does not answer, so each is tried before."""

    names: tuple[str, ...]
    ranks_each: int
    threads_per_rank: int
    program: str | None
    source: Path
    interface: str | None = None  # network interface for messages
    engine_python: str | None = None  # that ranks start another engine in
    is_here = False

    def command(self, ranks: RankProgram) -> list[str]:
        """The command that starts the ranks; its options are those of MPICH and Intel MPI."""
        options = ["-launcher", _SSH]
        if self.program is not None:
            options += ["-launcher-exec", _path_of(self.program)]
        if (interface := self.interface) is not None:
            options += ["-iface", interface]
            for transport in TRANSPORTS:  # RDMA devices have other names: users may set their own
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
    """Asks all hosts at once whether they have this Python and the engine's, see `argument`, and
    have the cores. Raises InputError with every host that cannot serve."""
    if shutil.which(_path_of(hosts.program or _SSH)) is None:
        raise wrong(hosts.source, "run.launcher", hosts.program or _SSH,
                    "no such program on this machine")
    with ThreadPoolExecutor(max_workers=min(len(hosts.names), 32)) as pool:
        reasons = list(pool.map(lambda name: _refusal(hosts, name, argument), hosts.names))
    refuse(Mistake(file=str(hosts.source), line=None, key="run.hosts", value=name, allowed=reason)
           for name, reason in zip(hosts.names, reasons, strict=True) if reason is not None)


def _refusal(hosts: HostsLauncher, name: str, argument: Path) -> str | None:
    """The reason why the host cannot run ranks; None if it can."""
    asking = (_SSH, *_SSH_OPTIONS) if hosts.program is None else (_path_of(hosts.program),)
    python, seen = shlex.quote(sys.executable), shlex.quote(str(argument))
    engine = shlex.quote(_path_of(hosts.engine_python or sys.executable))
    question = (f"test -x {python} || exit {_NO_PYTHON}; test -r {seen} || exit {_NO_FILE}; "
                f"test -x {engine} || exit {_NO_ENGINE}; getconf _NPROCESSORS_ONLN")
    try:
        done = subprocess.run([*asking, name, question], capture_output=True,
                              text=True, errors="replace", stdin=subprocess.DEVNULL,
                              timeout=_ASK_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"cannot be reached: no answer within {_ASK_TIMEOUT_S:.0f} s"
    if done.returncode == _NO_PYTHON:
        return f"has no {sys.executable}: xgpt must be installed at the same path on every host"
    if done.returncode == _NO_FILE:
        return (f"does not see {argument}: the output folder and xgpt's cache must be shared by "
                "all hosts")
    if done.returncode == _NO_ENGINE:
        return (f"has no program {hosts.engine_python}: run.engine_python must be installed at the "
                "same path on every host")
    if done.returncode != 0:
        return f"cannot be reached: {_last_line(done.stderr)} (exit code {done.returncode})"
    needed = min(hosts.ranks_each * hosts.threads_per_rank, os.cpu_count() or 1)
    cores = _last_line(done.stdout)
    if cores.isdigit() and int(cores) < needed:
        return (f"has {cores} cores, and would run {hosts.ranks_each} ranks of "
                f"{hosts.threads_per_rank} threads: lower run.ranks or run.threads_per_rank")
    return None


def _path_of(program: str) -> str:
    return shutil.which(program) or str(Path(program).expanduser())


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else "no message"


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """The nodes that Slurm gave the job in which this process runs."""

    job_id: str
    nodes: int
    node_list: str  # as Slurm writes it: n[1-4]


def allocation_here(environ: Mapping[str, str] = os.environ) -> Allocation | None:
    """The Slurm allocation on one of whose nodes this process runs; None elsewhere, also in a shell
    of salloc on the login node."""
    if "SLURM_JOB_ID" not in environ or "SLURMD_NODENAME" not in environ:
        return None
    return Allocation(job_id=environ["SLURM_JOB_ID"],
                      nodes=int(environ.get("SLURM_JOB_NUM_NODES", "1")),
                      node_list=environ.get("SLURM_JOB_NODELIST", environ["SLURMD_NODENAME"]))


def node_names(allocation: Allocation) -> tuple[str, ...]:
    """Names of the allocation's nodes, in Slurm's order. Raises XgptError."""
    if allocation.nodes == 1:
        return (allocation.node_list,)
    command = ["scontrol", "show", "hostnames", allocation.node_list]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as cause:
        raise XgptError(f"`{' '.join(command)}` failed: {cause}") from None
    return tuple(done.stdout.split())


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmLauncher:
    """Starts `ranks_each` consecutive ranks on each node of the allocation, in its order, by srun
    (a task each) or by an mpiexec that finds the allocation by itself. `xgpt submit` runs once, on
    the first node. Ranks that are devices see all GPUs of their node, and use the one with their
    own index there (xrunner/devices.py). srun binds those that are replicas to their GPUs, but not
    the only one of a node; mpiexec binds none. Nodes share a file system, as hosts do."""

    spec: SlurmSpec
    ranks_each: int
    environ: Mapping[str, str]
    has_gpus: bool = False
    is_here = False

    def command(self, ranks: RankProgram) -> list[str]:
        refuse_long_name()
        program = [*self.spec.container, sys.executable, "-m", "mpi4py", "-m", ranks.module,
                   str(ranks.argument)]
        if self.spec.launch == "mpiexec":
            each = ranks.per_node or self.ranks_each
            return [find_mpiexec(), "-n", str(ranks.count), "-ppn", str(each), *program]
        return [*self.srun(ranks), *program]

    def srun(self, ranks: RankProgram) -> list[str]:
        """srun with its options for these ranks."""
        each = ranks.per_node or self.ranks_each
        # NOTE: since 22.05 srun does not take cpus-per-task from the job, nor tasks that sbatch's
        # own `--export` left without an environment
        cpus = int(self.environ.get("SLURM_CPUS_PER_TASK") or 0) * (ranks.devices_each or 1)
        own = [f"--cpus-per-task={cpus}"] if cpus else []
        if ranks.devices_each and self.has_gpus:  # implies --gpu-bind=per_task
            own.append(f"--gpus-per-task={ranks.devices_each}")
        return ["srun", "--overlap", "--kill-on-bad-exit=1", f"--mpi={self.spec.mpi}",
                "--export=ALL", "--distribution=block",
                f"--nodes={-(-ranks.count // each)}", f"--ntasks={ranks.count}",
                f"--ntasks-per-node={each}", *own]

    def run(self, ranks: RankProgram, *, watch: Callable[[], None],
            ask_to_stop: Callable[[], None] | None = None) -> None:
        run_watched(self.command(ranks), watch=watch, ask_to_stop=ask_to_stop,
                    inherited=ranks.inherited, is_managed=True)


def planned_srun(job: Job, problem: Problem, estimate: Estimate, per_replica: bool) -> str:
    """srun's options for the ranks of a schedule that is planned outside of the allocation; "" if
    srun does not start them."""
    assert job.slurm is not None, "a job for Slurm"
    cluster, cpus = problem.cluster, job.slurm.cpus_per_task
    launcher = SlurmLauncher(spec=job.slurm, ranks_each=cluster.devices_per_node,
                             environ={"SLURM_CPUS_PER_TASK": str(cpus or "")},
                             has_gpus=cluster.device.kind == "gpu")
    layout = rank_layout(estimate, cluster.devices_per_node, per_replica=per_replica)
    return "" if job.slurm.launch == "mpiexec" else " ".join(launcher.srun(
        RankProgram(module="", argument=job.output, **layout)))


def launcher_of(job: Job, problem: Problem) -> Launcher:
    """The Launcher of the job's ranks. A job with `slurm` runs on this machine if it is started
    outside of an allocation."""
    cluster = problem.cluster
    if job.slurm is not None and allocation_here() is not None:
        return SlurmLauncher(spec=job.slurm, ranks_each=cluster.devices_per_node,
                             environ=os.environ, has_gpus=cluster.device.kind == "gpu")
    if job.run.hosts:
        return HostsLauncher(
            names=job.run.hosts[:cluster.num_nodes], ranks_each=cluster.devices_per_node,
            threads_per_rank=threads_per_rank(job, problem), program=job.run.launcher,
            source=job.source, interface=job.run.interface, engine_python=job.run.engine_python)
    return LocalLauncher()
