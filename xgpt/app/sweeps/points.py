"""A sweep's points: what makes one the same as before, and its row, as it is planned. Points that
differ in their latency bound alone have one planner."""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

from xgpt.app.opened import open_job
from xgpt.app.profile import timing_of
from xgpt.app.schedule import JobPlanner, Plan
from xgpt.app.telling import LogTeller, Teller
from xgpt.core.errors import InfeasibleError, InputError, StoppedEarly, XgptError
from xgpt.core.schedule_file import plain
from xgpt.job.job import LOCAL_CLUSTER, Job
from xgpt.job.sweep_file import AUTO, BOUND, COPIES, POLICY, SweepPoint, SweepSpec
from xgpt.report.sweep_rows import COLUMNS, INFEASIBLE, OK, REFUSED, Row
from xgpt.report.words import controls_line, value_of
from xprofiler.profile_timing import ProfileTiming
from xprofiler.timing import TimingSource
from xscheduler.evaluator import predict
from xscheduler.planner import PlanOptions

Unit = Mapping[str, SweepPoint]  # points by key that differ in their bound alone

_TELLING = ("model", "cluster", "task", "engine")  # axes whose values need no name beside them
_CONTROLS = ("encode_batch", "decode_iterations", "encode_micro_batches", "max_active",
             "token_budget", "encode_chunk")
_PREDICTED = ("latency_p50_s", "latency_p99_s", "ttft_p50_s", "ttft_p99_s", "tpot_p50_s",
              "tpot_p99_s")
_FIGURES = [column.name for column in COLUMNS if column.group == "figure"]
_ROOT = Path(__file__).resolve().parents[3]
# whose code, tables and rows decide what is planned
_PLANNING = ("xgpt/core", "xgpt/job", "xgpt/requests", "xprofiler", "xsimulator", "xscheduler",
             "xrunner/rules")
_SUFFIXES = (".py", ".yaml")
# Of a process that plans many points: one timing source for all of a model on a cluster, since it
# keeps what it was asked, and the latency without a bound that shares are taken of.
_TIMES: dict[str, TimingSource] = {}
_FREE_S: dict[tuple[str, PlanOptions], float] = {}


def key_of(point: SweepPoint, spec: SweepSpec) -> str:
    """16 hex digits of all that a point asks. What the point is called, where its file lies and
    where its results go is not part of it."""
    return _digest([_asked(point.job), point.share, spec.horizon, spec.has_margin])


def common_key(job: Job) -> str:
    """The same of a job without its bound: points that have it in common share a planner."""
    return _digest(_asked(replace(job, constraint=job.constraint.with_latency(limit_s=math.inf))))


def fingerprint_here(job: Job, tell: Teller, times: tuple[TimingSource, ...] | None = None) -> str:
    """16 hex digits of what a point is planned by: the code, the files of its job, and measured
    `times`, by default those of a job that is planned now: what is not known of this machine is
    measured."""
    if times is None:
        times = _times_of(job, tell)
    measured = [repr(time.profile) for time in times if isinstance(time, ProfileTiming)]
    requests = () if job.workload.requests is None else job.workload.requests.paths
    files = (job.profile, *requests, job.workload.input_tokens.path,
             job.workload.output_tokens.path, Path(job.model) / "config.json")
    return _digest([_code(), measured, *(
        hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        for path in files if path is not None)])


def rows_of(unit: Unit, options: PlanOptions, tell: Teller | None = None) -> Iterator[Row]:
    """A row for each point, as it is planned."""
    planner, tell = None, tell or LogTeller()
    for key, point in unit.items():
        row: Row = {column.name: None for column in COLUMNS} | _axes(point) | {"key": key}
        bound_s: float | None = None if point.share else point.job.constraint.latency_s
        try:
            planner = planner or _planner(point.job, options, tell)
            if point.share is not None:
                bound_s = float(f"{point.share * _free_latency_s(point, options):.3g}")
            row |= _planned(planner.plan(bound_s))
        except StoppedEarly:
            raise
        except XgptError as refusal:
            row |= _refused(refusal)
        times = None if planner is None else planner.times
        yield plain(row | {"bound_s": bound_s,
                           "fingerprint": fingerprint_here(point.job, tell, times)})


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _asked(job: Job) -> dict[str, Any]:
    return {name: value for name, value in plain(job).items()
            if name not in ("name", "source", "output", "slurm")}


