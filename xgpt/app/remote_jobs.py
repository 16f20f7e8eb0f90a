"""Jobs that run elsewhere. For Slurm: plans them as far as this machine can, and writes and submits
their batch script (several job files become one array, a task each). For Kubernetes and SkyPilot:
writes the job as a file of theirs."""

import importlib.util
import math
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from xgpt.app.opened_job import open_job
from xgpt.app.running.finished import finished_result
from xgpt.app.running.prepare import check_model, make_folder, refuse_what_no_machine_runs
from xgpt.app.schedule import Plan, executable, plan_job
from xgpt.app.teller import Teller
from xgpt.core.errors import InputError, Mistake, XgptError, refuse, wrong
from xgpt.core.schedule_file import to_json
from xgpt.core.system import machine as local
from xgpt.core.system.whole_file import write_atomically
from xgpt.core.units import DTYPE_BYTES, format_seconds
from xgpt.job.job import LOCAL_CLUSTER, Job
from xgpt.job.resolve import only_planned, resolve_cluster
from xgpt.job.sections import SlurmSpec, time_of
from xgpt.launch.exports import Exported, render_jobset, render_skypilot
from xgpt.launch.launcher import Allocation, node_names, planned_srun
from xgpt.launch.slurm_jobs import BatchJob, Task, check_paths, quoted, render_sbatch, submit_script
from xgpt.report.table import WIDTH, fact, shown
from xgpt.report.words import controls_line, counted, placement
from xgpt.run_folder.files import SlurmRecord, begin_clock, load_record, standard_input
from xrunner.backends.engine import engine_of, mistake
from xscheduler.evaluator import predict
from xscheduler.fallback import initial_reason
from xscheduler.margin import Computed

SCRIPT = "slurm.sh"
# Factors of a time limit over the prediction, for measured step times and for less exact computed
# ones; seconds before the first query (Python starts, the first profile).
_SLACK, _COMPUTED_SLACK, _SETUP_S = 1.25, 2.0, 600.0
_STEP_S = 300.0  # limits are whole steps: nobody reads 01:37
FORMATS: dict[str, Callable[[Exported], str]] = {
    "jobset": render_jobset, "skypilot": render_skypilot}
_REMARK = {
    "jobset": "The claim {claim} is a shared volume (of several nodes: ReadWriteMany) that holds "
              "the folder {folder}. The image has xgpt with its extra `run` and, of several nodes, "
              "an ssh server and keys with which its pods reach each other.",
    "skypilot": "The image has xgpt with its extra `run`. Results are on the cluster, in "
                "~/sky_workdir: fetch them before it goes down."}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLayout:
    """Numbers of nodes and of ranks on each: one per GPU, unless the job says otherwise."""

    nodes: int
    ranks_each: int
    gpus_per_node: str | None  # in sbatch's syntax


def layout_of(job: Job) -> NodeLayout:
    """The nodes and ranks of the job, from its section `slurm`, or from its cluster where that is
    not `local`. Raises InputError where they contradict each other or are not given."""
    assert job.slurm is not None, "only a job for Slurm has a layout"
    if job.cluster != LOCAL_CLUSTER:
        return _of_cluster(job, job.slurm)
    spec = job.slurm
    nodes, ranks = spec.nodes or 1, job.run.ranks
    each = spec.ntasks_per_node or spec.gpus_each or (ranks or 0) // nodes
    if not each:
        raise InputError([mistake(job, "slurm.ntasks_per_node", None, (
            "required with `cluster: local`, or slurm.gpus_per_node (one rank per GPU), or "
            "run.ranks: the devices of the nodes are not known here"))])
    if ranks is not None and ranks != nodes * each:
        raise InputError([mistake(job, "run.ranks", ranks, (
            f"{nodes * each} ({each} on each of slurm.nodes = {nodes}), or left out"))])
    return NodeLayout(nodes=nodes, ranks_each=each, gpus_per_node=spec.gpus_per_node)


