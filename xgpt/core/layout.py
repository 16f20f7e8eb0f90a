"""How the cores of this machine are laid out for a job: so many ranks of so many threads each."""

from dataclasses import replace
from typing import NamedTuple

from xgpt.core.engines import ONE_PROCESS, OWN_ENGINE
from xgpt.core.job import Job
from xgpt.core.local import MAX_DEFAULT_WORKERS, gpus_here, usable_cores
from xgpt.core.run_section import LOCAL_CLUSTER


class Layout(NamedTuple):
    """Ranks, and the threads of each."""

    ranks: int
    threads: int

    def __str__(self) -> str:
        return f"{self.ranks}x{self.threads}"

    @property
    def words(self) -> str:
        """As "2 ranks x 1 thread"."""
        return (f"{self.ranks} rank{'s' * (self.ranks > 1)} x "
                f"{self.threads} thread{'s' * (self.threads > 1)}")


def layouts(cores: int) -> tuple[Layout, ...]:
    """Every way to divide the cores evenly, the fewest ranks first."""
    return tuple(Layout(ranks, cores // ranks)
                 for ranks in range(1, min(cores, MAX_DEFAULT_WORKERS) + 1) if cores % ranks == 0)


def open_layouts(job: Job) -> tuple[Layout, ...]:
    """The layouts that a job leaves open: those of the fewest and of the most ranks that it allows;
    none where it names its ranks, is not for this machine's cores alone, or is another engine's.
    Threads that it names leave one."""
    run = job.run
    if job.cluster != LOCAL_CLUSTER or run.ranks is not None or run.hosts or (
            run.engine != OWN_ENGINE and run.engine not in ONE_PROCESS) or gpus_here():
        return ()
    cores = usable_cores()
    if run.engine in ONE_PROCESS:
        return (Layout(1, run.threads_per_rank or cores),)
    if run.threads_per_rank is not None:
        ranks = min(max(cores // run.threads_per_rank, 1), MAX_DEFAULT_WORKERS)
        return (Layout(ranks, run.threads_per_rank),)
    least, most = job.schedule.replicas or 1, job.constraint.max_gpus or cores
    allowed = [layout for layout in layouts(cores) if least <= layout.ranks <= most]
    return (*allowed[:1], *allowed[1:][-1:])


def laid_out(job: Job, layout: Layout) -> Job:
    """The job with its ranks and threads named."""
    return replace(job, run=replace(job.run, ranks=layout.ranks, threads_per_rank=layout.threads))