@cache
def _code() -> str:
    digest = hashlib.sha256()
    for folder in _PLANNING:
        for path in sorted((_ROOT / folder).rglob("*")):
            if path.suffix in _SUFFIXES and "measure" not in path.parts:
                digest.update(path.relative_to(_ROOT).as_posix().encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()


def _times_of(job: Job, tell: Teller) -> tuple[TimingSource, ...]:
    if job.cluster != LOCAL_CLUSTER and job.profile is None:
        return ()  # computed ones, which are part of the code
    try:
        return _planner(job, PlanOptions(horizon="steady"), tell).times
    except StoppedEarly:
        raise
    except XgptError:
        return ()


def _planner(job: Job, options: PlanOptions, tell: Teller) -> JobPlanner:
    opened = open_job(job, tell, "lengths" if options.horizon == "job" else "shape")
    if job.cluster == LOCAL_CLUSTER:
        return JobPlanner(opened, options)
    problem = opened.problem
    key = repr((job.model, job.cluster, problem.cluster.num_devices, problem.dtype,
                problem.weight_dtype, problem.kv_dtype, job.profile, job.run.engine,
                job.plan_engine))
    if key not in _TIMES:
        _TIMES.clear()  # points come in the order of the grid: a model and a cluster at a time
        _TIMES[key] = timing_of(opened)
    return JobPlanner(opened, options, _TIMES[key])


def _free_latency_s(point: SweepPoint, options: PlanOptions) -> float:
    """The latency at the highest throughput: of the policy that is best without a bound, where the
    sweep compares policies. Raises InfeasibleError."""
    job = point.job
    if point.shown(POLICY.name) is not None:
        job = replace(job, schedule=replace(job.schedule, policies=()))
    key = common_key(job), options
    if key not in _FREE_S:
        plan = _planner(job, options, LogTeller()).plan(math.inf)
        _FREE_S[key] = plan.schedule.figures.latency_s
    return _FREE_S[key]


def _axes(point: SweepPoint) -> Row:
    """What was asked. A scenario is what a point is called but for its copies, policy and bound."""
    job, bound_s = point.job, point.job.constraint.latency_s
    scenario = [str(value) if name in _TELLING else f"{name} {value}" for name, value in
                point.values if name not in (COPIES.name, POLICY.name, BOUND.name)]
    return {
        "scenario": ", ".join(scenario) or job.name,
        "model": Path(job.model).name if Path(job.model).is_absolute() else job.model,
        "cluster": job.cluster if isinstance(job.cluster, str) else "own",
        "gpus": job.run.ranks, "task": job.workload.output_tokens.task,
        "engine": job.run.engine, "policy": "+".join(job.schedule.policies) or AUTO,
        "bound": "inf" if math.isinf(bound_s) else f"{bound_s:g} s", **dict(point.values)}


def _refused(refusal: XgptError) -> Row:
    reason = str(refusal)
    if isinstance(refusal, InputError):  # in which file it stands is known of a sweep
        reason = "; ".join(str(replace(mistake, file=mistake.key, key="", value=None, line=None))
                           for mistake in refusal.mistakes)
    return {"status": INFEASIBLE if isinstance(refusal, InfeasibleError) else REFUSED,
            "reason": reason}


def _planned(plan: Plan) -> Row:
    schedule, num_devices = plan.schedule, plan.opened.problem.cluster.num_devices
    estimate, figures, proof = schedule.estimate, schedule.figures, schedule.proof
    deployment, encoding = schedule.deployment, schedule.deployment.encoding
    row = {
        **{name: value for name, value in asdict(figures).items() if name in _FIGURES},
        **{name: value_of(estimate, name) for name in _CONTROLS},
        "status": OK, "chosen": estimate.policy, "gpus": num_devices,
        "memory_bytes": max(figures.memory_bytes),
        "gpu_s_per_query": num_devices / figures.throughput_qps,
        "decode_micro_batches": deployment.num_groups,
        "max_in_system": getattr(schedule.controls, "max_in_system", None),
        "tp_degree": deployment.tp_degree, "tp_gpus": deployment.tp_gpus,
        "replicas": deployment.replicas, "stages": len(deployment.stages),
        "encode_stages": None if encoding is deployment.decoding else len(encoding.stages),
        "controls": controls_line(estimate),
        "proof": str(proof.status), "bound_qps": proof.bound_qps, "gap": proof.gap,
        "nodes": proof.nodes, "search_s": proof.seconds, "margin": schedule.margin.factor,
        "margin_cost": schedule.margin.cost, "unbounded_qps": proof.unbounded_qps,
        "times": plan.timing.provenance()}
    # what the job's own queries are expected to take, where it is planned for these
    expected = predict(plan.opened.problem, plan.timing, estimate) if (
        plan.horizon == "job") else None
    if expected is not None:
        row |= {"makespan_s": expected.wall_s, "job_throughput_qps": expected.throughput_qps,
                **{name: getattr(expected, name) for name in _PREDICTED}}
    return row