def _of_cluster(job: Job, spec: SlurmSpec) -> NodeLayout:
    cluster = resolve_cluster(job)
    nodes, each = cluster.num_nodes, cluster.devices_per_node
    name = f"the job's share of cluster {cluster.name}"
    mistakes = [mistake(job, f"slurm.{key}", given, f"{wanted}, {name}, or left out")
                for key, given, wanted in (
                    ("nodes", spec.nodes, nodes), ("ntasks_per_node", spec.ntasks_per_node, each))
                if given not in (None, wanted)]
    if cluster.island_link is not None:
        mistakes.append(mistake(job, "cluster.links", None, (
            "left out with `slurm`: ranks measure one link in a node and one between nodes. (`xgpt "
            "schedule` without `slurm` plans for more; to run, give the slowest as intra_link)")))
    is_gpu = cluster.device.kind == "gpu"
    if is_gpu and spec.gpus_each is not None and spec.gpus_each < each:
        mistakes.append(mistake(job, "slurm.gpus_per_node", spec.gpus_per_node,
                                 f"at least {each}, {name}, or left out"))
    refuse(mistakes)
    # a site's own way of asking for GPUs
    is_asked = any(option.startswith(("--gres", "--gpus", "-G")) for option in spec.extra)
    return NodeLayout(nodes=nodes, ranks_each=each, gpus_per_node=spec.gpus_per_node or (
        str(each) if is_gpu and not is_asked else None))


def in_allocation(job: Job, allocation: Allocation, tell: Teller) -> Job:
    """The job for the nodes of its Slurm allocation: with `cluster: local` and these as hosts.
    Raises InputError for one that they cannot run."""
    layout = layout_of(job)
    if layout.nodes > allocation.nodes:
        raise wrong(job.source, "slurm.nodes", layout.nodes,
                    f"at most {allocation.nodes}, the nodes of Slurm job {allocation.job_id}")
    ranks = layout.nodes * layout.ranks_each
    device = local.detect(ranks, layout.nodes).device
    wanted = None if job.cluster == LOCAL_CLUSTER else resolve_cluster(job).device
    if device.kind == "cpu" and (wanted is not None and wanted.kind == "gpu"):
        raise wrong(job.source, "cluster", str(job.cluster),
                    f"its GPUs ({wanted.name}): the nodes of Slurm job {allocation.job_id} show "
                    "none (another slurm.partition?)")
    if wanted is not None and wanted.name != device.name:
        tell.say(f"note: {job.cluster} has {wanted.name}, and these nodes {device.name}: the job "
                 "is planned for these nodes")
    elif device.kind == "cpu" and layout.gpus_per_node is not None:
        tell.say("note: the job asks for GPUs, these nodes show none: its ranks run on CPU cores")
    names = node_names(allocation)[:layout.nodes]
    return replace(job, cluster=LOCAL_CLUSTER, run=replace(job.run, ranks=ranks, hosts=names))


JobArguments = tuple[Job, tuple[str, ...]]  # a job to submit, and its `--set`s


class Needed(NamedTuple):
    """Seconds of a job with loading: expected, and with setup and all margins."""

    expected_s: float
    sure_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchDraft:
    """A batch script before it is submitted. `plans`: of each job, None where this machine cannot
    make one; `needed`: its time, None where unknown. `limit`: label and words of the time limit."""

    batch: BatchJob
    plans: tuple[Plan | None, ...]
    needed: tuple[Needed | None, ...]
    limit: tuple[str, str]

    @property
    def script(self) -> str:
        return render_sbatch(self.batch)

    def __str__(self) -> str:
        """The screen of submitted jobs: expected time of each, its plan, time limit and script."""
        rows = [row for parts in zip(self.batch.tasks, self.plans, self.needed, strict=True)
                for row in _facts(*parts)]
        script = shown(self.batch.tasks[0].output / SCRIPT)
        rows += [self.limit, ("script", f"{script} (--verbose prints it)")]
        return "\n".join(fact(label, text) for label, text in rows)

    def to_dict(self) -> dict[str, Any]:
        return {"script": self.script, "nodes": self.batch.nodes,
                "ranks": self.batch.nodes * self.batch.ranks_each, "time": self.batch.time,
                "schedules": [plan and to_json(plan.schedule) for plan in self.plans]}


