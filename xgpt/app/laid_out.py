"""A job on the layouts of this machine's cores (so many ranks of so many threads) that it leaves
open."""

from dataclasses import replace

from xgpt.app.opened import OpenedJob
from xgpt.core.errors import wrong
from xgpt.core.problem import Problem
from xgpt.core.system.machine import Layout, usable_cores
from xgpt.job.resolve import laid_out, open_layouts, resolve_cluster, resolve_weight_dtype
from xgpt.launch.launcher import threads_per_rank
from xprofiler.profile_file import load_profile
from xscheduler.sizes import sizes_of


def layout_of(opened: OpenedJob) -> Layout:
    """The layout that the job has."""
    return Layout(opened.problem.cluster.num_devices, threads_per_rank(opened.job, opened.problem))


def on_open_layouts(opened: OpenedJob) -> dict[Layout, OpenedJob]:
    """The job on every layout that it leaves open, the fewest ranks first; as it is, where it
    leaves none. A profile that it names is of one. What asks for few devices leaves open how
    many."""
    if is_sized(opened.problem):
        return {layout_of(one): one for one in _on_sizes(opened)}
    layouts = open_layouts(opened.job)
    if layouts and opened.job.profile is not None:
        of = load_profile(opened.job.profile).metadata
        layouts = (Layout(of.ranks, of.threads_per_rank),)
    if not layouts:
        return {layout_of(opened): opened}
    return {layout: _on(opened, layout, is_one_of_many=len(layouts) > 1) for layout in layouts}


def on_ranks(opened: OpenedJob, ranks: int) -> OpenedJob:
    """The job on so many ranks, if it leaves open how many."""
    if is_sized(opened.problem):
        return _on_size(opened, ranks)
    layouts = open_layouts(opened.job)
    if not layouts:
        return opened
    threads = opened.job.run.threads_per_rank or max(usable_cores() // ranks, 1)
    return _on(opened, Layout(ranks, threads))


def is_sized(problem: Problem) -> bool:
    """Whether the job asks for few devices, or cheap ones, of those that its cluster has."""
    return problem.constraint.objective != "throughput"


def _on_sizes(opened: OpenedJob) -> list[OpenedJob]:
    """The job on every part of its cluster that it may be given, the smallest first. Raises
    InputError where that cannot be said."""
    job, cluster = opened.job, opened.problem.cluster
    objective = opened.problem.constraint.objective
    if opened.is_local and cluster.device.kind == "cpu":
        raise wrong(job.source, "objective", objective,
                    "of a cluster of devices: of this machine's cores all are used")
    if objective == "cost" and cluster.device.price_per_hour is None:
        raise wrong(job.source, "price_per_hour", None, "required for objective cost: the catalog "
                    f"has no price of {cluster.device.name}")
    return [_on_size(opened, size) for size in sizes_of(cluster)]


def _on_size(opened: OpenedJob, devices: int) -> OpenedJob:
    if devices == opened.problem.cluster.num_devices:
        return opened
    job = replace(opened.job, run=replace(opened.job.run, ranks=devices))
    return replace(opened, job=job, problem=replace(
        opened.problem, cluster=resolve_cluster(job)))


def _on(opened: OpenedJob, layout: Layout, *, is_one_of_many: bool = False) -> OpenedJob:
    job, problem = laid_out(opened.job, layout), opened.problem
    cluster, fixed = resolve_cluster(job), problem.fixed
    if is_one_of_many and fixed.tp_degree is None and not fixed.tp_gpus:
        # what tensor parallelism would divide among ranks, a layout of fewer divides among threads,
        # without messages
        fixed = replace(fixed, tp_degree=1, tp_gpus=0)
    return replace(opened, job=job, problem=replace(
        problem, cluster=cluster, fixed=fixed,
        weight_dtype=resolve_weight_dtype(job, problem.dtype, problem.model, cluster)))
