"""Plans a sweep's points: their rows, and the keys by which planned points are known again. Points
that differ only in their latency limit share a planner."""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

from xgpt.app.opened_job import open_job
from xgpt.app.schedule import JobPlanner, Plan
from xgpt.app.teller import LogTeller, Teller
from xgpt.core.cluster import Cluster
from xgpt.core.errors import InfeasibleError, InputError, LacksMemoryError, StoppedEarly, XgptError
from xgpt.core.schedule_file import plain
from xgpt.core.units import parse_share
from xgpt.job.job import Job
from xgpt.job.resolve import resolve_cluster
from xgpt.job.sweep_file import AUTO, BOUND, COPIES, FT, POLICY, SweepPoint, SweepSpec, axis_of
from xgpt.report.sweep_rows import COLUMNS, GIVEN_UP, INFEASIBLE, OK, REFUSED, Row
from xgpt.report.sweep_served import LINES
from xgpt.report.words import controls_line, value_of
from xscheduler.evaluator import predict
from xscheduler.ft_latency import ft_latency_s
from xscheduler.planner import PlanOptions

Unit = Mapping[str, SweepPoint]  # by key: points that differ only in their limit

# axes whose values need no name beside them
_TELLING = ("model", "cluster", "task", "engine", "lengths", "policy")
_COMPARED = (COPIES.name, POLICY.name, BOUND.name)  # axes that are no part of a scenario
_DEPLOYED = ("cluster", "price_per_hour", "schedule", "run", "plan", "profile")  # of a service
_FIGURES, _CONTROLS, _SERVED = ([column.name for column in COLUMNS if column.group == group]
                                for group in ("figure", "control", "served"))
_BEATEN = "no higher capacity for its price than the best of its workload"
_ROOT = Path(__file__).resolve().parents[3]
# folders whose code and tables decide a plan
_PLANNING = ("xgpt/core", "xgpt/job", "xgpt/requests", "xprofiler", "xsimulator", "xscheduler",
             "xrunner/rules")
# latency in seconds at the highest throughput, by job without its bound, kept for the process
_FREE_S: dict[tuple[str, PlanOptions], float] = {}


def key_of(point: SweepPoint, spec: SweepSpec) -> str:
    """Key of a point, 16 hex digits, over all that it asks; not over its name, its file's place
    and its output folder."""
    return _digest([_asked(point.job), point.relative_bound, spec.horizon, spec.has_margin])


def common_key(job: Job) -> str:
    """Key of a job without its latency bound. Points with equal keys share a planner, which those
    of a service have alone."""
    if job.workload.arrivals is not None:
        return _digest(_asked(job))
    return _digest(_asked(replace(job, constraint=job.constraint.with_latency(limit_s=math.inf))))


