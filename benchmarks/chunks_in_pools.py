"""What could WAA bring whose decode pool takes chunks of inputs when its encode pool is behind?

    python benchmarks/chunks_in_pools.py [--only 8b ...] [--out benchmarks/results]

Such a policy is not built. This says how much it could bring at most, over what is chosen today
(`policy: auto`, no margin), for problems of hand_problems.py up to 32 GPUs: for every number of
copies, tensor plan and division of the devices, the highest rate, over a grid, of

    lambda = min(n / (E[D] T), lambda_E + G c / (E[L] T)),    T = T_iter(n, c, G)

over n queries that decode, c tokens of a chunk in each of G groups' steps. lambda_E: the most that
the encode pool sends by itself, at its best batch within the bound; E[D], E[L]: iterations and
input tokens of a query; T: the longer of G slowest stages and of all stages in turn, for rows of n
/ G queries and c tokens that share the linear layers. Kept are the memory of the decode pool, as
WAA reserves it, and D T <= bound for the D iterations of the bound's query. Left out is all that
would make it less: a query's encoding and handover in its latency, uneven batches, steps that
differ. What chunks bring is what they have over both what is chosen and what the same formula has
without them, which is as generous.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import datetime
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
from closed_form_speed import cpu
from hand_problems import SCENARIOS, HandScenario

from xgpt.core.errors import InfeasibleError, InputError
from xgpt.core.lengths import FloatArray
from xgpt.core.problem import Problem
from xprofiler.roofline import Roofline
from xscheduler.copies import has_room, problems_of_copies
from xscheduler.planner import PlanOptions, plan
from xscheduler.spaces.tensor_plans import all_tensor_plans
from xsimulator.policies import make_policy
from xsimulator.policies.waa.closed_form import Waa
from xsimulator.policies.waa.config import WaaConfigs
from xsimulator.policies.waa.plans import WaaPlan

MOST_GPUS = 32
CHUNKS = np.array([0.0, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096])
BATCHES = np.unique(np.rint(2.0 ** np.arange(0, 9, 0.5)))  # of the encode pool
DECODING = np.unique(np.rint(2.0 ** np.arange(0, 15, 0.25)))
TOGETHER = np.array([1.0, 2, 4, 8, 16, 32])  # inputs whose attention is timed together


class Pools(NamedTuple):
    """The best rate of a division: queries a second without and with chunks."""

    without_qps: float
    with_qps: float
    words: str


def best_of_pools(problem: Problem, timing: Roofline) -> Pools:
    """Over every number of copies, tensor plan and division."""
    found = [Pools(0.0, 0.0, "-")]
    for part in (parts[0] for parts in problems_of_copies(problem)):
        if part.cluster.num_devices > 1 and has_room(part):
            found += _divisions(part, timing)
    most = max(found, key=lambda one: one.with_qps)
    return most._replace(without_qps=max(one.without_qps for one in found))


def _divisions(problem: Problem, timing: Roofline) -> Iterator[Pools]:
    waa = cast(Waa, make_policy("waa-m", problem, timing))
    for degree, gpus in all_tensor_plans(problem, timing):
        try:
            split = waa.split(degree, gpus)
        except InputError:
            continue
        for count in split.encode_devices.tolist():
            without, most = _rates(waa, split.plan(count))
            yield Pools(problem.copies * without, problem.copies * most,
                        f"{problem.copies} x {count} of {problem.cluster.num_devices} encode, "
                        f"tp {degree}")


def _rates(waa: Waa, pools: WaaPlan) -> tuple[float, float]:
    """The best rate of one division, without chunks and with them."""
    problem, bound_s = waa.problem, waa.problem.constraint.latency_s
    encode = waa.times.encode(pools, BATCHES)
    is_kept = encode.through <= bound_s
    encode_qps = float((BATCHES / encode.between)[is_kept].max(initial=0.0))
    stages, iterations = len(pools.decode.stages), waa.times.mean_iterations
    ones = np.ones(len(DECODING))
    fits = waa.memory.fullest(pools, WaaConfigs(batch=ones, groups=ones * stages),
                              DECODING) <= waa.capacity_bytes
    groups = np.unique(np.minimum(2 ** np.arange(8), 2 * stages)).astype(float)
    n, c, g = (one.ravel() for one in np.meshgrid(DECODING[fits], CHUNKS, groups, indexing="ij"))
    if not len(n):
        return 0.0, 0.0
    every_s = _iteration_s(waa, pools, n, c, g)
    watched = waa.flow.iterations_of(problem.lengths.outputs.quantile(problem.constraint.quantile))
    encoded = encode_qps + g * c / problem.lengths.inputs.mean / every_s
    rate = np.where(watched * every_s <= bound_s, np.minimum(
        n / (iterations * every_s), encoded), 0.0)
    return float(rate[c == 0].max()), float(rate.max())


def _iteration_s(waa: Waa, pools: WaaPlan, decoding: FloatArray, chunk: FloatArray,
                 groups: FloatArray) -> FloatArray:
    """[points] T_iter; an input's attention is charged at its cheapest."""
    plan, mean = pools.decode, waa.problem.lengths.inputs.mean
    rows = np.maximum(decoding / groups, 1.0)
    attention = {degree: chunk / mean * float(own.min()) for degree, own in
                 plan.times.mean_attention_s(TOGETHER).items()}
    context = waa.flow.charged_context(rows, padded=waa.timing.facts.is_padded)
    kinds = np.stack(plan.steps.mixed_s(chunk, chunk / mean, attention, rows, context))
    number = np.bincount(plan.steps.kind_of)[:, None]
    return np.asarray(np.maximum(np.minimum(groups, decoding) * kinds.max(axis=0),
                                 (number * kinds).sum(axis=0)))