def submit_batch(wanted: Sequence[JobArguments], tell: Teller, *, is_dry: bool = False,
                 is_again: bool = False) -> dict[str, Any]:
    """Submits the jobs to Slurm, except those that are done (`is_again`: those too, after moving
    their earlier files aside); `is_dry`: only drafts the script. Prints each plan, and returns the
    `--json` object. Raises XgptError."""
    jobs, done = list[JobArguments](), list[dict[str, Any]]()
    for job, overrides in wanted:
        if is_again and not is_dry:
            _refuse_twice(job.output)  # what it writes must not be moved
        found = None if is_dry else finished_result(job, tell, is_again=is_again)
        if found is None:
            jobs.append((job, overrides))
        else:
            done.append({**found, "output": job.output})
    if not jobs:
        return {"jobs": done}
    drafted = draft_batch(jobs, tell, fetches=not is_dry)
    tell.say(str(drafted))
    for plan in filter(None, drafted.plans):
        tell.detail(plan.details)
    if is_dry:
        return drafted.to_dict()
    records = submit_to_slurm(jobs, drafted)
    tell.say(follow_words(records, drafted))
    return {**drafted.to_dict(), "jobs": [
        {"job_id": record.job_id, "output": job.output, "log": record.log}
        for (job, _), record in zip(jobs, records, strict=True)] + done}


def draft_batch(wanted: Sequence[JobArguments], tell: Teller, *, fetches: bool) -> BatchDraft:
    """Plans the jobs and makes their batch script, without submitting it. `fetches`: downloads the
    models to this machine's cache, which the nodes share; they often have no network. Raises
    InputError, and InfeasibleError where a latency limit cannot be met."""
    jobs = [job for job, _ in wanted]
    refuse(mistake(job, "slurm", None, "a section, as the other job files have: together they are "
                   "one array") for job in jobs if job.slurm is None)
    spec, layout = jobs[0].slurm, _common_layout(jobs)
    assert spec is not None
    plans = tuple(_plan(job, tell, fetches=fetches) for job in jobs)
    needed = tuple(map(_needed, plans))
    time, limit = _time_limit(jobs[0], needed)
    batch = BatchJob(
        name=jobs[0].name, spec=spec, nodes=layout.nodes, ranks_each=layout.ranks_each,
        gpus_per_node=layout.gpus_per_node, time=time,
        python=sys.executable if spec.venv is None else f"{spec.venv}/bin/python",
        tasks=tuple(Task(job_file=job.source, output=job.output, overrides=overrides,
                         planned="" if plan is None else planned_srun(
                             job, plan.opened.problem, plan.schedule.estimate,
                             engine_of(job).rank_per_replica))
                    for (job, overrides), plan in zip(wanted, plans, strict=True)))
    check_paths(batch)
    return BatchDraft(batch=batch, plans=plans, needed=needed, limit=limit)


def _facts(task: Task, plan: Plan | None, needed: Needed | None) -> Iterator[tuple[str, str]]:
    """Yields labels and words of a job's screen: expected time, job, plan and times."""
    if plan is None:
        yield "time", "known in the allocation, where the profile and the schedule are made"
        yield "job", task.job_file.name
        return
    problem, chosen = plan.opened.problem, plan.schedule.estimate
    yield "time", "not predicted" if needed is None else (
        f"{format_seconds(needed.expected_s)} expected, {format_seconds(needed.sure_s)} at "
        f"{problem.constraint.confidence:.0%} (loading and set-up included)")
    yield "job", (f"{task.job_file.name}: {counted(problem.num_queries or 0, 'request')}, "
                  f"{problem.model.name} on {problem.cluster.num_devices} x "
                  f"{problem.cluster.device.name}")
    yield "plan", f"{controls_line(chosen)}; {placement(chosen)}"
    yield "times", f"{plan.timing.provenance()}; planned again in the allocation"


def submit_to_slurm(wanted: Sequence[JobArguments], drafted: BatchDraft) -> tuple[SlurmRecord, ...]:
    """Submits the script to Slurm, and returns the record saved in each job's folder. Raises
    XgptError where one of the jobs is in the queue already."""
    for job, _ in wanted:
        _refuse_twice(job.output)
        make_folder(job)
        begin_clock(job.output)
    batch, folder = drafted.batch, drafted.batch.tasks[0].output
    script = folder / SCRIPT
    write_atomically(script, drafted.script)
    job_id, cluster = submit_script(script)
    records = []
    for index, task in enumerate(batch.tasks):
        own = f"{job_id}_{index}" if batch.is_array else job_id
        records.append(SlurmRecord(
            job_id=own, cluster=cluster, script=script, log=folder / f"slurm-{own}.log",
            submitted=datetime.now().astimezone().isoformat("T", "seconds")))
        records[-1].save(task.output)
    return tuple(records)


