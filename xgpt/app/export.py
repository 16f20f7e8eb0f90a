"""A job as a file for Kubernetes or SkyPilot, made from it and its schedule."""

import re
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

from xgpt.app.opened import open_job
from xgpt.app.plan import plan_job
from xgpt.app.telling import Teller
from xgpt.core.errors import InputError, Mistake
from xgpt.job.job import Job
from xgpt.launch.manifests import Exported, render_jobset, render_skypilot
from xgpt.report.table import WIDTH

FORMATS: dict[str, Callable[[Exported], str]] = {
    "jobset": render_jobset, "skypilot": render_skypilot}
_REMARK = {
    "jobset": "The claim {claim} is a shared volume (of several nodes: ReadWriteMany) that holds "
              "the folder {folder}. The image has xgpt with its extra `run` and, of several nodes, "
              "an ssh server and keys with which its pods reach each other.",
    "skypilot": "The image has xgpt with its extra `run`. Results are on the cluster, in "
                "~/sky_workdir: fetch them before it goes down."}


def export(job: Job, overrides: Sequence[str], tell: Teller, *, to: str, image: str,
           claim: str) -> str:
    """The file's text. Raises InputError for a job that such a file cannot run."""
    plan = plan_job(open_job(job, tell, "lengths"))
    cluster, num_devices = plan.opened.problem.cluster, plan.schedule.estimate.num_devices
    each = min(cluster.devices_per_node, num_devices)
    nodes = -(-num_devices // each)
    _check(job, to, nodes)
    gpu = cluster.device.name if cluster.device.kind == "gpu" else None
    # its own machine is what the job runs on there
    own = ["cluster=local", f"run.ranks={num_devices}", "slurm=null"]
    said = f"chosen: {plan.schedule.estimate.policy}, " + (
        f"{plan.schedule.figures.throughput_qps:.3g} queries/s in steady state by the times of "
        f"{cluster.name}; planned anew where it runs.")
    remarks = [f"{job.source.name} for {to}, made by `xgpt export`.",
               _REMARK[to].format(claim=claim, folder=job.source.parent), said]
    return FORMATS[to](Exported(
        name=_name(job.name), job_file=job.source, nodes=nodes, devices=each, gpu=gpu,
        words=tuple(word for key in (*overrides, *own) for word in ("--set", key)),
        image=image, claim=claim,
        remarks=tuple(line for text in remarks for line in textwrap.wrap(text, WIDTH - 2))))


def _check(job: Job, to: str, nodes: int) -> None:
    folder, mistakes = job.source.parent, list[Mistake]()

    def refuse(key: str, value: object, allowed: str) -> None:
        mistakes.append(Mistake(file=str(job.source), line=None, key=key, value=value,
                                allowed=allowed))

    files = job.workload.requests.paths if job.workload.requests is not None else ()
    own = [("workload.requests", path) for path in files] + [("output", job.output)]
    own += [("model", Path(job.model))] if Path(job.model).is_absolute() else []
    own += [("profile", job.profile)] if job.profile is not None else []
    for key, path in own:
        if not path.is_relative_to(folder):
            refuse(key, str(path), f"below {folder}: that folder alone is taken along")
    if to == "skypilot" and nodes > 1:
        refuse("cluster", nodes, "one node: those of SkyPilot share no file system, which ranks on "
               "several hosts need")
    if mistakes:
        raise InputError(mistakes)


def _name(text: str) -> str:
    """A name of Kubernetes' kind: lower-case letters, digits and dashes."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40].strip("-")
    return name if name and name[0].isalpha() else f"xgpt-{name}".strip("-")