def row_of(one: HandScenario, bound_s: float) -> tuple[str, float]:
    """A line of the table, and the most that chunks in decode pools could bring."""
    problem, timing = one.problem(bound_s), one.timing()
    pools, bound = best_of_pools(problem, timing), "none" if math.isinf(bound_s) else f"{bound_s:g}"
    try:
        found = plan(problem, timing, PlanOptions(has_margin=False, horizon="steady",
                                                  is_brief=True))
    except InfeasibleError:
        return f"| {one.name} | {bound} | - | - | {pools.with_qps:.4g} | - | {pools.words} |", 0.0
    qps = found.figures.throughput_qps
    gain = pools.with_qps / max(qps, pools.without_qps) - 1
    return (f"| {one.name} | {bound} | {found.estimate.policy} | {qps:.4g} | "
            f"{pools.without_qps:.4g} | {pools.with_qps:.4g} | {max(gain, 0.0):.1%} | "
            f"{pools.words} |"), gain


def page(rows: Sequence[tuple[str, float]]) -> list[str]:
    gains = np.array([gain for _, gain in rows])
    return ["# Chunks in WAA's decode pools: what they could bring at most", "",
            *(__doc__ or "").split("\n\n", 2)[2].strip().splitlines(), "",
            f"In {int((gains <= 0).sum())} of {len(rows)} problems chunks in pools bring nothing, "
            f"in {int((gains > 0.05).sum())} perhaps more than 5 %, at most "
            f"{max(gains.max(), 0.0):.1%}.", "",
            "| problem | bound s | chosen | queries/s | without chunks, at most | with them | "
            "could bring | pools |", f"|{'---|' * 8}", *(line for line, _ in rows), "",
            f"{cpu()}, {datetime.date.today()}."]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = []
    for one in SCENARIOS:
        if one.nodes * one.per_node in range(2, MOST_GPUS + 1) and (
                not arguments.only or any(part in one.name for part in arguments.only)):
            for bound_s in one.bounds():
                rows.append(row_of(one, bound_s))
                print(rows[-1][0], flush=True)
    text = "\n".join(page(rows))
    print(text)
    if arguments.out is not None:
        path = arguments.out / f"chunks-in-pools-{datetime.date.today()}.md"
        path.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
