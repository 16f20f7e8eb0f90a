"""How far the times of encode and decode steps scatter, with and without workload adjustment: the
paper's Table 7.

    python benchmarks/stage_variance.py [--queries 360] [--no-run] [--out benchmarks/results]

Measured: SmolLM2 on two ranks of this machine, synthetic queries of exact lengths, fixed schedules;
the times are those of steps.jsonl. (The machine must be otherwise idle. Without a profile in the
cache one is measured first.) Replayed: OPT-13B on four A40 by the roofline, the paper's tasks, the
best schedule of each policy for BOUND_SHARE of the latency that its best has without a bound.

Only steps of the steady state count: those begun after 35 % and before 90 % of the encode steps. A
step's time is divided by the mean over its stage, so that uneven stages are not taken for
uneven work; decode steps also by the mean at their iteration of a phase, since RRA's decode batch
falls within a phase whatever is adjusted. `range`: from the 0.5th to the 99.5th percentile of these
ratios, 99 % of the steps. Batches of fewer than four queries a group are not adjusted.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from xgpt.core import catalog
from xgpt.core.constraint import latency_constraint
from xgpt.core.job import FixedSchedule
from xgpt.core.lengths import FloatArray
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate
from xprofiler.roofline import Roofline
from xrunner.rules.steps import StepKind
from xscheduler.alternatives import InfeasibleError
from xscheduler.search import find_schedule
from xsimulator.replay.job import planned_queries, replay_job
from xsimulator.replay.records import PoolRecords

TASKS = ("S", "T", "G", "C1", "C2")
MODEL, CLUSTER = "opt-13b", "a40-4"
BOUND_SHARE = 0.9
STEADY = (0.35, 0.9)
ROUNDS, LEAST_QUERIES, MOST_QUERIES = 14, 3000, 12_000
XGPT = [sys.executable, "-c", "from xgpt.cli.main import main; main()"]
JOB = """\
model: smollm2-135m
cluster: local
workload:
  requests: {{count: {queries}}}
  input_tokens: {{mean: 48, std: 32, max: 128}}
  output_tokens: {{mean: 16, std: 7, max: 32}}
schedule: {{{schedule}}}
run: {{ranks: 2, dtype: auto, threads_per_rank: 1, seed: 1}}
output: out
"""
RUNS = {"rra": "policy: rra, encode_batch: 16, decode_iterations: 4, tp_degree: 1, tp_gpus: 0",
        "waa-c": "policy: waa-c, encode_batch: 8, decode_micro_batches: 2, tp_degree: 1, "
                 "tp_gpus: 0"}
NONE, INPUTS, BOTH = "none", "inputs", "inputs and decode batch"
KEYS = {NONE: "adjustment: 0", INPUTS: "steer: false", BOTH: "steer: true"}
USUAL = {"rra": BOTH, "waa-c": INPUTS}  # where the job says nothing
PAPER = """\
The paper's Table 7 has the "99th percentile ranges" of a single stage's times, for OPT and task S.
The copy of the paper at hand leaves the table's figures out. Its text says that the encoder's
variance is "not negligible", and that the decoder's is "notably low, less than 6%"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Steps of one stage, in the order in which it took them."""

    is_encode: FloatArray
    iteration: FloatArray
    rows: FloatArray  # queries encoded or decoded
    tokens: FloatArray  # of inputs, of encode steps
    start_s: FloatArray
    seconds: FloatArray

    def steady(self, begin_s: float, end_s: float, *, is_encode: bool) -> Steps:
        chosen = (self.start_s >= begin_s) & (self.start_s <= end_s) & (
            self.is_encode == is_encode)
        return Steps(**{name: getattr(self, name)[chosen] for name in self.__slots__})


