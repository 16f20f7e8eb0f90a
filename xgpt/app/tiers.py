"""Memory of this machine below its devices, for jobs that its devices cannot hold."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache

from xgpt.app.opened_job import OpenedJob
from xgpt.core import catalog
from xgpt.core.errors import InfeasibleError, LacksMemoryError, XgptError, wrong
from xgpt.core.schedule import Estimate
from xgpt.core.system.direct_file import why_no_disk
from xgpt.core.system.tiers import measured_tiers
from xgpt.core.units import format_bytes
from xgpt.job.job import Job
from xgpt.job.placement_section import with_tiers
from xsimulator.memory import capacity_bytes, least_weight_bytes

_BUS = "pcie4-x16"  # chosen, where no profile has measured a card's copies
_measured = cache(measured_tiers)  # for several layouts of one machine


def needs_tiers(jobs: Sequence[OpenedJob]) -> bool:
    """Whether a job on these layouts of this machine has no plan without memory below the devices:
    its weights fit on none, or it asks for a placement. Raises InfeasibleError for weights that fit
    on none where the job may not use such memory."""
    problems = [job.problem for job in jobs]
    if not jobs[0].is_local:
        return False
    if problems[0].fixed.placement is not None:
        return True
    needed = [least_weight_bytes(one) for one in problems]
    room = [one.cluster.num_devices * capacity_bytes(one.cluster.device) for one in problems]
    if any(own <= has for own, has in zip(needed, room, strict=True)):
        return False
    if problems[0].offload == "auto":
        return True
    raise InfeasibleError(
        f"no schedule: there is too little memory. The weights of {problems[0].model.name} "
        f"alone take {format_bytes(min(needed))} as {problems[0].weight_dtype}, and "
        f"{format_bytes(max(room))} can be used here; it takes more memory, a smaller model, "
        "or a dtype of fewer bytes")


def lack_memory(planned: Iterable[object]) -> bool:
    """Whether all layouts were refused since a schedule would need more memory."""
    return all(isinstance(one, LacksMemoryError) for one in planned)


def with_measured_tiers(opened: OpenedJob, given: Estimate | None = None) -> OpenedJob:
    """The job with this machine's tiers that it does not give, measured in its folder for
    offloading in about a second. CPU ranks have the disk alone. `given`: only if this estimate has
    a placement. Raises InputError for a folder that cannot be used."""
    job, cluster = opened.job, opened.problem.cluster
    is_gpu = cluster.device.kind == "gpu"
    lacking = {"disk", *(["host"] if is_gpu else [])} - {tier.name for tier in job.tiers}
    is_placed = given is None or any(pool.placement for pool in given.all_pools)
    if not (opened.is_local and opened.problem.offload == "auto" and lacking and is_placed):
        return opened
    folder = job.offload_folder
    is_new = not folder.exists()
    try:
        found = _measured(folder, catalog.link(_BUS) if is_gpu else None)
    except XgptError as cause:
        raise wrong(job.source, "run.offload", str(folder), str(cause)) from None
    finally:
        if is_new and folder.is_dir():
            folder.rmdir()
    job = replace(job, tiers=(*job.tiers, *(tier for tier in found if tier.name in lacking)))
    return replace(opened, job=job, problem=replace(
        opened.problem, cluster=with_tiers(cluster, job)))


def refuse_folder(job: Job, estimate: Estimate) -> None:
    """Raises InputError where the folder for offloading cannot be written, lies in memory, or has
    too little room for what a schedule's placements keep there."""
    needed = sum(budget[-1] for pool in estimate.all_pools if pool.placement is not None
                 for budget in pool.placement.budgets)
    if not needed:
        return
    folder = job.offload_folder
    held = sum(path.stat().st_size for path in folder.glob("weights-*"))  # of earlier runs
    if (allowed := why_no_disk(folder, max(needed - held, 0))) is not None:
        raise wrong(job.source, "run.offload", str(folder), allowed)
