"""The section `slurm` of a job as a value: what is asked of Slurm, in its own words."""

import math
from dataclasses import dataclass
from typing import Literal

LAUNCHES = ("srun", "mpiexec")
REQUEUES = 3  # after warnings of the time limit
WARNING_S = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmSpec:
    """Options of sbatch under its own names (None: left to the cluster), and how the batch script
    goes about it. `load_job` (xgpt.core.slurm_section) has checked them."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    dependency: str | None = None
    nodes: int | None = None
    ntasks_per_node: int | None = None
    gpus_per_node: str | None = None  # "4", or "a100:4"
    cpus_per_task: int | None = None
    mem: str | None = None
    time: str | None = None
    exclusive: bool = False
    mail_type: tuple[str, ...] = ()
    mail_user: str | None = None
    at_once: int | None = None  # tasks of an array that may run at a time
    extra: tuple[str, ...] = ()  # whole options of sbatch, `--comment=...`
    modules: tuple[str, ...] = ()
    venv: str | None = None  # absolute
    env: tuple[tuple[str, str], ...] = ()
    prologue: tuple[str, ...] = ()  # lines of bash
    container: tuple[str, ...] = ()  # words before the command of every rank
    launch: Literal["srun", "mpiexec"] = "srun"
    mpi: str = "pmi2"  # srun's --mpi
    requeue: int = REQUEUES
    warning_s: int = WARNING_S  # before the time limit

    @property
    def gpus_each(self) -> int | None:
        """GPUs of each node."""
        return None if self.gpus_per_node is None else int(self.gpus_per_node.rpartition(":")[2])

    @property
    def time_s(self) -> float | None:
        return None if self.time is None else seconds_of(self.time)


def seconds_of(time: str) -> float:
    """Slurm's `minutes`, `M:S`, `H:M:S`, `D-H`, `D-H:M`, `D-H:M:S`, or infinity."""
    if time.lower() in ("infinite", "unlimited"):
        return math.inf
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    else:
        hours, minutes, seconds = ((0, *parts, 0)[:3] if len(parts) < 3 else parts)
    return float(((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds)


def time_of(seconds: float) -> str:
    """Whole minutes that hold so many seconds, as Slurm writes them: `1-02:30:00`."""
    minutes = math.ceil(seconds / 60)
    hours, days = minutes // 60 % 24, minutes // 60 // 24
    return (f"{days}-" if days else "") + f"{hours:02d}:{minutes % 60:02d}:00"
