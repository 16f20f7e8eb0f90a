"""Is a plan one that a practitioner would accept: what is planned, beside what others published.

    python benchmarks/planned.py [--data ../shared/data] [--only 70b ...]
        [--out benchmarks/results]

The first table has jobs of equal lengths, all requests there at the start, planned for TensorRT-LLM
(its times, and the policies that it has) in 16 bits and in fp8 (weights and KV cache). *Job* is the
mean rate of the whole job, its start and end included; *steady* is the rate of its middle.
Published runs are those of TensorRT-LLM's performance overview with the same model, GPU, number
types and lengths, at the highest tensor-parallel degree that the GPUs allow. *There* is the
prediction of the published run itself. On fewer GPUs than the job has, 16 bits leave less room for
the KV cache, so fp8 gains more (70B at TP 2).

The second table has the problems of best_by_hand.py, planned for vLLM (its times and policies), as
`xgpt schedule --horizon steady` does, with a margin on the limit. Their lengths are distributions,
of which no run was published.

*Doubt* is the level that screens show beside computed times. *Choice* names the limits that bind,
a near tie with a less simple placement, and what the best plan of another degree would lose of the
steady rate.
"""

from __future__ import annotations

import os

from runner import about, cpu, options, table, today, write

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy loads: one core is enough

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from hand_problems import SCENARIOS, HandScenario
from published.offline import ENGINE, OfflineRow, offline_rows, offline_times

import xgpt
from xgpt.app.schedule import Plan
from xgpt.core.cluster import Cluster
from xgpt.core.engines import VLLM
from xgpt.core.errors import InfeasibleError
from xgpt.core.problem import Problem
from xgpt.core.schedule import Schedule
from xgpt.core.units import FP8
from xgpt.report.words import controls_line, placement
from xprofiler.roofline import Roofline
from xprofiler.timing import TimingSource
from xscheduler.explanation import binding_limits
from xscheduler.margin import doubt_of_estimate
from xscheduler.planner import PlanOptions, plan

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
WEIGHTS = ("16-bit", FP8)
GROUPS = (("llama-3.1-8b", "H100", 1), ("llama-3.1-70b", "H100", 4), ("llama-3.1-70b", "H100", 8),
          ("llama-3.1-405b", "H200", 8), ("mixtral-8x7b", "H100", 8))  # model, GPU, number of GPUs
LENGTHS = ((1000, 1000, 3000), (128, 2048, 3000), (2048, 128, 3000))  # input, output, requests
# The overview's row of 405B, to three digits: the file has none of this model. Its lengths are
# those for which the planner chose eight stages at 4,958 tokens/s.
LARGEST = OfflineRow(model="llama-3.1-405b", gpu="H200", weights=FP8, tp=8, input_tokens=1000,
                     output_tokens=1000, requests=3000, output_tokens_per_s=3390.0)