def follow_words(records: Sequence[SlurmRecord], drafted: BatchDraft) -> str:
    """Lines that say how to follow and to end the submitted jobs."""
    batch = drafted.batch
    lines = [f"submitted as Slurm job {records[0].job_id.partition('_')[0]}: "
             f"{counted(batch.nodes, 'node')}, {batch.nodes * batch.ranks_each} ranks"
             + (f", {len(records)} tasks" if batch.is_array else "")]
    for task, record in zip(batch.tasks, records, strict=True):
        output = quoted(str(task.output))
        lines += [f"follow:  xgpt status {output}", f"         tail -F {quoted(str(record.log))}",
                  f"end:     xgpt stop {output}"]
    return "\n".join(lines)


def _common_layout(jobs: Sequence[Job]) -> NodeLayout:
    """The layout of all jobs, as tasks of one array. Raises InputError where they differ."""
    layouts = [layout_of(job) for job in jobs]
    mistakes = [
        mistake(job, "slurm", None, f"the same options, nodes and ranks as {jobs[0].source}: "
                "together they are one array")
        for job, layout in zip(jobs[1:], layouts[1:], strict=True)
        if (job.slurm, layout) != (jobs[0].slurm, layouts[0])]
    refuse([*mistakes, *shared_folders(jobs)])
    return layouts[0]


def shared_folders(jobs: Sequence[Job]) -> list[Mistake]:
    """A mistake for each job with the output folder of one before it."""
    outputs = [job.output for job in jobs]
    return [mistake(job, "output", str(job.output),
                    "a folder of its own: another of these jobs has it")
            for index, job in enumerate(jobs) if job.output in outputs[:index]]


def _plan(job: Job, tell: Teller, *, fetches: bool) -> Plan | None:
    """The job's plan; None where it runs on `cluster: local`, whose times this machine does not
    know. Checks its model and its requests in both cases."""
    refuse_what_no_machine_runs(job)
    has_all = all(map(importlib.util.find_spec, ("tokenizers", "transformers", "huggingface_hub")))
    if fetches and (files := job.workload.requests) is not None and files.is_stdin:
        standard_input(job, tell.say, is_kept=True)  # it is not piped into the allocation
    if job.cluster == LOCAL_CLUSTER:  # as many devices as its nodes have
        layout = layout_of(job)
        job = replace(job, run=replace(job.run, ranks=layout.nodes * layout.ranks_each))
    opened = open_job(job, tell, "run" if fetches and has_all else "lengths")
    if fetches and opened.files is not None:
        check_model(opened)
    if job.cluster == LOCAL_CLUSTER:
        return None
    return plan_job(executable(opened))


def _time_limit(job: Job, needed: Sequence[Needed | None],
                ) -> tuple[str | None, tuple[str, str]]:
    """The time limit in Slurm's syntax (None: the partition's), and its label and words."""
    assert job.slurm is not None
    known = [own for own in needed if own is not None]
    most_s = math.ceil(max((own.sure_s for own in known), default=0.0) / _STEP_S) * _STEP_S
    if (limit_s := job.slurm.time_s) is None and len(known) < len(needed):
        return None, ("limit", "the partition's own: how long the job takes is not known on this "
                               "machine (slurm.time sets a limit)")
    if limit_s is None:
        return time_of(most_s), ("limit", f"{time_of(most_s)}, by the prediction with its margin "
                                          "(slurm.time sets another)")
    if not known or max(own.sure_s for own in known) <= limit_s:
        return job.slurm.time, ("limit", f"{job.slurm.time}, as slurm.time says")
    verb = "takes" if max(own.expected_s for own in known) > limit_s else "may take"
    again = "the same command goes on from there" if not job.slurm.requeue else (
        f"it is requeued, up to {counted(job.slurm.requeue, 'time')}")
    return job.slurm.time, ("WARNING", (
        f"slurm.time is {job.slurm.time}; the job {verb} longer. Then {again}: nothing is lost. "
        f"Leave slurm.time out for {time_of(most_s)}"))