def fingerprint(job: Job) -> str:
    """Hash, 16 hex digits, of the code that plans a point and of its job's files."""
    requests = () if job.workload.requests is None else job.workload.requests.paths
    files = (job.profile, job.calibration, *requests, job.workload.input_tokens.path,
             job.workload.output_tokens.path, Path(job.model) / "config.json")
    return _digest([_code(), *(
        hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        for path in files if path is not None)])


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
            if path.suffix in (".py", ".yaml") and "measure" not in path.parts:
                digest.update(path.relative_to(_ROOT).as_posix().encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()


def rows_of(unit: Unit, options: PlanOptions, tell: Teller,
            worths: Mapping[str, float]) -> Iterator[Row]:
    """A row for each point, as it is planned. `worths`: what a point of a service must exceed, by
    its scenario (xgpt.report.sweep_served)."""
    planner: JobPlanner | None = None
    for key, point in unit.items():
        row: Row = {column.name: None for column in COLUMNS} | _axes(point) | {
            "key": key, "fingerprint": fingerprint(point.job)}
        bound_s: float | None = None if point.relative_bound else point.job.constraint.latency_s
        worth = worths.get(row["scenario"], 0.0) * (
            point.job.constraint.objective == "throughput")  # others use a part of the cluster
        try:
            if worth:
                cluster = resolve_cluster(point.job)
                worth *= _price_of(cluster, cluster.num_devices)
            options = replace(options, least_qps=worth)
            planner = planner or _planner(point.job, options, tell)
            if point.relative_bound is not None:
                bound_s = float(f"{_limit_s(point, point.relative_bound, planner, options):.3g}")
            row |= _figures(planner.plan(bound_s))
        except StoppedEarly:
            raise
        except XgptError as refusal:
            row |= _refused(refusal)
            if worth and row["status"] == INFEASIBLE and not isinstance(refusal, LacksMemoryError):
                row |= {"status": GIVEN_UP, "reason": _BEATEN}
        yield plain(row | {"bound_s": bound_s})


def _price_of(cluster: Cluster, devices: int) -> float:
    """The price of so many devices for an hour; their number if it is unknown."""
    return devices * (cluster.device.price_per_hour or 1.0)


def _planner(job: Job, options: PlanOptions, tell: Teller) -> JobPlanner:
    return JobPlanner(open_job(
        job, tell, "lengths" if options.horizon == "job" else "shape"), options)


def _limit_s(point: SweepPoint, bound: str, planner: JobPlanner, options: PlanOptions) -> float:
    """Seconds of a relative bound. Raises InfeasibleError."""
    if not bound.startswith(FT):
        return parse_share(bound) * _free_latency_s(point, options)
    own = planner.of(None)[1]
    return ft_latency_s(own.problem, own.timing, int(bound.removeprefix(FT)))


def _free_latency_s(point: SweepPoint, options: PlanOptions) -> float:
    """Latency, in seconds, at the highest throughput: of the policy that is best without a bound if
    the sweep compares policies. Raises InfeasibleError."""
    job = point.job
    if POLICY.name in point.values:
        job = replace(job, schedule=replace(job.schedule, policies=()))
    key = common_key(job), options
    if key not in _FREE_S:
        plan = _planner(job, options, LogTeller()).plan(math.inf)
        _FREE_S[key] = plan.schedule.figures.latency_s
    return _FREE_S[key]


def _axes(point: SweepPoint) -> Row:
    """Columns of a row that name its point. `scenario`: its axes but replicas, policy and bound."""
    job, bound_s = point.job, point.job.constraint.latency_s
    named = {name: str(value) if name in _TELLING else f"{name} {value}"
             for name, value in point.values.items()}
    deployed = [name for name in named if job.workload.arrivals is not None and (
        axis := axis_of(name)) and axis.key.partition(".")[0] in _DEPLOYED]
    aside = (*LINES, *deployed) if job.workload.arrivals is not None else _COMPARED
    return {
        "scenario": ", ".join(named[name] for name in named if name not in aside) or job.name,
        "deployment": None if job.workload.arrivals is None else ", ".join(
            named[name] for name in deployed),
        "model": Path(job.model).name if Path(job.model).is_absolute() else job.model,
        "cluster": job.cluster if isinstance(job.cluster, str) else "own",
        "gpus": job.run.ranks, "task": job.workload.output_tokens.task,
        "engine": job.run.engine, "policy": "+".join(job.schedule.policies) or AUTO,
        "bound": "inf" if math.isinf(bound_s) else f"{bound_s:g} s", **point.values}


def _refused(refusal: XgptError) -> Row:
    reason = str(refusal)
    if isinstance(refusal, InputError):  # in which file it stands is known of a sweep
        reason = "; ".join(str(replace(mistake, file=mistake.key, key="", value=None, line=None))
                           for mistake in refusal.mistakes)
    return {"status": INFEASIBLE if isinstance(refusal, InfeasibleError) else REFUSED,
            "reason": reason}


def _figures(plan: Plan) -> Row:
    schedule, num_devices = plan.schedule, plan.opened.problem.cluster.num_devices
    estimate, figures, proof = schedule.estimate, schedule.figures, schedule.proof
    deployment, encoding = schedule.deployment, schedule.deployment.encoding
    # what the job's own queries are expected to take, where it is planned for these
    expected = predict(plan.opened.problem, plan.timing, estimate) if (
        plan.horizon == "job") else None
    of_job: Row = {} if expected is None else {
        **asdict(expected), "makespan_s": expected.wall_s,
        "job_throughput_qps": expected.throughput_qps}
    figure = of_job | asdict(figures) | {
        "memory_bytes": max(figures.memory_bytes),
        "gpu_s_per_query": num_devices / figures.throughput_qps}
    return {
        **{name: figure.get(name) for name in _FIGURES},
        **{name: value_of(estimate, name) for name in _CONTROLS},
        "status": OK, "chosen": estimate.policy, "gpus": num_devices,
        "decode_micro_batches": deployment.num_groups,
        "max_in_system": getattr(schedule.controls, "max_in_system", None),
        "tp_degree": deployment.tp_degree, "tp_gpus": deployment.tp_gpus,
        "replicas": deployment.replicas, "stages": len(deployment.stages),
        "encode_stages": None if encoding is deployment.decoding else len(encoding.stages),
        "controls": controls_line(estimate),
        "proof": str(proof.status), "bound_qps": proof.bound_qps, "gap": proof.gap,
        "nodes": proof.nodes, "search_s": proof.seconds, "margin": schedule.margin.factor,
        "margin_cost": schedule.margin.cost, "unbounded_qps": proof.unbounded_qps,
        "times": plan.timing.provenance(), **_served(plan)}


def _served(plan: Plan) -> Row:
    """Columns of a service: capacity, attainment, percentiles and price."""
    served, problem = plan.schedule.served, plan.opened.problem
    if served is None:
        return {}
    figures = asdict(served.capacity) | asdict(served) | {
        f"{one.metric}_{name}": getattr(one, name) for one in served.metrics
        for name in ("p50_s", "p90_s", "p99_s")}
    is_missed = not served.is_at_capacity and served.capacity.qps < served.rate
    return {name: figures[name] for name in (*_FIGURES, *_SERVED) if name in figures} | {
        "capacity_qps": served.capacity.qps, "capacity_per_price": (
            served.capacity.qps / _price_of(problem.cluster, (
                problem.cluster if problem.constraint.objective == "throughput" else
                plan.schedule.estimate).num_devices)),
        "attainment": None if served.is_at_capacity else served.attainment} | ({
            "status": INFEASIBLE, "reason": f"at most {served.capacity.qps:.3g} requests/s keep "
            f"the limits at {served.rate:g}"} if is_missed else {})