SIMPLER = "a simpler placement"  # start of the planner's note on a near tie
NONE_PUBLISHED = "no published run"
STAGES = """The published file has no run with pipeline stages. For Llama-3.1-405B in fp8 on eight
H200 NVIDIA reports that eight stages have 1.5 times the throughput of TP 8 (developer.nvidia.com,
*Boosting Llama 3.1 405B Throughput by Another 1.5x*, October 2024, as other
sites quote it; its lengths are not known here).
"""
OF_ENGINE = {ENGINE: ("sarathi", "vllm"), VLLM: ("rra", "sarathi", "vllm", "orca", "ft", "dsi")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job on `gpus` GPUs. `row`: its lengths and number types, as a run on all of them."""

    row: OfflineRow
    gpus: int

    @property
    def name(self) -> str:
        of = self.row
        return (f"{of.model}, {self.gpus} x {of.gpu}, {of.requests:,} x {of.input_tokens} / "
                f"{of.output_tokens}")

    def published(self, rows: Sequence[OfflineRow]) -> OfflineRow | None:
        """The run of the highest degree with the job's model, GPU, number types and lengths."""
        same = [one for one in rows if one.tp <= self.gpus and replace(
            self.row, tp=one.tp, output_tokens_per_s=one.output_tokens_per_s) == one]
        return max(same, key=lambda one: one.tp, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A job's plan. Rates in output tokens/s. `there`: predicted of the published run. `stages`:
    most pipeline stages of a pool."""

    job: Job
    words: str
    job_rate: float
    steady_rate: float
    doubt: str
    choice: str
    stages: int
    published: OfflineRow | None
    there: float = math.nan


def jobs() -> Iterator[Job]:
    """The jobs of the first table: 16 bits and fp8 side by side."""
    for model, gpu, gpus in GROUPS:
        for inputs, outputs, requests in LENGTHS:
            for weights in WEIGHTS:
                yield Job(gpus=gpus, row=OfflineRow(
                    model=model, gpu=gpu, weights=weights, tp=gpus, input_tokens=inputs,
                    output_tokens=outputs, requests=requests, output_tokens_per_s=0.0))


def plan_of(job: Job, **layout: int) -> Plan:
    """The plan of a job by the engine's policies. `layout`: keys of its schedule."""
    row = job.row
    return xgpt.plan(xgpt.load({
        "model": row.model, "cluster": f"{job.gpus}x{row.gpu}", "plan": {"engine": ENGINE},
        "run": {"weight_dtype": FP8, "kv_dtype": FP8} if row.weights == FP8 else {},
        "workload": {
            "requests": {"count": row.requests},
            "input_tokens": {"mean": row.input_tokens, "std": 0, "max": row.input_tokens},
            "output_tokens": {"mean": row.output_tokens, "std": 0, "max": row.output_tokens}},
        "schedule": {"policy": list(OF_ENGINE[ENGINE]), **layout}}))


def rate_of(found: Plan) -> float:
    """Output tokens/s of the whole job."""
    assert found.prediction is not None
    return found.prediction.output_tokens_per_s


def planned(job: Job, rows: Sequence[OfflineRow]) -> Planned:
    """The plan of a job, beside its published run."""
    found, published = plan_of(job), job.published(rows)
    schedule = found.schedule
    one = Planned(
        job=job, words=words_of(schedule), job_rate=rate_of(found),
        steady_rate=schedule.figures.output_tokens_per_s, published=published,
        stages=max(len(pool.stages) for pool in schedule.estimate.all_pools),
        doubt=doubt_words(schedule, found.timing, found.opened.problem.cluster),
        choice=choice(schedule, found.opened.problem))
    if published is None:
        return one
    tokens = published.requests * published.output_tokens
    return replace(one, there=tokens / offline_times(published).job_s)


def words_of(schedule: Schedule) -> str:
    return "; ".join(f"{placement(shape)}, {controls_line(shape)}"
                     for shape in schedule.estimate.shapes)


def doubt_words(schedule: Schedule, timing: TimingSource, cluster: Cluster) -> str:
    """The greatest doubt about the times of a schedule's replicas, in words."""
    doubt = doubt_of_estimate(timing, schedule.estimate, cluster)
    return "measured" if doubt is None else doubt.words


def choice(schedule: Schedule, problem: Problem) -> str:
    """A sentence: limits that bind, and what the next best degree would lose of the steady rate."""
    limits = binding_limits(schedule, problem, schedule.bound.limit_s / schedule.margin.factor)
    words = " and ".join(limits) or "no limit"
    text = f"{words[0].upper()}{words[1:]} {'bind' if limits[1:] else 'binds'}"
    text += "".join(f"; {note.partition(':')[0]}" for note in schedule.estimate.notes
                    if note.startswith(SIMPLER))
    others = [row for row in schedule.rejected if row.kind == "tp_degree" and row.throughput_qps]
    if not others:
        return text
    best = max(others, key=lambda row: row.throughput_qps or 0.0)
    lost = 1 - (best.throughput_qps or 0.0) / schedule.figures.throughput_qps
    return f"{text}; degree {best.subject} would {'lose' if lost > 0 else 'gain'} {abs(lost):.1%}"


def line_of(one: Planned) -> str:
    row, published, there = one.job.row, NONE_PUBLISHED, ""
    if (of := one.published) is not None:
        on = "" if of.tp == one.job.gpus else f" on {of.tp} of {one.job.gpus} GPUs"
        published = f"{of.output_tokens_per_s:,.0f} (TP {of.tp}{on})"
        there = f"{one.there:,.0f} ({one.there / of.output_tokens_per_s - 1:+.0%})"
    return (f"| {one.job.name} | {row.weights} | {one.words} | {one.job_rate:,.0f} "
            f"| {one.steady_rate:,.0f} | {published} | {there} | {one.doubt} | {one.choice} |")


def ratios(found: Sequence[Planned], weights: str) -> list[float]:
    """Rates in fp8 over those in 16 bits: planned, or published where `weights` is "published"."""
    rates = {(one.job.name, one.job.row.weights): one.job_rate if weights == "planned" else (
        one.published.output_tokens_per_s if one.published else math.nan) for one in found}
    names = dict.fromkeys(name for name, _ in rates)
    both = [rates[name, FP8] / rates[name, "16-bit"] for name in names
            if {(name, own) for own in WEIGHTS} <= rates.keys()]
    return [one for one in both if math.isfinite(one)]


def summary(found: Sequence[Planned]) -> list[str]:
    """Sentences with the figures of the first table."""
    known = [one for one in found if one.published is not None]
    off = np.array([one.there / one.published.output_tokens_per_s - 1 for one in known
                    if one.published is not None])
    lines = [f"- {len(found)} jobs, of which {len(known)} have a published run."]
    if len(off):
        lines.append(f"- Predictions of these runs are {np.abs(off).mean():.0%} off in the mean, "
                     f"{off.mean():+.0%} on balance, {off[np.abs(off).argmax()]:+.0%} at worst.")
    for what in ("planned", "published"):
        if own := ratios(found, what):
            lines.append(f"- fp8 is {min(own):.2f} to {max(own):.2f} times as fast as 16 bits, as "
                         f"{what} ({len(own)} jobs).")
    staged = sum(one.stages > 1 for one in found)
    return [*lines, f"- Pipeline stages are chosen for {staged} of {len(found)} jobs."]


def stage_lines() -> list[str]:
    """Sentences on pipeline stages: published, and planned."""
    lines = STAGES.splitlines()
    for job in jobs():
        if (job.row.model, job.row.weights) == (LARGEST.model, FP8):
            more = rate_of(plan_of(job, replicas=1, tp_degree=1, tp_gpus=0)) / rate_of(
                plan_of(job, replicas=1, tp_degree=job.gpus, tp_gpus=job.gpus))
            lines.append(f"- planned for {job.row.input_tokens} input and {job.row.output_tokens} "
                         f"output tokens: {more:.2f} times")
    return lines


def hand_lines(scenario: HandScenario) -> Iterator[str]:
    """A line for each limit of a problem of best_by_hand.py."""
    for bound_s in scenario.bounds():
        problem = scenario.problem(bound_s)
        problem = replace(problem, fixed=replace(problem.fixed, policies=OF_ENGINE[VLLM]))
        timing = Roofline(problem.model, problem.cluster.device, problem.dtype, engine=VLLM)
        start = f"| {scenario.name} | {bound_s:.3g}"
        try:
            found = plan(problem, timing, PlanOptions(horizon="steady"))
        except InfeasibleError:
            yield f"{start} | none keeps the limit with its margin | | {NONE_PUBLISHED} | | |"
            continue
        yield (f"{start} | {words_of(found)} | {found.figures.output_tokens_per_s:,.0f} "
               f"| {NONE_PUBLISHED} | {doubt_words(found, timing, problem.cluster)} "
               f"| {choice(found, problem)} |")


def page(found: Sequence[Planned], stages: Sequence[str], hand: Sequence[str]) -> list[str]:
    """Both tables, with what the first says."""
    return ["# Planned beside published", "", *about(__doc__).splitlines(), "", *summary(found), "",
            *stages, "",
            *table(("job: requests x input / output tokens", "number types", "planned",
                    "tokens/s of the job", "steady", "published", "predicted there", "doubt",
                    "choice")), *map(line_of, found), "",
            *table(("problem", "limit s", "planned", "steady tokens/s", "published", "doubt",
                    "choice")), *hand, "", f"Times are computed, on {cpu()}, {today()}."]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--only", nargs="*", default=[""],
                        help="jobs and problems whose names contain one of these")
    arguments = parser.parse_args()
    rows = [*offline_rows(arguments.data / "trtllm-perf"), LARGEST]

    def is_asked(name: str) -> bool:
        return any(part in name for part in arguments.only)

    found = [planned(job, rows) for job in jobs() if is_asked(job.name)]
    hand = [line for scenario in SCENARIOS if is_asked(scenario.name)
            for line in hand_lines(scenario)]
    write("planned", "\n".join(page(found, stage_lines(), hand)), arguments.out)


if __name__ == "__main__":
    main()
