"""The screen of a plan: how long, how fast, how sure, and what comes next, in at most 25 lines."""

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from xgpt.core.cluster import Cluster
from xgpt.core.engines import OWN_ENGINE, VLLM
from xgpt.core.policies import policy
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate, Schedule, SizeTried, Status
from xgpt.core.units import EIGHT_BITS, format_bytes, format_seconds
from xgpt.report.figures import percent, plain, rates
from xgpt.report.service_words import service_facts
from xgpt.report.table import (
    OF_JOB,
    alternative_rows,
    fact,
    paragraph,
    placement_tables,
    service_tables,
    table,
)
from xgpt.report.words import (
    PROSPECTS,
    controls_line,
    counted,
    placement,
    placement_facts,
    prospect_words,
)
from xprofiler.calibration import Calibrated
from xprofiler.roofline import Roofline
from xprofiler.timing import TimingSource
from xscheduler.admission_choice import room_words
from xscheduler.layouts import LAYOUT_NOTE
from xscheduler.margin import doubt_of_estimate
from xscheduler.replicas import replica_sizes
from xsimulator.replay.prediction import JobPrediction

ENGINE_WORDS = {VLLM: "vLLM", OWN_ENGINE: "xgpt's own runner"}
MOST_ALTERNATIVES, MOST_SIZES = 4, 4  # chosen: rows of the tables, for a screen of 25 lines


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTimes:
    """source: of the step times, in words. expected: for the job's own requests; None for a plan of
    the steady state. by_engine: (engine in words, seconds) by other engines' times. sharing:
    sentences on shared prefixes."""

    source: str
    expected: JobPrediction | None
    by_engine: Sequence[tuple[str, float]] = ()
    sharing: Sequence[str] = ()


def source_words(timing: TimingSource, estimate: Estimate, cluster: Cluster, engine: str) -> str:
    """Whose times a plan has, where they come from, and how far off such times were."""
    doubt = doubt_of_estimate(timing, estimate, cluster)
    if doubt is None:
        return timing.provenance()
    words = ENGINE_WORDS.get(engine, engine.replace(f"{VLLM}-", "vLLM "))
    source = f"{words} on {cluster.device.name}, computed"
    if isinstance(timing, Calibrated):
        source += f"; {timing.words}"
    elif not isinstance(timing, Roofline):
        source = timing.provenance()
    return f"{source}; {doubt.words}"


def plan_screen(schedule: Schedule, problem: Problem, times: PlanTimes, job_file: str, *,
                is_here: bool) -> str:
    """The plan of a job. job_file: as the user named it, or where it would be saved. is_here:
    whether this machine can run the job, or hand it in."""
    rows = [fact(label, text) for label, text in _facts(schedule, problem, times)]
    near = os.path.relpath(job_file)
    name = near if len(near) < len(job_file) else job_file
    run = f"xgpt submit {name}" + ", on such a cluster" * (not is_here)
    is_narrow = not {problem.weight_dtype, problem.kv_dtype}.isdisjoint(EIGHT_BITS)
    if problem.model.split.is_asked or is_narrow and problem.cluster.device.kind == "gpu":
        own = policy(schedule.estimate.policy)  # no runner under xgpt; vLLM has not every policy
        other = "" if own.admits and len(own.pools) == 1 else " --set schedule.policy=sarathi"
        run = f"xgpt schedule {name}{other} --export {VLLM}, with vLLM by itself"
    following = (f"run it: {run}\nwhy:    xgpt explain {name}"
                 if os.path.exists(job_file) else f"next:   --save {name} writes the job file")
    return "\n\n".join(filter(None, (
        paragraph(_head(problem)), "\n".join(rows),
        *service_tables(schedule)[:1],
        placement_tables(schedule) or sizes_table(schedule, MOST_SIZES)
        or _alternatives_table(schedule), following)))


def _head(problem: Problem) -> str:
    count, cluster = problem.num_queries, problem.cluster
    of = "service" if problem.arrivals else (
        "steady state" if count is None else counted(count, "request"))
    nodes = f" ({cluster.num_nodes} nodes)" if cluster.num_nodes > 1 else ""
    return (f"{of}: {problem.model.name} ({problem.dtype}) on {cluster.num_devices} x "
            f"{cluster.device.name}{nodes}")


