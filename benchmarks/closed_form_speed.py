"""Configurations a second that the closed forms evaluate, on one core.

    python benchmarks/closed_form_speed.py [--runs 5] [--policy rra] [--out benchmarks/results]

Every tensor plan of a cluster x batches x the policy's other control variables, timed by the
roofline and by a profile of its times at sizes and degrees as one measures them. "Cold": nothing is
known yet of the lengths or the plans, as at the beginning of a search; "warm": both are. Seconds
are the processor's, and of the quickest run, so that other work on the machine counts for little.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy loads: one core is what is asked for

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from xgpt.core import catalog
from xgpt.core.constraint import latency_constraint
from xgpt.core.job import FixedSchedule
from xgpt.core.policies import policy_names
from xgpt.core.problem import Problem
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
from xprofiler.timing import MessageKind, Operator, TimingSource
from xscheduler.tensor_plans import TensorPlan, tensor_plans
from xsimulator.allocation import pool_ranks
from xsimulator.policies import make_policy
from xsimulator.policies.continuous.config import ContinuousConfig
from xsimulator.policies.rra.config import RraConfigs
from xsimulator.policies.static.config import StaticConfig
from xsimulator.policies.waa.config import WaaConfig

QUERIES = tuple(2**k for k in range(10))
TOKENS = tuple(2**k for k in range(15))
CONTEXTS = tuple(64 * k for k in range(1, 17))
MESSAGES = tuple(4.0**k for k in range(6, 15))
AXES = {Operator.LAYER_REST: (TOKENS, (0,)), Operator.EMBED: (TOKENS, (0,)),
        Operator.HEAD: (QUERIES, (0,)), Operator.DECODE_ATTENTION: (QUERIES, CONTEXTS),
        Operator.ENCODE_ATTENTION: (CONTEXTS, (1, 4, 16)),
        Operator.KV_COMPACTION: (QUERIES, CONTEXTS)}


class Case(NamedTuple):
    """`batches`: encode batches, or most active queries."""

    policy: str
    model: str
    cluster: str
    task: str
    degrees: tuple[int, ...]
    batches: Sequence[int]
    every: int = 1  # of RRA's decode iterations


GROUPS = range(1, 9)  # decode micro-batches
_SMALL = ("opt-13b", "a40-4", "S", (1, 2, 4))
CASES = (
    Case("rra", *_SMALL, range(1, 129)),
    Case("rra", "gpt3-341b", "a40-48", "G", (1, 2, 4, 8), (1, 4, 16, 64), every=8),
    Case("waa-c", *_SMALL, range(1, 501)),
    Case("waa-m", *_SMALL, range(1, 501)),
    Case("ft", *_SMALL, range(1, 501)),
    Case("dsi", *_SMALL, range(1, 501, 2)),
    Case("orca", *_SMALL, range(2, 513)),
    Case("vllm", *_SMALL, range(2, 513, 16)),
    Case("sarathi", *_SMALL, range(2, 513, 16)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--policy", choices=policy_names())
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    date = time.strftime("%Y-%m-%d")
    lines = [f"# Speed of the closed forms ({date})", "",
             "| policy | model, cluster, task | source | configurations | cold /s | warm /s |",
             "|---|---|---|---|---|---|"]
    for case in CASES:
        if arguments.policy not in (None, case.policy):
            continue
        problem = problem_of(case)
        roofline = Roofline(problem.model, problem.cluster.device, problem.dtype)
        sources = {"roofline": roofline, "profile": profiled(problem, roofline, case.degrees)}
        for name, timing in sources.items():
            lines.append(row(case, problem, name, timing, arguments.runs))
    text = "\n".join([*lines, "", f"Quickest of {arguments.runs} runs each, one core of {cpu()}."])
    print(text)
    if arguments.out is not None:
        path = arguments.out / f"closed-form-speed-{date}.md"
        path.write_text(text + "\n", encoding="utf-8")


def row(case: Case, problem: Problem, name: str, timing: TimingSource, runs: int) -> str:
    configs = configs_of(case, problem)
    rates: dict[str, list[float]] = {"cold": [], "warm": []}
    for _ in range(runs):
        policy = make_policy(case.policy, problem, timing)
        for kind in rates:
            began = time.process_time()
            policy.evaluate(configs)
            rates[kind].append(len(configs) / (time.process_time() - began))
    cold, warm = (f"{float(f'{max(values):.2g}'):,.0f}" for values in rates.values())
    return (f"| {case.policy} | {case.model}, {case.cluster}, {case.task} | {name} "
            f"| {len(configs):,} | {cold} | {warm} |")


def problem_of(case: Case) -> Problem:
    return Problem(
        model=catalog.model(case.model),
        cluster=catalog.cluster(case.cluster),
        lengths=catalog.task(case.task),
        dtype="float16",
        num_queries=None,
        constraint=latency_constraint(latency_s=float("inf")),
        fixed=FixedSchedule(),
        default_max_tokens=1,
    )


def configs_of(case: Case, problem: Problem) -> Any:
    """Every plan x every batch x the policy's own variables."""
    plans = [plan for plan in tensor_plans(
        problem, Roofline(problem.model, problem.cluster.device, problem.dtype))
             if plan.tp_degree in case.degrees]
    if case.policy == "rra":
        return rra_configs(case, problem, plans)
    axes = [(batch, plan.tp_degree, plan.tp_gpus) for plan in plans for batch in case.batches]
    if case.policy in ("orca", "vllm", "sarathi"):
        return [ContinuousConfig(max_active=b, tp_degree=d, tp_gpus=n) for b, d, n in axes]
    if case.policy in ("ft", "dsi"):
        parts = (1, 2, 3) if case.policy == "dsi" else (None,)
        return [StaticConfig(encode_batch=b, decode_micro_batches=g, encode_parts=p, tp_degree=d,
                             tp_gpus=n) for b, d, n in axes for g in GROUPS for p in parts]
    divided = [plan for plan in plans if any(
        pool_ranks(problem.cluster, count, plan.tp_degree, plan.tp_gpus)
        for count in range(1, problem.cluster.num_devices))]
    return [WaaConfig(encode_batch=b, decode_micro_batches=g, tp_degree=p.tp_degree,
                      tp_gpus=p.tp_gpus) for p in divided for b in case.batches for g in GROUPS]


def rra_configs(case: Case, problem: Problem, plans: Sequence[TensorPlan]) -> RraConfigs:
    iterations = np.arange(1, problem.lengths.outputs.max, case.every)
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

    tables = {TableKey(STEP_OVERHEAD): (Sample(x=0.0, samples_s=(truth.facts.step_overhead_s,)),)}
    assert not problem.model.is_encoder_decoder, "has encoder layers"
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
                truth.message_s(MessageKind.ALL_REDUCE, messages, link, tp_degree=degree),
                                messages, none)
    for link in (problem.cluster.intra_link, problem.cluster.inter_link):
        tables[TableKey(TRANSFER, 1, link.name)] = points(
            truth.message_s(MessageKind.TRANSFER, messages, link), messages, none)
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