@dataclass(frozen=True, slots=True, kw_only=True)
class Scatter:
    """Of ratios to their mean. `low`, `high`: 0.5th and 99.5th percentile."""

    cv: float
    low: float
    high: float
    most: float

    @classmethod
    def of(cls, ratios: FloatArray) -> Scatter:
        low, high = np.quantile(ratios, [0.005, 0.995]) if len(ratios) else (math.nan, math.nan)
        return cls(cv=float(ratios.std()) if len(ratios) else math.nan, low=float(low),
                   high=float(high), most=float(ratios.max(initial=0.0)))

    @property
    def cells(self) -> str:
        return f"{self.cv:.1%} | {self.low - 1:+.0%} .. {self.high - 1:+.0%} | {self.most:.2f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One schedule under one setting."""

    name: str
    setting: str
    encode: Scatter
    decode: Scatter
    tokens_cv: float  # of an encode step's inputs
    batch_cv: float  # of a decode step's queries (RRA: the first after an encode step)
    throughput_qps: float
    latency_p99_s: float

    @property
    def line(self) -> str:
        return (f"| {self.name} | {self.setting} | {self.encode.cells} | {self.tokens_cv:.1%} | "
                f"{self.decode.cells} | {self.batch_cv:.1%} | {self.throughput_qps:.2f} | "
                f"{self.latency_p99_s:.2f} |")


def row_of(name: str, setting: str, stages: Sequence[Steps], throughput_qps: float,
           latency_p99_s: float) -> Row:
    """Of all stages together."""
    encodes = np.concatenate([s.start_s[s.is_encode == 1] for s in stages])
    begin_s, end_s = np.quantile(encodes, STEADY)
    encoding = [s.steady(begin_s, end_s, is_encode=True) for s in stages]
    decoding = [s.steady(begin_s, end_s, is_encode=False) for s in stages]
    return Row(
        name=name, setting=setting, throughput_qps=throughput_qps, latency_p99_s=latency_p99_s,
        encode=Scatter.of(_ratios([(s.seconds, s.iteration) for s in encoding])),
        decode=Scatter.of(_ratios([(s.seconds, s.iteration) for s in decoding])),
        tokens_cv=Scatter.of(_ratios([(s.tokens, s.iteration) for s in encoding])).cv,
        batch_cv=Scatter.of(_ratios([(s.rows[s.iteration == 1], s.iteration[s.iteration == 1])
                                     for s in decoding])).cv)


def _ratios(stages: Sequence[tuple[FloatArray, FloatArray]]) -> FloatArray:
    """Values over their mean at the same iteration of their stage, of all stages."""
    found = []
    for values, iteration in stages:
        for at in np.unique(iteration):
            own = values[iteration == at]
            found.append(own / own.mean())
    return np.concatenate(found) if found else np.empty(0)


# --- replayed ---------------------------------------------------------------------------------


def replayed() -> Iterator[Row]:
    for task in TASKS:
        joint = catalog.task(task)
        problem = Problem(
            model=catalog.model(MODEL), cluster=catalog.cluster(CLUSTER), lengths=joint,
            dtype="float16", num_queries=None, fixed=FixedSchedule(),
            constraint=latency_constraint(latency_s=math.inf), default_max_tokens=joint.outputs.max)
        timing = Roofline(problem.model, problem.cluster.device, problem.dtype)
        for policy in ("rra", "waa-c"):
            found = bounded(replace(problem, fixed=FixedSchedule(policies=(policy,))), timing)
            if found is not None:
                yield from of_schedule(problem, timing, found, task)


def bounded(problem: Problem, timing: Roofline) -> Estimate | None:
    try:
        free = find_schedule(problem, timing).estimate
        bound = problem.constraint.with_latency(limit_s=BOUND_SHARE * free.figures.latency_s)
        return find_schedule(replace(problem, constraint=bound), timing).estimate
    except InfeasibleError:
        return None


