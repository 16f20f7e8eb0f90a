"""The closed forms against the replay, over random problems of the paper's models and tasks.

    python benchmarks/closed_form_accuracy.py [--problems 360] [--seed 0] [--out benchmarks/results]
        [--policy "rra in chunks" --policy sarathi] [--rows FILE [--so-far]]

A problem is a model on its cluster, a task, a policy, a layout and control variables, all drawn at
random (batch sizes log-uniform, among those that fit memory), a kind of latency bound, and whether
attention is padded. The closed form's throughput and latency are compared with the steady state of
one replay of random queries. Errors are |closed form / replay - 1|. Times come from the analytic
roofline: what is compared here is arithmetic, not timing.

A replay is of ROUNDS times the queries in the system, and of 3,000 at least; where these would take
more than MOST_STEPS steps of a stage, of as many as take so many, and of 1,000 at least: a long
pipeline that decodes a handful of queries takes a million of steps for a second's worth of others'.
`--rows` keeps each outcome as it comes: the same command goes on with those that are missing, in an
order that is random too. `--so-far` writes the page of those that are there.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing import Pool
from pathlib import Path

import numpy as np

from xgpt.core import catalog
from xgpt.core.constraint import latency_constraint
from xgpt.core.errors import InputError
from xgpt.core.job import FixedSchedule
from xgpt.core.policies import policy_names
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate
from xprofiler.roofline import Roofline
from xsimulator.policies import make_config, make_policy
from xsimulator.replay.job import planned_queries, replay_job
from xsimulator.replay.predict import with_watched
from xsimulator.replay.steady import steady_figures

# The paper's models on its clusters (its Table 2).
CLUSTERS = {"t5-11b": "a40-8", "opt-13b": "a40-4", "gpt3-39b": "a40-16", "gpt3-101b": "a100-16",
            "gpt3-175b": "a40-32", "gpt3-341b": "a40-48"}
TASKS = ("S", "T", "G", "C1", "C2")
QUANTILE = 0.95  # of the bound: enough queries beyond it for a steady figure
MOST_QUERIES = 24_000
# with an encode_chunk: decoder-only models alone
CHUNKED = {"rra in chunks": "rra", "waa in chunks": "waa-m"}
KINDS = (*policy_names(), *CHUNKED)
ROUNDS = 14  # queries replayed over queries in the system
USUAL_QUERIES, LEAST_QUERIES = 3000, 1000
MOST_STEPS = 500_000  # of stages, in a replay of more than the least queries
DRAWS = 60  # of control variables, until one fits memory
Task = tuple[int, str, str, str]  # seed, policy, model, lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One problem's outcome."""

    policy: str
    words: str
    reason: str  # where it is known to be inexact
    throughput: float  # closed form / replay
    latency: float
    queries: int  # in the replay's steady state


def problem_of(rng: np.random.Generator, model: str, task: str) -> Problem:
    joint = catalog.task(task)
    kind = ("sequence", "queries")[rng.integers(2)]
    return Problem(
        model=catalog.model(model), cluster=catalog.cluster(CLUSTERS[model]), lengths=joint,
        dtype="float16", num_queries=None, fixed=FixedSchedule(),
        constraint=latency_constraint(latency_s=math.inf, kind=kind, quantile=QUANTILE),  # type: ignore[arg-type]
        default_max_tokens=joint.outputs.max)


