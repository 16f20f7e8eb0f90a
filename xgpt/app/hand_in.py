"""Jobs handed in to Slurm: planned as far as this machine can, their batch script written and
submitted. Several job files become one array, a task each."""

import importlib.util
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from xgpt.app.allocation import NodeLayout, layout_of
from xgpt.app.checks import check_model, make_folder, refuse_what_no_machine_runs
from xgpt.app.finished import done_already
from xgpt.app.opened import open_job
from xgpt.app.place import SlurmRecord, load_record
from xgpt.app.plan import Plan, executable, plan_job
from xgpt.app.standard_input import standard_input
from xgpt.app.telling import Teller
from xgpt.core.errors import InputError, XgptError
from xgpt.core.job import Job
from xgpt.core.json_values import flat
from xgpt.core.run_section import LOCAL_CLUSTER
from xgpt.core.slurm import time_of
from xgpt.core.units import DTYPE_BYTES, format_seconds
from xgpt.core.whole_file import write_atomically
from xgpt.launch.slurm_jobs import BatchJob, Task, check_paths, hand_in, quoted, render_sbatch
from xprofiler.roofline import Roofline
from xrunner.engines.engine import mistake
from xscheduler.beginning import said_of
from xscheduler.evaluator import predict

SCRIPT = "slurm.sh"
# Of a time limit beyond the prediction: for measured times, and for computed ones, which are off
# by more; what there is before the first query (queue to shell, Python, the first profile).
_SLACK, _COMPUTED_SLACK, _SETUP_S = 1.25, 2.0, 600.0
_STEP_S = 300.0  # limits are whole steps: nobody reads 01:37


class Wanted(NamedTuple):
    """A job file that is to be handed in, with its `--set`s."""

    job: Job
    overrides: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """All that there is before anything is handed in. `plans`: of each job, where one can be made
    here. `limit`: a sentence on the time limit."""

    batch: BatchJob
    plans: tuple[Plan | None, ...]
    limit: str

    @property
    def script(self) -> str:
        return render_sbatch(self.batch)

    def to_dict(self) -> dict[str, Any]:
        return {"script": self.script, "nodes": self.batch.nodes,
                "ranks": self.batch.nodes * self.batch.ranks_each, "time": self.batch.time,
                "schedules": [None if plan is None else flat(plan.schedule)
                              for plan in self.plans]}


def hand_in_jobs(wanted: Sequence[tuple[Job, tuple[str, ...]]], tell: Teller, *,
                 is_dry: bool = False, is_again: bool = False) -> dict[str, Any]:
    """Hands the jobs in, but for a dry run and those that are done already (`is_again`: these too,
    after what they left has been moved aside), and tells what there is to tell; the script and what
    else `--json` prints. Raises XgptError."""
    jobs, done = [Wanted(*each) for each in wanted], list[dict[str, Any]]()
    if not is_dry:
        jobs, done = _still_to_do(jobs, tell, is_again=is_again)
    if not jobs:
        return {"jobs": done}
    drafted = draft(jobs, tell, fetches=not is_dry)
    for task, plan in zip(drafted.batch.tasks, drafted.plans, strict=True):
        tell.say(f"{task.job_file.name}: " + (
            "profile and schedule are found in the allocation, on the nodes themselves"
            if plan is None else f"{plan}\n(planned anew in the allocation, by its own profile)"))
    if is_dry:
        tell.say(drafted.limit)
        return drafted.to_dict()
    records = submit_to_slurm(jobs, drafted)
    tell.say(how_to_follow(records, drafted))
    return {**drafted.to_dict(), "jobs": [
        {"job_id": record.job_id, "output": each.job.output, "log": record.log}
        for each, record in zip(jobs, records, strict=True)] + done}


def _still_to_do(wanted: Sequence[Wanted], tell: Teller, *,
                 is_again: bool) -> tuple[list[Wanted], list[dict[str, Any]]]:
    """(the jobs that are to be handed in, what is known of those that are done)"""
    left, done = list[Wanted](), list[dict[str, Any]]()
    for each in wanted:
        if is_again:
            _refuse_twice(each.job.output)  # what it writes must not be moved
        found = done_already(each.job, tell, is_again=is_again)
        if found is None:
            left.append(each)
        else:
            done.append({**found, "output": each.job.output})
    return left, done


def draft(wanted: Sequence[Wanted], tell: Teller, *, fetches: bool) -> Draft:
    """Everything but the submission. `fetches`: the models come to this machine's cache, which the
    nodes share; they often have no network. Raises InputError, and InfeasibleError where a bound
    cannot be met."""
    jobs = [each.job for each in wanted]
    if without := [job for job in jobs if job.slurm is None]:
        raise InputError([mistake(job, "slurm", None, "a section, as the other job files have: "
                                  "together they are one array") for job in without])
    first, layout = jobs[0], _common_layout(jobs)
    assert first.slurm is not None
    plans = tuple(_plan(job, tell, fetches=fetches) for job in jobs)
    time, sentence = _time_limit(first, plans)
    spec = first.slurm
    batch = BatchJob(
        name=first.name, spec=spec, nodes=layout.nodes, ranks_each=layout.ranks_each,
        gpus_per_node=layout.gpus_per_node, time=time,
        python=sys.executable if spec.venv is None else f"{spec.venv}/bin/python",
        tasks=tuple(Task(job_file=each.job.source, output=each.job.output,
                         overrides=each.overrides) for each in wanted))
    check_paths(batch)
    return Draft(batch=batch, plans=plans, limit=sentence)