def _facts(schedule: Schedule, problem: Problem, times: PlanTimes) -> Iterator[tuple[str, str]]:
    figures, margin, cluster = schedule.figures, schedule.margin, problem.cluster
    steady = rates(figures.throughput_qps, figures.output_tokens_per_s)
    if times.expected is not None:
        yield "time", _time(schedule, problem, times.expected)
    if (own := _size_of(schedule)) is not None:
        yield "devices", _devices(schedule, problem) + (
            "; times and cost are of a million requests" * (problem.num_queries is None))
        if own.price:
            each = cluster.device.price_per_hour or 0.0
            unit = " USD" if cluster.device.price_source else ""  # the catalog's prices
            yield "cost", f"about {own.price:,.0f}{unit}, at {each:g} an hour for each device"
    if schedule.served is not None:
        of_catalog = cluster.device.price_source
        yield from service_facts(schedule, " USD" if of_catalog else " unit of price")
    elif times.expected is None:
        yield "throughput", f"{steady}, in steady state"
    else:
        longer = _job_s(schedule, times.expected) / times.expected.wall_s
        yield "throughput", rates(times.expected.throughput_qps / longer,
                                  times.expected.output_tokens_per_s / longer) + OF_JOB
        if schedule.placed is None:
            yield "steady rate", steady
    if not schedule.served and (own is None or not math.isinf(schedule.bound.limit_s)):
        yield "latency", _latency(schedule)
    for one in schedule.prospects:
        if one.metric != "makespan":
            yield PROSPECTS[one.metric], prospect_words(one)
    yield "schedule", controls_line(schedule.estimate)
    if room := room_words(schedule.estimate, problem):
        yield "KV cache", room
    yield from zip(("prefixes", ""), times.sharing, strict=False)
    if schedule.order != "input" and not times.sharing[1:]:
        yield "order", _order(schedule)
    split = problem.model.split
    yield "placement", "; ".join(dict.fromkeys(map(placement, schedule.estimate.shapes))) + (
        f"; EP {split.ep_degree}, attention DP {split.attention_dp}" * split.is_asked)
    if schedule.placed is None:
        yield "memory", (f"{format_bytes(max(figures.memory_bytes, default=0))} of "
                         f"{format_bytes(figures.memory_capacity_bytes)} usable, fullest device")
    yield from placement_facts(schedule, problem.model.name)
    yield "times", times.source
    if times.by_engine:
        yield "others", "; ".join(f"{engine} {format_seconds(seconds)}" for engine, seconds in
                                  times.by_engine) + ", same schedule"
    if cluster.assumed:
        between = f", {cluster.inter_link.name} between nodes" * (cluster.num_nodes > 1)
        yield "links", f"assumed: {cluster.intra_link.name} in a node{between}"
    if margin.factor > 1 and schedule.served is None:
        metric = "time" if math.isinf(schedule.bound.limit_s) else "latency"
        yield "margin", (f"{percent(margin.factor - 1, 0)} on the {metric}, to be "
                         f"{problem.constraint.confidence:.0%} sure; it costs "
                         f"{percent(margin.cost, 0)} of the throughput")
    if schedule.placed is None and schedule.served is None:
        yield "optimality", _optimality(schedule)
    for note in schedule.estimate.notes:
        if note.startswith(LAYOUT_NOTE):
            yield "layout", note.removeprefix(LAYOUT_NOTE)
        elif not note.startswith("times: "):
            yield "note", note


def _time(schedule: Schedule, problem: Problem, expected: JobPrediction) -> str:
    """`5 h 14 min expected, 7 h 35 min at 95 % (limit 8 h), without loading`."""
    seconds, load_s = _job_s(schedule, expected), expected.load_s
    limit = next((one for one in schedule.prospects if one.metric == "makespan"), None)
    sure_s = None if limit is None else limit.with_margin_s
    if (own := _size_of(schedule)) is not None and own.expected_s is not None:
        sure_s = own.with_margin_s
    text = format_seconds(seconds)
    if sure_s is not None and sure_s > seconds:
        text += f" expected, {format_seconds(sure_s)} at {problem.constraint.confidence:.0%}"
    if limit is not None:
        text += f" (limit {format_seconds(limit.limit_s)})"
    if problem.observes:
        text += (f", if every answer has {problem.default_max_tokens:,} tokens: how long they are "
                 "is not known")
    return f"{text}, without loading" if load_s is None else (
        f"{text}, after {format_seconds(load_s)} of loading")


def _job_s(schedule: Schedule, expected: JobPrediction) -> float:
    """Seconds of the job, as in the table of sizes where there is one."""
    own = _size_of(schedule)
    return expected.wall_s if own is None or own.expected_s is None else own.expected_s