def of_schedule(problem: Problem, timing: Roofline, found: Estimate, task: str) -> Iterator[Row]:
    """The same schedule under each setting."""
    present = max(
        found.figures.decode_batch + found.figures.encode_batch, found.controls.max_in_system
    )
    count = int(min(max(ROUNDS * present, LEAST_QUERIES), MOST_QUERIES))
    inputs, outputs = problem.lengths.sample(count, np.random.default_rng(0))
    control = (f"N_D {found.figures.decode_iterations}" if found.policy == "rra"
               else f"G {found.deployment.num_groups}")
    name = (
        f"{task}: {found.policy} B_E {found.figures.encode_batch} {control} "
        f"TP {found.deployment.tp_degree} x "
        f"{found.deployment.tp_gpus // found.deployment.tp_degree}, "
        f"B_D {found.figures.decode_batch:.0f}"
    )
    is_rra = found.policy == "rra"
    led = found.controls.even.target_active if is_rra else found.figures.decode_batch
    for setting, changes in ((NONE, {"adjustment": 0.0, "steered_to": 0.0}),
                             (INPUTS, {"steered_to": 0.0}), (BOTH, {"steered_to": led})):
        result = replay_job(problem, timing, replace(found, **changes),
                            planned_queries(problem, inputs, outputs))
        yield row_of(name, setting, [steps for pool in result.pools for steps in of_pool(pool)],
                     count / result.makespan_s, float(np.quantile(result.latency_s, 0.99)))


def of_pool(pool: PoolRecords) -> list[Steps]:
    is_encode = np.array([step.kind is StepKind.ENCODE for step in pool.steps], float)
    return [Steps(
        is_encode=is_encode, iteration=np.array([step.iteration for step in pool.steps], float),
        rows=np.where(is_encode == 1, pool.encoded, pool.decoded).astype(float),
        tokens=pool.tokens.astype(float), start_s=pool.start_s[:, stage],
        seconds=pool.end_s[:, stage] - pool.start_s[:, stage])
        for stage in range(len(pool.stages))]


# --- measured ---------------------------------------------------------------------------------


def measured(queries: int) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job.yaml"
        for policy, schedule in RUNS.items():
            for setting in (NONE, USUAL[policy]):
                keys = f"{schedule}, {KEYS[setting]}"
                job.write_text(JOB.format(queries=queries, schedule=keys))
                done = subprocess.run([*XGPT, "submit", str(job), "--json"], text=True,
                                      capture_output=True, check=True)
                metrics = json.loads(done.stdout)
                yield row_of(
                    f"{policy} {metrics['machine']['device']}, others {others(metrics)}",
                    setting, of_run(Path(folder) / "out" / "steps.jsonl"),
                    metrics["throughput_qps"]["measured"], metrics["latency_p99_s"]["measured"])


def others(metrics: dict[str, Any]) -> str:
    """What other processes used of the cores meanwhile."""
    share = metrics["others_cpu_share"]
    return "unknown" if share is None else f"{share:.0%}"


def of_run(path: Path) -> list[Steps]:
    """Those of each stage."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [of_stage([line for line in lines if line["stage"] == stage])
            for stage in sorted({line["stage"] for line in lines})]


def of_stage(lines: Sequence[dict[str, Any]]) -> Steps:
    def column(key: str) -> FloatArray:
        return np.array([line[key] for line in lines], float)

    return Steps(
        is_encode=np.array([line["kind"] == "encode" for line in lines], float),
        iteration=column("iteration"), rows=column("queries"), tokens=column("tokens"),
        start_s=column("start_s"), seconds=column("end_s") - column("start_s"))


def table(title: str, rows: Iterator[Row]) -> str:
    head = ["schedule", "adjusted", "encode cv", "range", "max / mean", "cv of its tokens",
            "decode cv", "range", "max / mean", "cv of its queries", "queries/s", "p99 latency s"]
    lines = [f"## {title}", "", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in rows:
        lines.append(row.line)
        print(row.line, file=sys.stderr, flush=True)  # it takes minutes
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--queries", type=int, default=360)
    parser.add_argument("--no-run", action="store_true", help="replay alone")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    began = time.monotonic()
    parts = [f"# Stage times, with and without workload adjustment ({datetime.date.today()})",
             PAPER]
    if not options.no_run:
        parts.append(table(f"Measured: SmolLM2-135M, 2 ranks, {options.queries} queries",
                           measured(options.queries)))
    parts.append(table(f"Replayed: {MODEL} on {CLUSTER}, roofline", replayed()))
    parts.append(f"{time.monotonic() - began:.0f} s.")
    text = "\n\n".join(parts)
    print(text)
    if options.out:
        (options.out / f"stage-variance-{datetime.date.today()}.md").write_text(
            text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