def submit_to_slurm(wanted: Sequence[Wanted], drafted: Draft) -> tuple[SlurmRecord, ...]:
    """Hands the script in; what each job's folder keeps of it. Raises XgptError where one of the
    jobs is in the queue already."""
    for each in wanted:
        _refuse_twice(each.job.output)
        make_folder(each.job)
    batch = drafted.batch
    folder = batch.tasks[0].output
    script = folder / SCRIPT
    write_atomically(script, drafted.script)
    job_id, cluster = hand_in(script)
    records = []
    for index, task in enumerate(batch.tasks):
        own = f"{job_id}_{index}" if batch.is_array else job_id
        record = SlurmRecord(job_id=own, cluster=cluster, script=script,
                             log=folder / f"slurm-{own}.log",
                             submitted=datetime.now().astimezone().isoformat("T", "seconds"))
        record.save(task.output)
        records.append(record)
    return tuple(records)


def how_to_follow(records: Sequence[SlurmRecord], drafted: Draft) -> str:
    """What a person does next, in words."""
    batch = drafted.batch
    lines = [f"handed in as Slurm's job {records[0].job_id.partition('_')[0]}: {batch.nodes} "
             f"{'node' if batch.nodes == 1 else 'nodes'}, {batch.nodes * batch.ranks_each} ranks"
             + (f", {len(records)} tasks" if batch.is_array else ""), drafted.limit]
    for task, record in zip(batch.tasks, records, strict=True):
        output = quoted(str(task.output))
        lines += [f"follow:  xgpt status {output}", f"         tail -F {quoted(str(record.log))}",
                  f"end:     xgpt stop {output}"]
    return "\n".join(lines)


def _common_layout(jobs: Sequence[Job]) -> NodeLayout:
    """Of all jobs: tasks of an array are alike. Raises InputError."""
    layouts = [layout_of(job) for job in jobs]
    mistakes = [
        mistake(job, "slurm", None, f"the same options, nodes and ranks as {jobs[0].source}: "
                "together they are one array")
        for job, layout in zip(jobs[1:], layouts[1:], strict=True)
        if (job.slurm, layout) != (jobs[0].slurm, layouts[0])]
    outputs = [job.output for job in jobs]
    mistakes += [mistake(job, "output", str(job.output),
                         "a folder of its own: another of these jobs has it")
                 for index, job in enumerate(jobs) if job.output in outputs[:index]]
    if mistakes:
        raise InputError(mistakes)
    return layouts[0]


def _plan(job: Job, tell: Teller, *, fetches: bool) -> Plan | None:
    """The job's plan, where the times of its cluster are known here; what is wrong with its model
    and its requests is found in any case."""
    refuse_what_no_machine_runs(job)
    has_packages = all(importlib.util.find_spec(name) is not None
                       for name in ("tokenizers", "transformers", "huggingface_hub"))
    if fetches and (files := job.workload.requests) is not None and files.is_stdin:
        standard_input(job, tell, is_kept=True)  # nothing comes to the allocation's
    opened = open_job(job, tell, "run" if fetches and has_packages else "lengths")
    if fetches and opened.files is not None:
        check_model(opened)
    if job.cluster == LOCAL_CLUSTER:
        return None
    return plan_job(executable(opened))


def _time_limit(job: Job, plans: Sequence[Plan | None]) -> tuple[str | None, str]:
    """(the limit as Slurm takes it, a sentence)"""
    assert job.slurm is not None
    if job.slurm.time is not None:
        return job.slurm.time, f"time limit {job.slurm.time}, as slurm.time says"
    seconds = [_needed_s(plan) for plan in plans]
    known = [needed for needed in seconds if needed is not None]
    if len(known) < len(seconds):
        return None, ("no time limit is asked for, so the partition's own holds: how long the job "
                      "takes is not known on this machine (slurm.time sets a limit)")
    most_s = math.ceil(max(known) / _STEP_S) * _STEP_S
    return time_of(most_s), (f"time limit {time_of(most_s)}: {format_seconds(max(known))} by the "
                             "schedule's prediction with its margin, loading and setting up "
                             "included (slurm.time sets another)")


def _needed_s(plan: Plan | None) -> float | None:
    """Seconds from the job's start to its end with all margins; None where nothing is predicted."""
    if plan is None or said_of(plan.schedule) is not None:
        return None
    problem, cluster = plan.opened.problem, plan.opened.problem.cluster
    predicted = predict(problem, plan.timing, plan.schedule.estimate, replays=1)
    if predicted is None:
        return None
    slack = _COMPUTED_SLACK if isinstance(plan.timing, Roofline) else _SLACK
    weights = problem.model.num_params * DTYPE_BYTES[problem.dtype]
    load_s = weights / (cluster.num_nodes * cluster.only.ssd_bytes_per_s)
    return (predicted.wall_s * plan.schedule.margin.factor + load_s) * slack + _SETUP_S


def _refuse_twice(output: Path) -> None:
    """Two jobs must not write into one folder, nor wait in the queue for it."""
    record = load_record(output)
    said = None if record is None else record.ask()
    if record is not None and said is not None and not said.has_ended:
        raise XgptError(f"{output}: Slurm's job {record.job_id} for it is {said.state.lower()} "
                        f"(see `xgpt status`); end it with `xgpt stop {quoted(str(output))}`, or "
                        "give this one another `output`")
