"""The table of launchers: the first whose row takes a job starts its ranks."""

import os
from collections.abc import Callable

from xgpt.core.problem import Problem
from xgpt.job.job import Job
from xgpt.launch.hosts import HostsLauncher
from xgpt.launch.launcher import Launcher, threads_per_rank
from xgpt.launch.local import LocalLauncher
from xgpt.launch.slurm import SlurmLauncher, allocation_here


def _slurm(job: Job, problem: Problem) -> Launcher | None:
    """Inside the allocation that the job asked for; what runs outside runs on that machine."""
    if job.slurm is None or allocation_here() is None:
        return None
    return SlurmLauncher(spec=job.slurm, ranks_each=problem.cluster.devices_per_node,
                         environ=os.environ)


def _hosts(job: Job, problem: Problem) -> Launcher | None:
    if not job.run.hosts:
        return None
    cluster = problem.cluster
    return HostsLauncher(
        names=job.run.hosts[:cluster.num_nodes], ranks_each=cluster.devices_per_node,
        threads_per_rank=threads_per_rank(job, problem), program=job.run.launcher,
        source=job.source, interface=job.run.interface)


LAUNCHERS: dict[str, Callable[[Job, Problem], Launcher | None]] = {
    "slurm": _slurm,
    "hosts": _hosts,
    "local": lambda job, problem: LocalLauncher(),
}


def launcher_of(job: Job, problem: Problem) -> Launcher:
    """The launcher of the job's ranks."""
    asked = (row(job, problem) for row in LAUNCHERS.values())
    return next(launcher for launcher in asked if launcher is not None)
