"""How fast the replay is: queries and query-iterations a second of one core.

    python benchmarks/replay_speed.py [--queries 50000] [--runs 5] [--data DIR] [--out DIR]

OPT-13B on four A40, task S, one schedule of each policy near its best; the tables of step times are
built before (their cost, of a first run of few queries, is shown apart). A query-iteration is one
query's turn in one step: a decode step of 100 queries counts as 100. The floor beside it is RRA's
batching rule alone: the same queries, without clock, stages or records.

Under arrivals: Llama-2-70B on replicas of four A100, lengths of arXiv articles, a Poisson process
at half of what one replica answers of a backlog times the replicas, results without steps. These
rows are of the processor's own seconds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from runner import machine, options, table, today, write
from service_biases import ARXIV, DATA, read_trace

import xgpt
from xgpt.core.controls import Adjustment, FixedSchedule
from xgpt.core.lengths import joint_empirical
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate
from xgpt.job.job_file import load_job
from xgpt.job.resolve import resolve
from xprofiler.roofline import Roofline
from xrunner.rules.steps import StepKind, rules_for
from xsimulator.replay.job import Replayer, planned_queries
from xsimulator.replay.service_replay import ServiceReplayer
from xsimulator.rough.formulas import fixed_estimate

JOB = Path(__file__).resolve().parent.parent / "jobs" / "opt-13b-summarise.yaml"
FEW = 2000
WANTED_QPS, WANTED_ITERATIONS = 25_000, 1_000_000
SCHEDULES: dict[str, dict[str, int]] = {
    "rra": {"encode_batch": 236, "decode_iterations": 30, "tp_gpus": 0},
    "rra, short phases": {"encode_batch": 49, "decode_iterations": 7, "tp_gpus": 0},
    "waa-c": {"encode_batch": 10, "decode_micro_batches": 2, "tp_gpus": 0},
    "ft": {"encode_batch": 400, "decode_micro_batches": 4, "tp_gpus": 0},
    "dsi": {"encode_batch": 400, "decode_micro_batches": 4, "encode_micro_batches": 16,
            "tp_gpus": 0},
    "orca": {"max_active": 400, "tp_gpus": 0},
    "vllm": {"max_active": 600, "token_budget": 2048, "tp_gpus": 0},
    "sarathi": {"max_active": 600, "token_budget": 1024, "tp_gpus": 0},
}
SERVICE = {"model": "llama-2-70b", "cluster": "4xA100-80", "workload": {
    "input_tokens": 2588, "output_tokens": 291, "requests": {"count": 1000}}}
# under arrivals: policy and its settings, replicas, routing, clients of a closed loop
SERVED: Sequence[tuple[str, dict[str, int], int, str, int | None]] = [
    ("sarathi", {"max_active": 256, "token_budget": 512}, 1, "least-queries", None),
    ("vllm", {"max_active": 256, "token_budget": 4096}, 1, "least-queries", None),
    ("sarathi", {"max_active": 256, "token_budget": 512}, 40, "least-queries", None),
    ("sarathi", {"max_active": 256, "token_budget": 512}, 40, "deferred", None),
    ("sarathi", {"max_active": 256, "token_budget": 512}, 1, "least-queries", 32)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One schedule's medians."""

    name: str
    queries_per_s: float
    iterations_per_s: float
    steps_per_s: float
    rows: float  # of a step, mean
    tables_s: float
    rule_qps: float | None


def bare_rule_s(estimate: Estimate, outputs: np.ndarray, reserve: np.ndarray) -> float | None:
    """Seconds of RRA's rule alone over the same queries; None for other policies."""
    if estimate.policy != "rra":
        return None
    (rule,) = rules_for(estimate)
    began = time.perf_counter()
    for query, tokens in enumerate(reserve.tolist()):
        rule.submit(query, tokens)
    ends: dict[tuple[int, int], list[int]] = {}
    done: dict[int, int] = {}
    left = outputs.tolist()
    while (group := rule.next_group()) is not None:
        for query in ends.pop((group, done.get(group, 0)), ()):
            rule.finish(query)
        step = rule.decide()
        if step is None:
            continue
        if step.kind is StepKind.ENCODE:
            for query in step.joined:
                at = (group, done.get(group, 0) + left[query] - 1)
                ends.setdefault(at, []).append(query)
        else:
            done[group] = done.get(group, 0) + 1
    return time.perf_counter() - began


