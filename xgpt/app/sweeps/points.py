"""Points of a sweep planned: one planner for those that differ in their latency bound alone."""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from xgpt.app.opened import OpenedJob, open_job
from xgpt.app.plan import JobPlanner, Plan
from xgpt.app.sweeps.identity import common_key, digest_of, fingerprint_of
from xgpt.app.telling import LogTeller, Teller
from xgpt.app.timing import timing_of
from xgpt.core.errors import InfeasibleError, InputError, StoppedEarly, XgptError
from xgpt.core.job import Job
from xgpt.core.json_values import plain
from xgpt.core.run_section import LOCAL_CLUSTER
from xgpt.core.sweep_axes import AUTO, BOUND, COPIES, POLICY
from xgpt.core.sweep_file import Horizon, SweepPoint
from xgpt.report.policy_words import controls_line, value_of
from xgpt.report.sweep_rows import COLUMNS, INFEASIBLE, OK, REFUSED, Row
from xprofiler.profile_timing import ProfileTiming
from xprofiler.timing import TimingSource
from xscheduler.evaluator import predict
from xscheduler.planner import PlanOptions

_TELLING = ("model", "cluster", "task", "engine")  # axes whose values need no name beside them
_CONTROLS = ("encode_batch", "decode_iterations", "encode_micro_batches", "max_active",
             "token_budget", "encode_chunk")


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Points that differ in their bound alone, planned one after the other by one process. `keys`:
    of each point."""

    points: tuple[SweepPoint, ...]
    keys: tuple[str, ...]
    horizon: Horizon
    has_margin: bool


def rows_of(unit: Unit, tell: Teller | None = None) -> Iterator[Row]:
    """A row for each point, as it is planned."""
    first, tell = unit.points[0], tell or LogTeller()
    options = PlanOptions(horizon=unit.horizon, has_margin=unit.has_margin, is_brief=True)
    try:
        planner: JobPlanner | XgptError = _planner(first.job, options, tell)
    except StoppedEarly:
        raise
    except XgptError as refusal:
        planner = refusal
    for point, key in zip(unit.points, unit.keys, strict=True):
        row: Row = {column.name: None for column in COLUMNS} | _asked(point, key)
        if isinstance(planner, XgptError):
            row["fingerprint"] = fingerprint_here(point, tell)
            yield row | _refused(planner, point.job.constraint.latency_s)
            continue
        row |= _answer(point, planner, options, tell)
        row["fingerprint"] = fingerprint_of(point.job, _digest_of(planner.times))
        yield row


def fingerprint_here(point: SweepPoint, tell: Teller) -> str:
    """The fingerprint that a row of the point has if it is planned now; measures what is not known
    of this machine."""
    if point.job.cluster != LOCAL_CLUSTER:
        return fingerprint_of(point.job, _digest_of(()) if point.job.profile is None
                              else _profile_digest(point.job, tell))
    try:
        planner = _planner(point.job, PlanOptions(horizon="steady"), tell)
    except XgptError:
        return fingerprint_of(point.job)
    return fingerprint_of(point.job, _digest_of(planner.times))


def scenario_of(point: SweepPoint, job: Job) -> str:
    """What a point is called but for its copies, its policy and its bound."""
    own = [str(value) if name in _TELLING else f"{name} {value}"
           for name, value in point.values
           if name not in (COPIES.name, POLICY.name, BOUND.name)]
    return ", ".join(own) or job.name


def _planner(job: Job, options: PlanOptions, tell: Teller) -> JobPlanner:
    opened = _opened(job, tell, options.horizon)
    timing = _timing(opened) if job.cluster != LOCAL_CLUSTER else None
    return JobPlanner(opened, options, timing)


def _opened(job: Job, tell: Teller, horizon: Horizon) -> OpenedJob:
    return open_job(job, tell, "lengths" if horizon == "job" else "shape")


def _timing(opened: OpenedJob) -> TimingSource:
    """One timing source in a process for all points of a model on a cluster: it keeps what it was
    asked."""
    job, problem = opened.job, opened.problem
    key = (job.model, repr(job.cluster), problem.cluster.num_devices, problem.dtype,
           problem.weight_dtype, problem.kv_dtype, job.profile, job.run.engine, job.plan_engine)
    if key not in _KEPT:
        _KEPT.clear()  # points come in the order of the grid: a model and a cluster at a time
        _KEPT[key] = timing_of(opened)
    return _KEPT[key]


_KEPT: dict[Any, TimingSource] = {}


def _profile_digest(job: Job, tell: Teller) -> str:
    try:
        return _digest_of((_timing(_opened(job, tell, "steady")),))
    except XgptError:
        return ""


def _digest_of(times: tuple[TimingSource, ...]) -> str:
    """Of measured times; "" of computed ones, which are part of the code."""
    profiles = [repr(time.profile) for time in times if isinstance(time, ProfileTiming)]
    return digest_of("\n".join(profiles)) if profiles else ""


def _asked(point: SweepPoint, key: str) -> Row:
    job, shown = point.job, dict(point.values)
    bound_s = job.constraint.latency_s
    cluster = job.cluster if isinstance(job.cluster, str) else "own"
    row: Row = {
        "key": key, "scenario": scenario_of(point, job), "fingerprint": fingerprint_of(job),
        "model": Path(job.model).name if Path(job.model).is_absolute() else job.model,
        "cluster": cluster, "gpus": job.run.ranks, "task": job.workload.output_tokens.task,
        "engine": job.run.engine, "policy": "+".join(job.schedule.policies) or AUTO,
        "bound": "inf" if math.isinf(bound_s) else f"{bound_s:g} s",
        "bound_s": None if point.share is not None else bound_s}
    return plain(row | shown)  # type: ignore[no-any-return]


def _answer(point: SweepPoint, planner: JobPlanner, options: PlanOptions, tell: Teller) -> Row:
    bound_s = point.job.constraint.latency_s
    try:
        if point.share is not None:
            bound_s = float(f"{point.share * _free_latency_s(_free_job(point), options):.3g}")
        plan = planner.plan(bound_s)
        return plain({"bound_s": bound_s, "gpus": plan.opened.problem.cluster.num_devices,  # type: ignore[no-any-return]
                      **_planned(plan), **_predicted(plan)})
    except StoppedEarly:
        raise
    except XgptError as refusal:
        return _refused(refusal, bound_s if point.share is None or not math.isinf(bound_s)
                        else None)


def _free_job(point: SweepPoint) -> Job:
    """The job whose latency without a bound a share is taken of: of the policy that is best, where
    the sweep compares policies."""
    job = point.job
    if point.shown(POLICY.name) is not None:
        job = replace(job, schedule=replace(job.schedule, policies=()))
    return job


def _free_latency_s(job: Job, options: PlanOptions) -> float:
    """The latency at the highest throughput. Raises InfeasibleError."""
    key = common_key(SweepPoint(job=job, values=(), share=None)), options
    if key not in _FREE_S:
        plan = _planner(job, options, LogTeller()).plan(math.inf)
        _FREE_S[key] = plan.schedule.figures.latency_s
    return _FREE_S[key]


_FREE_S: dict[tuple[str, PlanOptions], float] = {}


def _refused(refusal: XgptError, bound_s: float | None) -> Row:
    status = INFEASIBLE if isinstance(refusal, InfeasibleError) else REFUSED
    reason = str(refusal)
    if isinstance(refusal, InputError):  # in which file it stands is known of a sweep
        reason = "; ".join(str(replace(mistake, file=mistake.key, key="", value=None, line=None))
                           for mistake in refusal.mistakes)
    return plain({"status": status, "reason": reason, "bound_s": bound_s})  # type: ignore[no-any-return]


def _planned(plan: Plan) -> Row:
    schedule, problem = plan.schedule, plan.opened.problem
    estimate, figures, proof = schedule.estimate, schedule.figures, schedule.proof
    deployment, row = schedule.deployment, asdict(schedule.figures)
    named = {column.name for column in COLUMNS if column.group == "figure"}
    is_split = deployment.encoding is not deployment.decoding
    return {
        "status": OK, "chosen": estimate.policy,
        **{name: value for name, value in row.items() if name in named},
        "memory_bytes": max(figures.memory_bytes),
        "gpu_s_per_query": problem.cluster.num_devices / figures.throughput_qps,
        **{name: value_of(estimate, name) for name in _CONTROLS},
        "decode_micro_batches": deployment.num_groups,
        "max_in_system": getattr(schedule.controls, "max_in_system", None),
        "tp_degree": deployment.tp_degree, "tp_gpus": deployment.tp_gpus,
        "replicas": deployment.replicas, "stages": len(deployment.stages),
        "encode_stages": len(deployment.encoding.stages) if is_split else None,
        "controls": controls_line(estimate),
        "proof": str(proof.status), "bound_qps": proof.bound_qps, "gap": proof.gap,
        "nodes": proof.nodes, "search_s": proof.seconds, "margin": schedule.margin.factor,
        "margin_cost": schedule.margin.cost, "unbounded_qps": proof.unbounded_qps,
        "times": plan.timing.provenance()}


def _predicted(plan: Plan) -> Row:
    """What the job's own queries are expected to take, where it is planned for these."""
    prediction = predict(plan.opened.problem, plan.timing, plan.schedule.estimate) if (
        plan.horizon == "job") else None
    if prediction is None:
        return {}
    return {"makespan_s": prediction.wall_s, "job_throughput_qps": prediction.throughput_qps,
            **{name: getattr(prediction, name) for name in (
                "latency_p50_s", "latency_p99_s", "ttft_p50_s", "ttft_p99_s", "tpot_p50_s",
                "tpot_p99_s")}}