def _needed(plan: Plan | None) -> Needed | None:
    """The time from the job's start to its end; None where it is not predicted."""
    if plan is None or initial_reason(plan.schedule) is not None:
        return None
    problem, cluster = plan.opened.problem, plan.opened.problem.cluster
    predicted = predict(problem, plan.timing, plan.schedule.estimate, replays=1)
    if predicted is None:
        return None
    slack = _COMPUTED_SLACK if isinstance(plan.timing, Computed) else _SLACK
    weights = problem.model.num_params * DTYPE_BYTES[problem.dtype]
    load_s = predicted.load_s or weights / (cluster.num_nodes * cluster.ssd_bytes_per_s)
    return Needed(predicted.wall_s + load_s, _SETUP_S + slack * (
        predicted.wall_s * plan.schedule.margin.factor + load_s))


def _refuse_twice(output: Path) -> None:
    """Raises XgptError where a job of this folder waits or runs in Slurm already."""
    record = load_record(output)
    said = None if record is None else record.ask()
    if record is not None and said is not None and not said.has_ended:
        raise XgptError(f"{output}: Slurm job {record.job_id} for it is {said.state.lower()} "
                        f"(see `xgpt status`); end it with `xgpt stop {quoted(str(output))}`, or "
                        "give this one another `output`")


def export(job: Job, overrides: Sequence[str], tell: Teller, *, to: str, image: str,
           claim: str) -> str:
    """The text of a file that runs the job on the platform `to`, a key of FORMATS. `image`: the
    container image; `claim`: the volume claim with the job's folder. Raises InputError for a job
    that the platform cannot run."""
    plan = plan_job(open_job(job, tell, "lengths"))
    cluster, num_devices = plan.opened.problem.cluster, plan.schedule.estimate.num_devices
    nodes = -(-num_devices // (each := min(cluster.devices_per_node, num_devices)))
    _check(job, to, nodes)
    gpu = cluster.device.name if cluster.device.kind == "gpu" else None
    own = ["cluster=local", f"run.ranks={num_devices}", "slurm=null",  # as its machine is there
           *["plan.calibration=null"] * bool(job.calibration)]
    said = f"chosen: {plan.schedule.estimate.policy}, " + (
        f"{plan.schedule.figures.throughput_qps:.3g} requests/s in steady state by the times of "
        f"{cluster.name}; planned again where it runs.")
    remarks = [f"{job.source.name} for {to}, made by `xgpt export`.",
               _REMARK[to].format(claim=claim, folder=job.source.parent), said]
    return FORMATS[to](Exported(
        name=_name(job.name), job_file=job.source, nodes=nodes, devices=each, gpu=gpu,
        words=tuple(word for key in (*overrides, *own) for word in ("--set", key)),
        image=image, claim=claim,
        remarks=tuple(line for text in remarks for line in textwrap.wrap(text, WIDTH - 2))))


def _check(job: Job, to: str, nodes: int) -> None:
    folder = job.source.parent
    files = job.workload.requests.paths if job.workload.requests is not None else ()
    own = [*(("workload.requests", path) for path in files), ("output", job.output),
           ("model", Path(job.model)), *([("profile", job.profile)] if job.profile else [])]
    mistakes = [mistake(job, key, str(path), f"below {folder}, the only folder that is copied: "
                        f"`--set {key}={path.name}`, where it lies there")
                for key, path in own if path.is_absolute() and not path.is_relative_to(folder)]
    if to == "skypilot" and nodes > 1:
        mistakes.append(mistake(job, "cluster", nodes, "one node: those of SkyPilot share no file "
                                "system, which ranks on several hosts need (`--to jobset`, or "
                                "`--set constraint.max_gpus` of one node)"))
    refuse([*mistakes, *(mistake(job, key, value, "left out: no runner under xgpt executes it")
                         for key, value in only_planned(job))])


def _name(text: str) -> str:
    """The name as Kubernetes allows it: lower-case letters, digits and dashes."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40].strip("-")
    return name if name and name[0].isalpha() else f"xgpt-{name}".strip("-")
