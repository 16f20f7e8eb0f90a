"""`workload.arrivals` of a job file: when requests arrive, and what such a job cannot have.

    workload: {arrivals: {rate: 4, process: gamma, cv: 2}}  # or {process: poisson}: any rate
    workload: {arrivals: {concurrency: 32}}
    workload: {arrivals: {file: trace.csv, speed: 2}}  # or {file: trace.csv, rate: 4}
    workload: {arrivals: from_requests}"""

from collections.abc import Iterator
from typing import Annotated, Any

from xgpt.core import catalog
from xgpt.core.arrivals import Arrivals
from xgpt.core.cluster import Cluster
from xgpt.core.engines import ARRIVING_ENGINES
from xgpt.job.job import LOCAL_CLUSTER, ArrivalSpec, Job
from xgpt.job.job_lengths import read_times
from xgpt.job.typed import OrMapping, Reading, that
from xgpt.requests.request import Requests

FROM_REQUESTS = "from_requests"
# keys of arrivals that go together, by the first of each form
_FORMS = {"file": ("speed", "rate"), "concurrency": (), "rate": ("process", "cv"),
          "process": ("cv",)}

AnyArrivals = Annotated[Any, OrMapping(ArrivalSpec, that(
    lambda value: value == FROM_REQUESTS, made=lambda value: ArrivalSpec(), enum=[FROM_REQUESTS]),
    f"{{rate, process, cv}}, {{process, cv}}, {{concurrency}}, {{file, speed}}, {{file, rate}}, or "
    f"{FROM_REQUESTS}")]


def resolve_arrivals(job: Job, requests: Requests | None) -> Arrivals | None:
    """How the job's requests arrive; None for a batch job. Raises InputError for a wrong trace."""
    own = job.workload.arrivals
    if own is None:
        return None
    if own.file is not None:
        times_s = read_times(own.file) / (own.speed or 1.0)
    elif own == ArrivalSpec():
        assert requests is not None and requests.arrival_s is not None, "refused before"
        times_s = requests.arrival_s
    else:
        return Arrivals(rate=own.rate, process=own.process or "poisson", cv=own.cv or 1.0,
                        concurrency=own.concurrency)
    found = Arrivals(times_s=times_s - times_s[:1])
    assert found.times_s is not None
    if own.rate is None:
        return found
    return Arrivals(times_s=found.times_s / (found.mean_gap_s * own.rate))


def check_arrivals(job: Job, reading: Reading) -> None:
    """Records what contradicts arrivals in the file, or needs them."""
    is_service = job.workload.arrivals is not None
    for is_wrong, key, allowed in _wrong_arrivals(job, reading) if is_service else _wrong_batch(
            reading):
        if is_wrong:
            reading.reject(key, allowed)


def _wrong_batch(reading: Reading) -> Iterator[tuple[bool, str, str]]:
    """Yields (whether it is wrong, key, what is allowed) for keys of jobs with arrivals."""
    for key in ("constraint.queueing_s", "constraint.scale", "search.queries"):
        yield reading.has(key), key, "left out of a batch job: it needs workload.arrivals"


def _wrong_arrivals(job: Job, reading: Reading) -> Iterator[tuple[bool, str, str]]:
    """Yields (whether it is wrong, key, what is allowed) for keys of a batch job."""
    here, beside = "workload.arrivals", "with workload.arrivals"
    spec, constraint = job.workload.arrivals, job.constraint
    given = [key for key in ArrivalSpec.__dataclass_fields__ if reading.has(f"{here}.{key}")]
    at = reading.at(here)
    yield not given and at is not None and at.value != FROM_REQUESTS, here, (
        "at least one of rate, process, concurrency and file")
    first = next((key for key in _FORMS if key in given), "process")
    yield "speed" in given and "file" not in given, f"{here}.speed", "needs file"
    for key in given:
        yield key not in (first, *_FORMS[first]), f"{here}.{key}", f"left out beside {first}"
    yield {"speed", "rate"} <= {*given}, f"{here}.rate", "left out beside speed"
    is_gamma = spec is not None and spec.process == "gamma"
    yield "cv" in given and not is_gamma, f"{here}.cv", "of `process: gamma` alone"
    yield is_gamma and "cv" not in given, f"{here}.cv", "required: of the gaps of a gamma process"
    yield spec == ArrivalSpec() and job.workload.requests is None and not given, here, (
        "needs workload.requests to be a file, with arrival_s in each line")

    kind, has_requests = reading.at("constraint.kind"), job.workload.requests or job.workload.count
    yield kind is not None and kind.value == "sequence", "constraint.kind", f"queries {beside}"
    yield bool(reading.has("constraint.makespan_s") and not has_requests), (
        "constraint.makespan_s"), "of a job with requests: give workload.requests"
    yield constraint.on_deadline == "stop", "constraint.on_deadline", f"finish {beside}"
    yield constraint.attainment == 1, "constraint.attainment", f"above 0 and below 1 {beside}"
    for key in ("", "ttft_s.", "tpot_s.", "queueing_s.") if constraint.attainment else ():
        yield reading.has(f"constraint.{key}quantile"), f"constraint.{key}quantile", (
            "left out beside constraint.attainment, the share that keeps all limits together")
    yield _lacks_price(job), "price_per_hour", (
        "required for objective cost: the catalog has no price of this device")

    order = reading.at("schedule.order")
    yield order is not None and order.value not in ("auto", "input"), "schedule.order", (
        f"input (or left out) {beside}: requests run in the order in which they arrive")
    yield bool(job.adjustment.batches and job.adjustment.batches.deadline), (
        "schedule.batches"), f"a deadline of weight 0 {beside}"
    yield job.run.engine not in ARRIVING_ENGINES, "run.engine", (
        f"{' or '.join(ARRIVING_ENGINES)} {beside}: {job.run.engine} takes whole jobs")
    for key in ("schedule.shuffle", "schedule.window", "schedule.placement", "workload.shared",
                "tiers", "constraint.host_memory", "constraint.disk"):
        yield reading.has(key), key, f"left out {beside}"
    yield job.run.offload not in ("auto", "off"), "run.offload", f"auto or off {beside}"


def _lacks_price(job: Job) -> bool:
    """Whether the objective is the price, and the job's cluster, known beforehand, has none."""
    if job.constraint.objective != "cost" or job.price_per_hour is not None or job.cluster in (
            LOCAL_CLUSTER, ""):
        return False
    own = job.cluster if isinstance(job.cluster, Cluster) else catalog.cluster(job.cluster)
    return own.device.price_per_hour is None