def measure(name: str, problem: Problem, count: int, runs: int) -> Row:
    timing = Roofline(problem.model, problem.cluster.device, problem.dtype)
    policy = name.partition(",")[0]
    values = dict.fromkeys(("decode_micro_batches", "encode_micro_batches", "token_budget"))
    found = fixed_estimate(policy, problem, timing, FixedSchedule(**{**values, **SCHEDULES[name]}))
    inputs, outputs = problem.lengths.sample(count, np.random.default_rng(0))
    replayer = Replayer(problem, timing, found)
    queries, warm = planned_queries(problem, inputs, outputs), []
    few = queries.take(np.arange(FEW))
    for _ in range(2):
        began = time.perf_counter()
        replayer.run(few)
        warm.append(time.perf_counter() - began)
    replayer.run(queries)
    seconds = []
    for _ in range(runs):
        began = time.perf_counter()
        result = replayer.run(queries)
        seconds.append(time.perf_counter() - began)
    took = statistics.median(seconds)
    iterations = sum(int(pool.decoded.sum() + pool.encoded.sum()) for pool in result.pools)
    steps = sum(len(pool.steps) for pool in result.pools)
    rule_s = bare_rule_s(found, outputs, inputs + problem.lengths.outputs.max)
    return Row(name=name, queries_per_s=count / took, iterations_per_s=iterations / took,
               steps_per_s=steps / took, rows=iterations / steps, tables_s=warm[0] - warm[1],
               rule_qps=count / rule_s if rule_s else None)


def served_qps(data: Path, count: int, runs: int) -> list[float]:
    """Requests/s of each row of SERVED."""
    trace, rng = read_trace(data / ARXIV), np.random.default_rng(0)
    problem = xgpt.load(SERVICE).problem
    problem = replace(problem, lengths=joint_empirical(np.stack(trace[:2], axis=1)))
    drawn, found = trace.lengths.take(rng.integers(len(trace.inputs), size=count)), []
    gaps_s = rng.exponential(size=count)
    for policy, settings, replicas, routing, clients in SERVED:
        own = replace(problem, adjustment=Adjustment(routing=routing))
        timing = Roofline(own.model, own.cluster.device, own.dtype)
        one = fixed_estimate(policy, own, timing, FixedSchedule(
            tp_degree=4, tp_gpus=4, **{"decode_micro_batches": None, **settings}))
        backlog = drawn.take(np.arange(FEW))
        alone = Replayer(own, timing, one).run(backlog).makespan_s / FEW
        service = ServiceReplayer(own, timing, one.in_copies(replicas))
        arrival_s, seconds = np.cumsum(gaps_s) * 2 * alone / replicas, list[float]()
        for _ in range(runs + 1):
            began = time.process_time()
            service.run(drawn, arrival_s, concurrency=clients, has_steps=False)
            seconds.append(time.process_time() - began)
        found.append(count / statistics.median(seconds[1:]))
    return found


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--queries", type=int, default=50_000)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--data", type=Path, default=DATA)
    arguments = parser.parse_args()
    problem = resolve(load_job(JOB))
    lines = [f"# Speed of the replay ({today()})", "",
             f"OPT-13B, a40-4, task S, {arguments.queries} queries, one core, medians of "
             f"{arguments.runs} runs. Wanted: {WANTED_QPS} requests/s, {WANTED_ITERATIONS} "
             "query-iterations/s.", "",
             *table(("schedule", "requests/s", "query-iterations/s", "steps/s", "rows a step",
                     "tables, once", "the rule alone, requests/s"))]
    figures = {}
    for name in SCHEDULES:
        row = measure(name, problem, arguments.queries, arguments.runs)
        figures[name] = row.queries_per_s
        rule = "" if row.rule_qps is None else f"{row.rule_qps:,.0f}"
        lines.append(f"| {row.name} | {row.queries_per_s:,.0f} | {row.iterations_per_s:,.0f} | "
                     f"{row.steps_per_s:,.0f} | {row.rows:.0f} | {row.tables_s * 1e3:.0f} ms | "
                     f"{rule} |")
    if (arguments.data / ARXIV).is_file():
        lines += ["", *table(("under arrivals", "replicas", "routing", "requests/s"))]
        for (policy, _, replicas, routing, clients), qps in zip(SERVED, served_qps(
                arguments.data, arguments.queries, arguments.runs), strict=True):
            name = f"{policy}, {replicas} x {routing}" + f", {clients} clients" * bool(clients)
            figures[name] = qps
            loop = f", {clients} clients" if clients else ""
            lines.append(f"| {policy}{loop} | {replicas} | {routing} | {qps:,.0f} |")
    lines += ["", f"{machine()}."]
    write("replay-speed", "\n".join(lines), arguments.out, figures)


if __name__ == "__main__":
    main()
