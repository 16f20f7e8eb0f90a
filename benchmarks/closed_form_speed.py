"""Configurations a second that RRA's closed form evaluates, on one core.

    python benchmarks/closed_form_speed.py [--runs 5] [--out benchmarks/results]

Every tensor plan of a cluster x decode iterations x encode batches, timed by the roofline and by a
profile of its times at sizes and degrees as one measures them. "Cold": nothing is known yet of the
lengths or the plans, as at the beginning of a search; "warm": both are.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy loads: one core is what is asked for

import argparse
import statistics
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from xgpt import catalog
from xgpt.job import Constraint, FixedSchedule
from xgpt.problem import Problem
from xprofiler.profile import (
    ALL_REDUCE,
    STEP_OVERHEAD,
    TRANSFER,
    Profile,
    ProfileMetadata,
    Sample,
    TableKey,
)
from xprofiler.profile_timing import ProfileTiming
from xprofiler.roofline import Roofline
from xprofiler.timing import ENCODER_DECODER_ONLY, Operator, TimingSource
from xscheduler.space import tensor_plans
from xsimulator.policies.rra import Rra, RraConfigs

QUERIES = tuple(2**k for k in range(10))
TOKENS = tuple(2**k for k in range(15))
CONTEXTS = tuple(64 * k for k in range(1, 17))
MESSAGES = tuple(4.0**k for k in range(6, 15))
AXES = {Operator.LAYER_REST: (TOKENS, (0,)), Operator.EMBED: (TOKENS, (0,)),
        Operator.HEAD: (QUERIES, (0,)), Operator.DECODE_ATTENTION: (QUERIES, CONTEXTS),
        Operator.ENCODE_ATTENTION: (CONTEXTS, (1, 4, 16)),
        Operator.KV_COMPACTION: (QUERIES, CONTEXTS)}


class Case(NamedTuple):
    model: str
    cluster: str
    task: str
    degrees: tuple[int, ...]
    batches: tuple[int, ...]


CASES = (Case("opt-13b", "a40-4", "S", (1, 2, 4), tuple(range(1, 129))),
         Case("gpt3-341b", "a40-48", "G", (1, 2, 4, 8), (1, 2, 4, 8, 16, 32, 64, 128)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    lines = ["| model, cluster, task | stages | source | configurations | cold /s | warm /s |",
             "|---|---|---|---|---|---|"]
    for case in CASES:
        problem = problem_of(case)
        roofline = Roofline(problem.model, problem.cluster.device, problem.dtype)
        sources = {"roofline": roofline, "profile": profiled(problem, roofline, case.degrees)}
        for name, timing in sources.items():
            lines.append(row(case, problem, name, timing, arguments.runs))
    text = "\n".join([*lines, "", f"Median of {arguments.runs} runs, one core of {cpu()}."])
    print(text)
    if arguments.out is not None:
        path = arguments.out / f"closed-form-speed-{time.strftime('%Y-%m-%d')}.md"
        path.write_text(text + "\n", encoding="utf-8")


def row(case: Case, problem: Problem, name: str, timing: TimingSource, runs: int) -> str:
    configs = grid(case, problem)
    rates: dict[str, list[float]] = {"cold": [], "warm": []}
    for _ in range(runs):
        rra = Rra(problem, timing, padded=timing.is_padded)
        for kind in rates:
            began = time.perf_counter()
            rra.evaluate(configs)
            rates[kind].append(len(configs) / (time.perf_counter() - began))
    cold, warm = (f"{round(statistics.median(values), -3):,.0f}" for values in rates.values())
    return (f"| {case.model}, {case.cluster}, {case.task} | up to {problem.cluster.num_devices} "
            f"| {name} | {len(configs):,} | {cold} | {warm} |")


def problem_of(case: Case) -> Problem:
    return Problem(
        model=catalog.model(case.model), cluster=catalog.cluster(case.cluster),
        lengths=catalog.task(case.task), dtype="float16", num_queries=None,
        constraint=Constraint(latency_s=float("inf")), fixed=FixedSchedule(), default_max_tokens=1)


def grid(case: Case, problem: Problem) -> RraConfigs:
    """Every plan x every N_D x the batches."""
    plans = tensor_plans(problem.model, problem.cluster, problem.fixed)
    plans = [plan for plan in plans if plan.tp_degree in case.degrees]
    iterations = np.arange(1, problem.lengths.outputs.max)
    plan, n_d, batch = (axis.ravel() for axis in np.meshgrid(
        np.arange(len(plans)), iterations, np.array(case.batches), indexing="ij"))
    degree, gpus = (np.array([getattr(p, name) for p in plans])[plan]
                    for name in ("tp_degree", "tp_gpus"))
    return RraConfigs(encode_batch=batch, decode_iterations=n_d, tp_degree=degree, tp_gpus=gpus,
                      decode_micro_batches=np.zeros(len(plan), np.int64))


def profiled(problem: Problem, truth: Roofline, degrees: tuple[int, ...]) -> ProfileTiming:
    """The roofline's times as if they had been measured, at 10 to 160 points a table."""
    def points(seconds: np.ndarray, xs: np.ndarray, ys: np.ndarray) -> tuple[Sample, ...]:
        return tuple(Sample(x=float(x), y=float(y), samples_s=(float(s),))
                     for x, y, s in zip(xs, ys, seconds, strict=True))

    tables = {TableKey(STEP_OVERHEAD): (Sample(x=0.0, samples_s=(truth.step_overhead_s(),)),)}
    assert not problem.model.is_encoder_decoder, f"needs {ENCODER_DECODER_ONLY}"
    messages, none = np.array(MESSAGES), np.zeros(len(MESSAGES))
    for degree in degrees:
        for operator, (along_x, along_y) in AXES.items():
            x, y = (a.ravel() for a in np.meshgrid(np.array(along_x, float),
                                                   np.array(along_y, float)))
            tables[TableKey(operator.value, degree)] = points(
                truth.operator_s(operator, x, y, tp_degree=degree), x, y)
        if degree > 1:
            link = problem.cluster.intra_link
            tables[TableKey(ALL_REDUCE, degree, link.name)] = points(
                truth.all_reduce_s(messages, degree, link), messages, none)
    for link in (problem.cluster.intra_link, problem.cluster.inter_link):
        tables[TableKey(TRANSFER, 1, link.name)] = points(
            truth.transfer_s(messages, link), messages, none)
    metadata = ProfileMetadata(
        model=problem.model.name, model_shape="", device=problem.cluster.device.name,
        dtype=problem.dtype, ranks=problem.cluster.num_devices, threads_per_rank=1, kernels="",
        libraries="", is_padded=False)
    return ProfileTiming(Profile(metadata=metadata, tables=tables), fallback=truth)


def cpu() -> str:
    try:
        names = [line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text(
            encoding="utf-8").splitlines() if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else "an unnamed processor"


if __name__ == "__main__":
    main()
