"""`workload.arrivals` of a job file: when requests arrive, and what such a job cannot have.

    workload: {arrivals: {rate: 4, process: gamma, cv: 2}}  # or {process: poisson}: any rate
    workload: {arrivals: {concurrency: 32}}
    workload: {arrivals: {file: trace.csv, speed: 2}}  # or {file: trace.csv, rate: 4}
    workload: {arrivals: from_requests}"""

from collections.abc import Iterator
from typing import Annotated, Any

from xgpt.core.arrivals import Arrivals
from xgpt.core.engines import ARRIVING_ENGINES
from xgpt.job.job import ArrivalSpec, Job
from xgpt.job.job_lengths import read_times
from xgpt.job.typed import OrMapping, Reading, that
from xgpt.requests.request import Requests

FROM_REQUESTS = "from_requests"
_HERE, _BESIDE = "workload.arrivals", "with workload.arrivals"
# keys that go together; the first of each form is required
_FORMS = (("rate", "process", "cv"), ("process", "cv"), ("concurrency",), ("file", "speed"),
          ("file", "rate"))
_WORDS = ", ".join(f"{{{', '.join(form)}}}" for form in _FORMS) + f", or {FROM_REQUESTS}"

AnyArrivals = Annotated[Any, OrMapping(ArrivalSpec, that(
    lambda value: value == FROM_REQUESTS, made=lambda value: ArrivalSpec(), enum=[FROM_REQUESTS]),
    _WORDS)]


def resolve_arrivals(job: Job, requests: Requests | None) -> Arrivals | None:
    """How the job's requests arrive; None for a batch job. Raises InputError for a wrong trace."""
    own = job.workload.arrivals
    if own is None:
        return None
    if own.file is None and own != ArrivalSpec():
        return Arrivals(rate=own.rate, process=own.process or "poisson", cv=own.cv or 1.0,
                        concurrency=own.concurrency)
    if own.file is not None:
        times_s = read_times(own.file) / (own.speed or 1.0)
    else:
        assert requests is not None and requests.arrival_s is not None, "refused before"
        times_s = requests.arrival_s
    found = Arrivals(times_s=times_s - times_s[:1])
    return found if own.rate is None else Arrivals(
        times_s=(times_s - times_s[:1]) / (found.mean_gap_s * own.rate))


def check_arrivals(job: Job, reading: Reading) -> None:
    """Records what contradicts arrivals in the file, or needs them."""
    if job.workload.arrivals is None:
        for key in ("constraint.queueing_s", "constraint.scale", "search.queries"):
            if reading.has(key):
                reading.reject(key, f"left out of a batch job: it needs {_HERE}")
        return
    for is_wrong, key, allowed in _wrong(job, job.workload.arrivals, reading):
        if is_wrong:
            reading.reject(key, allowed)


def _wrong(job: Job, own: ArrivalSpec, reading: Reading) -> Iterator[tuple[object, str, str]]:
    """Yields (whether it is wrong, key, what is allowed) for keys of a job with arrivals."""
    def value_of(key: str) -> object:
        return None if (node := reading.at(key)) is None else node.value

    given = {key for key in ArrivalSpec.__dataclass_fields__ if reading.has(f"{_HERE}.{key}")}
    yield (own.process == "gamma") != ("cv" in given), f"{_HERE}.cv", (
        "of `process: gamma`, which needs it")
    yield value_of(_HERE) != FROM_REQUESTS and not any(
        form[0] in given and given <= {*form} for form in _FORMS), _HERE, (
            f"one of {_WORDS}, not {{{', '.join(sorted(given))}}}")
    yield value_of(_HERE) == FROM_REQUESTS and job.workload.requests is None, _HERE, (
        "needs workload.requests to be a file, with arrival_s in each line")
    yield value_of("constraint.kind") == "sequence", "constraint.kind", f"queries {_BESIDE}"
    yield job.constraint.attainment == 1, "constraint.attainment", (
        f"above 0 and below 1 {_BESIDE}")
    for key in ("", "ttft_s.", "tpot_s.", "queueing_s.") if job.constraint.attainment else ():
        yield reading.has(f"constraint.{key}quantile"), f"constraint.{key}quantile", (
            "left out beside constraint.attainment, the share that keeps all limits together")
    yield value_of("schedule.order") not in (None, "auto", "input"), "schedule.order", (
        f"input (or left out) {_BESIDE}: requests run in the order in which they arrive")
    yield job.adjustment.batches and job.adjustment.batches.deadline, "schedule.batches", (
        f"a deadline of weight 0 {_BESIDE}")
    yield job.run.engine not in ARRIVING_ENGINES, "run.engine", (
        f"{' or '.join(ARRIVING_ENGINES)} {_BESIDE}: {job.run.engine} takes whole jobs")
    yield job.run.offload not in ("auto", "off"), "run.offload", f"auto or off {_BESIDE}"
    for key in ("schedule.shuffle", "schedule.window", "schedule.placement", "workload.shared",
                "tiers", "constraint.host_memory", "constraint.disk", "constraint.makespan_s"):
        yield reading.has(key), key, f"left out {_BESIDE}"