def controls_of(rng: np.random.Generator, problem: Problem, kind: str) -> FixedSchedule:
    """Control variables of all policies, drawn at random."""
    devices = problem.cluster.num_devices
    degree = int(rng.choice([d for d in (1, 2, 4, 8) if d <= devices]))
    groups = int(rng.choice([1, 2, 3, 4, 8, devices]))

    def log_uniform(low: float, high: float) -> int:
        return int(np.exp(rng.uniform(np.log(low), np.log(high))))

    drawn = FixedSchedule(
        encode_batch=log_uniform(1, 400), decode_iterations=log_uniform(1, 200),
        decode_micro_batches=groups, encode_micro_batches=groups * int(rng.integers(1, 4)),
        max_active=log_uniform(4, 2000), token_budget=log_uniform(1100, 8000), tp_degree=degree,
        tp_gpus=0 if degree == 1 else degree * int(rng.integers(1, devices // degree + 1)))
    return replace(drawn, encode_chunk=log_uniform(32, 4096)) if kind in CHUNKED else drawn


def draw(rng: np.random.Generator, kind: str, model: str,
         task: str) -> tuple[Problem, bool, Estimate] | None:
    """A problem with an estimate that fits; None where none of the draws does."""
    problem, padded = problem_of(rng, model, task), bool(rng.integers(2))
    if kind in CHUNKED and problem.model.is_encoder_decoder:
        return None
    policy = CHUNKED.get(kind, kind)
    made = make_policy(policy, problem, roofline_of(problem, padded))
    for _ in range(DRAWS):
        config, missing = make_config(policy, controls_of(rng, problem, kind))
        assert not missing, f"{policy}: {missing}"
        try:
            found: Estimate = made.estimate(config)
        except InputError:
            continue  # a layout that the model or the cluster refuses
        if found.figures.fits:
            return problem, padded, found
    return None


def roofline_of(problem: Problem, padded: bool) -> Roofline:
    """The roofline, with decode attention as of kernels that read padded caches if `padded`."""
    roofline = Roofline(problem.model, problem.cluster.device, problem.dtype)
    roofline.facts = replace(roofline.facts, is_padded=padded)
    return roofline


def compare(task: Task) -> Row | None:
    """One random problem of (seed, policy, model, task)."""
    seed, policy, model, name = task
    rng = np.random.default_rng([seed, *map(ord, policy + model + name)])
    # where nothing drawn fits memory (WAA's two copies of a large model), the next model is taken
    models = list(CLUSTERS)
    first = models.index(model)
    for model in models[first:] + models[:first]:
        if (drawn := draw(rng, policy, model, name)) is not None:
            break
    else:
        return None
    problem, padded, found = drawn
    count = queries_of(problem, found)
    inputs, outputs = problem.lengths.sample(count, rng)
    if count < USUAL_QUERIES and problem.constraint.kind == "sequence":
        outputs = with_watched(outputs, problem.lengths.outputs.quantile(QUANTILE))
    result = replay_job(problem, roofline_of(problem, padded), found,
                        planned_queries(problem, inputs, outputs))
    steady = steady_figures(result, problem.constraint, problem.lengths.outputs)
    if steady is None:
        return None
    parallel = (
        f" TP {found.deployment.tp_degree} on {found.deployment.tp_gpus}"
        if found.deployment.tp_degree > 1
        else ""
    )
    words = (
        f"{model} {name}{parallel} B_E {found.figures.encode_batch} "
        f"N_D {found.figures.decode_iterations} "
        f"G {found.deployment.num_groups} "
        f"chunk {found.variables.get('encode_chunk')} "
        f"max {found.variables.get('max_active')} budget {found.variables.get('token_budget')} "
        f"B_D {found.figures.decode_batch:.0f} {problem.constraint.kind} "
        f"{'padded' if padded else 'own'} preempted {result.preemptions}"
    )
    return Row(policy=policy, words=words, queries=steady.queries, reason=reason_of(problem, found),
               throughput=found.figures.throughput_qps / steady.throughput_qps,
               latency=found.figures.latency_s / steady.latency_s)


def queries_of(problem: Problem, found: Estimate) -> int:
    """Queries replayed: see the module's docstring."""
    figures, stages = found.figures, len(found.deployment.stages)
    present = max(found.most_in_system, found.variables.get("max_active") or 0)
    usual = int(min(max(ROUNDS * present, USUAL_QUERIES), MOST_QUERIES))
    steps = stages * found.deployment.num_groups * max(  # that a query brings
        problem.lengths.outputs.mean / max(figures.decode_batch, 1.0),
        figures.decode_iterations / max(figures.encode_batch, 1e-9))
    least = max(LEAST_QUERIES, int(ROUNDS * present))
    return min(usual, max(least, int(MOST_STEPS / steps)))


def reason_of(problem: Problem, found: Estimate) -> str:
    """Why this estimate may be off, where a reason is known."""
    groups, stages = found.deployment.num_groups, len(found.deployment.stages)
    if found.policy == "rra" and found.figures.encode_batch < groups:
        return "fewer queries encoded than groups: which of them encode decides who waits for whom"
    fewer = 0 if problem.model.is_encoder_decoder else 1
    length = problem.lengths.outputs.quantile(problem.constraint.quantile) - fewer
    if found.policy == "rra" and min(length % found.figures.decode_iterations,
                                     -length % found.figures.decode_iterations) <= 0.05 * length:
        return "the quantile's length is at a phase's end: the latency leaps by a period there"
    most = found.variables.get("max_active") or 0
    if most and stages >= 8 and found.figures.decode_batch / groups < 60:
        return "few queries a group on a long pipeline: a short sequence of steps stands for all"
    if most and found.figures.decode_batch < 0.98 * most:
        return "memory binds: evictions and admissions interact"
    return ""


def tasks_of(count: int, seed: int) -> list[Task]:
    """At least `count` problems, the same number of each policy, models and tasks in turn."""
    cases = [(model, task) for model in CLUSTERS for task in TASKS]
    each = -(-count // len(KINDS))
    return [(seed + i, policy, *cases[(i * 7 + 3 * place) % len(cases)])
            for place, policy in enumerate(KINDS) for i in range(each)]


def compared(tasks: Sequence[Task], processes: int, kept: Path | None, *,
             so_far: bool = False) -> list[Row | None]:
    """Outcomes of all tasks, in no order; those that the file has are taken from there. `so_far`:
    of these alone."""
    known: dict[Task, Row | None] = {}
    if kept is not None and kept.is_file():
        for line in kept.read_text(encoding="utf-8").splitlines():
            task, row = json.loads(line)
            known[tuple(task)] = None if row is None else Row(**row)
    left = [task for task in tasks if task not in known]
    if so_far:
        return [known[task] for task in tasks if task in known]
    random.Random(0).shuffle(left)
    with Pool(processes) as pool:
        for task, row in pool.imap_unordered(_with_task, left, chunksize=1):
            known[task] = row
            if kept is not None:
                with kept.open("a", encoding="utf-8") as file:
                    file.write(json.dumps([task, None if row is None else asdict(row)]) + "\n")
    return [known[task] for task in tasks]


def _with_task(task: Task) -> tuple[Task, Row | None]:
    return task, compare(task)


def error_cells(errors: np.ndarray) -> str:
    return (f"{np.median(errors):.1%} | {np.quantile(errors, 0.95):.1%} | {errors.max():.1%}"
            if len(errors) else "- | - | -")


def report(rows: Sequence[Row], skipped: int, seconds: float) -> str:
    lines = [f"# Closed forms against the replay ({datetime.date.today()})", "",
             f"{len(rows)} random problems ({skipped} more where nothing drawn fits memory), "
             f"{seconds:.0f} s. Errors: |closed form / replay - 1|, median, 95th percentile, "
             "worst.", "",
             "| policy | problems | throughput median | p95 | worst | latency median | p95 | "
             "worst |", "|---|---|---|---|---|---|---|---|"]
    of_table = [(kind, [row for row in rows if kind in (row.policy, "all")])
                for kind in (*KINDS, "all")]
    for policy, own in of_table:
        throughput = np.abs(np.array([row.throughput for row in own]) - 1)
        latency = np.abs(np.array([row.latency for row in own]) - 1)
        latency = latency[np.isfinite(latency)]
        if not own:
            continue
        lines.append(f"| {policy} | {len(own)} | {error_cells(throughput)} | "
                     f"{error_cells(latency)} |")
    lines += ["", "Beyond 8 % in throughput or 12 % in latency (closed form / replay):", "",
              "| policy | throughput | latency | steady queries | problem | known reason |",
              "|---|---|---|---|---|---|"]
    for row in sorted(rows, key=lambda r: -abs(r.throughput - 1)):
        if abs(row.throughput - 1) > 0.08 or abs(row.latency - 1) > 0.12:
            lines.append(f"| {row.policy} | {row.throughput:.3f} | {row.latency:.3f} | "
                         f"{row.queries} | {row.words} | {row.reason} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problems", type=int, default=360)
    parser.add_argument("--policy", choices=KINDS, action="append", help="may be repeated")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rows", type=Path, metavar="FILE")
    parser.add_argument("--so-far", action="store_true", help="of --rows, and no more")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    began = time.monotonic()
    tasks = [task for task in tasks_of(options.problems, options.seed)
             if not options.policy or task[1] in options.policy]
    found = compared(tasks, options.processes, options.rows, so_far=options.so_far)
    rows = sorted((row for row in found if row is not None), key=lambda r: (r.policy, r.words))
    text = report(rows, len(found) - len(rows), time.monotonic() - began)
    print(text)
    if options.out:
        name = f"closed-form-{datetime.date.today()}.md"
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / name).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
