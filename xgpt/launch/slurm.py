"""Ranks within an allocation of Slurm: one task each, started by srun or by an mpiexec that finds
the allocation by itself.

`xgpt submit` runs once, on the first node. Ranks see all GPUs of their node and take the one of
their place on it (xrunner/devices.py). Nodes share their file system, as hosts do
(xgpt/launch/hosts.py).
"""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from xgpt.core.errors import XgptError
from xgpt.job.slurm_section import SlurmSpec
from xgpt.launch.launcher import RankProgram
from xgpt.launch.local import find_mpiexec, refuse_long_name
from xgpt.launch.process import run_watched


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """The nodes that Slurm gave the job in which this process runs."""

    job_id: str
    nodes: int
    node_list: str  # as Slurm writes it: n[1-4]


def allocation_here(environ: Mapping[str, str] = os.environ) -> Allocation | None:
    """The allocation on one of whose nodes this process runs. None elsewhere: a shell of salloc on
    the login node, too, is elsewhere."""
    if "SLURM_JOB_ID" not in environ or "SLURMD_NODENAME" not in environ:
        return None
    return Allocation(job_id=environ["SLURM_JOB_ID"],
                      nodes=int(environ.get("SLURM_JOB_NUM_NODES", "1")),
                      node_list=environ.get("SLURM_JOB_NODELIST", environ["SLURMD_NODENAME"]))


def node_names(allocation: Allocation) -> tuple[str, ...]:
    """Its nodes, in Slurm's order. Raises XgptError."""
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
    """Starts `ranks_each` consecutive ranks on each node of the allocation, in its order."""

    spec: SlurmSpec
    ranks_each: int
    environ: Mapping[str, str]

    @property
    def is_here(self) -> bool:
        return False

    def command(self, ranks: RankProgram) -> list[str]:
        refuse_long_name()
        program = [*self.spec.container, sys.executable, "-m", "mpi4py", "-m", ranks.module,
                   str(ranks.argument)]
        each = ranks.per_node or self.ranks_each
        if self.spec.launch == "mpiexec":
            return [find_mpiexec(), "-n", str(ranks.count), "-ppn", str(each), *program]
        # NOTE: since 22.05 srun does not take cpus-per-task from the job, nor tasks that sbatch's
        # own `--export` left without an environment
        cpus = self.environ.get("SLURM_CPUS_PER_TASK")
        return ["srun", "--overlap", "--kill-on-bad-exit=1", f"--mpi={self.spec.mpi}",
                "--export=ALL", "--distribution=block",
                f"--nodes={-(-ranks.count // each)}", f"--ntasks={ranks.count}",
                f"--ntasks-per-node={each}", *([f"--cpus-per-task={cpus}"] if cpus else []),
                *program]

    def run(self, ranks: RankProgram, *, watch: Callable[[], None],
            ask_to_stop: Callable[[], None] | None = None) -> None:
        run_watched(self.command(ranks), watch=watch, ask_to_stop=ask_to_stop,
                    inherited=ranks.inherited, is_managed=True)