def _size_of(schedule: Schedule) -> SizeTried | None:
    """The chosen size; None for a schedule on a given number of devices."""
    own = schedule.estimate.num_devices
    return next((row for row in schedule.sizes if row.devices == own), None)


def _devices(schedule: Schedule, problem: Problem) -> str:
    own = schedule.estimate.num_devices
    if problem.constraint.objective == "cost":
        return f"{own}: the least cost found, of {counted(len(schedule.sizes), 'size')}"
    impossible = max((row.devices for row in schedule.sizes if row.is_impossible), default=0)
    unruled = [size for size in replica_sizes(problem.cluster) if impossible < size < own]
    if not unruled:
        return f"{own}: fewer are impossible (memory, roofline limit)"
    rest = f"{unruled[0]}" + f" to {unruled[-1]}" * (len(unruled) > 1)
    return f"{own}: the fewest found, not proved fewest ({rest} not ruled out)"


def _order(schedule: Schedule) -> str:
    """`longest outputs first, within 1,024 requests: 4 % sooner`."""
    first, _, what = schedule.order.partition("-")
    order = f"{first} {what}s first" if what else (
        "earliest deadlines first" if first == "deadline" else f"{first} order")
    within = f", within {schedule.window:,} requests" if schedule.window else ""
    gain = f": {percent(schedule.order_gain, 0)} sooner" if schedule.order_gain else ""
    return f"{order}{within}{gain}"


def _latency(schedule: Schedule) -> str:
    bound = schedule.bound
    text = f"{format_seconds(schedule.figures.latency_s)} at P{bound.quantile * 100:g}"
    if math.isinf(bound.limit_s):
        return f"{text}, no limit"
    return f"{text}, limit {format_seconds(bound.limit_s)}"


def _optimality(schedule: Schedule) -> str:
    proof = schedule.proof
    if proof.status == Status.JOB or not math.isfinite(proof.gap):
        return "the quickest found for this job; no upper bound on others is proved"
    if proof.status == Status.OPTIMAL:
        return "optimal: no schedule has more throughput"
    cut = "; the search was cut off" if proof.status == Status.LIMIT else ""
    return (f"gap {percent(proof.gap, 0)}: no schedule exceeds {plain(proof.bound_qps)} requests/s"
            f" in steady state{cut}")


def sizes_table(schedule: Schedule, most: int | None = None) -> str:
    """Each number of devices that was tried, its time and cost; the smaller ones without any
    schedule are one row. most: rows, those nearest to the chosen size. "" if one size was tried."""
    limit = next((bound for bound in schedule.bounds if bound.metric == "makespan"), None)
    chosen = schedule.estimate.num_devices
    without = [row.devices for row in schedule.sizes if row.expected_s is None]
    body: list[tuple[str, ...]] = [(f"up to {size}", "-", "-", "-", "no") for size in without[-1:]]
    for row in schedule.sizes:
        if row.expected_s is None:
            continue
        times = [format_seconds(row.expected_s), format_seconds(row.with_margin_s or math.inf)]
        is_only_expected = limit is not None and row.expected_s <= limit.limit_s
        met = "yes" if not row.reason else "only expected" if is_only_expected else "no"
        body.append((f"{row.devices}", *times, f"{row.price:,.0f}" if row.price else "-",
                     f"{met}, chosen" if row.devices == chosen else met))
    if most is not None and len(body) > most:
        own = next(at for at, cells in enumerate(body) if cells[-1].endswith("chosen"))
        start = min(max(own - most // 2, 0), max(len(body) - most, 0))
        body = body[start:start + most]
    header = ("devices", "expected", "with margin", "cost", "limits met")
    return table(header, body, right=(0, 1, 2, 3)) if body[1:] else ""


def _alternatives_table(schedule: Schedule) -> str:
    """The best of the other policies. Searches of those end early, so that each has its upper bound
    beside what was found."""
    policies = sorted((row for row in schedule.rejected if (schedule.served or row.throughput_qps)
                       and not row.is_unsure and row.kind == "policy"),
                      key=lambda row: -(row.throughput_qps or 0))
    rows = alternative_rows(replace(schedule, rejected=tuple(policies[:MOST_ALTERNATIVES])))
    if schedule.served:  # a latency hangs on the rate
        return table(("alternative", "capacity", "upper bound", "configuration"),
                     [(*row[:3], row[4]) for row in rows], right=(1, 2)) if rows else ""
    return table(("alternative", "steady requests/s", "upper bound", "latency"),
                 [row[:4] for row in rows], right=(1, 2, 3)) if rows else ""
