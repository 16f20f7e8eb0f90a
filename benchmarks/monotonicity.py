"""The paper's Table 5: share of points that are not monotone, by control variable.

    python benchmarks/monotonicity.py [--models gpt3-39b] [--tasks S T] [--out benchmarks/results]

One variable is swept, with all combinations of the others, over everything that memory holds:

    RRA  encode_batch up, decode_iterations down, tp_gpus down, each with every tensor plan
    WAA  encode_batch up, tp_gpus down, decode_micro_batches down (B_m, their size, up), as many as
         the decode pool has stages at most; WAA-C and WAA-M together

tp_gpus ends at 0, tp_degree is kept. Batches and decode_iterations are 10 % apart, the others whole
numbers. In these directions the paper has latency and throughput rise. A point counts if it lies
below the largest before it by more than the tolerance: a share of the 70th-percentile bound for
latency, of the best throughput under that bound for throughput (the footnote of Table 5). Readings
besides: `neighbours`, below the one before it; `one division`, below the largest before it of those
whose devices are divided between WAA's pools alike. Closed forms, timed by the roofline with PCIe
as the catalog has the paper's nodes.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy loads

import argparse
import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from closed_form_speed import cpu
from monotone import Count, Reading, count, worst
from paper_scenarios import Scenario, bounds_of, largest_batches

from xgpt.core.lengths import FloatArray, IntArray
from xgpt.core.problem import Problem
from xprofiler.timing import TimingSource
from xscheduler.tensor_plans import all_tensor_plans
from xsimulator.allocation import pool_ranks
from xsimulator.policies import geometric, make_policy
from xsimulator.policies.rra.config import RraConfig, RraConfigs
from xsimulator.policies.waa.config import WaaConfig

CASES = (("t5-11b", "a40-8"), ("gpt3-39b", "a40-16"), ("gpt3-101b", "a100-16"))
TASKS = ("S", "T", "G", "C1", "C2")
TOLERANCES = (0.02, 0.05, 0.10)
VARIABLES = (("RRA", "B_E"), ("RRA", "N_D"), ("RRA", "TP"), ("WAA", "B_E"), ("WAA", "TP"),
             ("WAA", "B_m"))
# GPT-3 39B: task -> tolerance -> (latency, throughput) in percent; RRA's TP is not in the paper
PAPER: dict[str, dict[float, tuple[tuple[float, float] | None, ...]]] = {
    "S": {0.02: ((0.6, 2.3), (0.0, 0.0), None, (0.0, 0.0), (0.0, 0.0), (0.8, 0.0)),
          0.05: ((0.6, 0.3), (0.0, 0.0), None, (0.0, 0.0), (0.0, 0.0), (0.5, 0.0)),
          0.10: ((0.3, 0.0), (0.0, 0.0), None, (0.0, 0.0), (0.0, 0.0), (0.4, 0.0))},
    "T": {0.02: ((0.2, 0.1), (0.0, 0.0), None, (0.1, 0.0), (1.2, 0.0), (10.9, 0.0)),
          0.05: ((0.2, 0.0), (0.0, 0.0), None, (0.0, 0.0), (0.8, 0.0), (10.6, 0.0)),
          0.10: ((0.2, 0.0), (0.0, 0.0), None, (0.0, 0.0), (0.4, 0.0), (10.4, 0.0))}}


class Sweep(NamedTuple):
    """Figures over a box of control variables, NaN where memory does not hold a point. `axes`: of
    each variable's name, its place; all in the direction in which figures are meant to rise."""

    policy: str
    axes: dict[str, int]
    latency_s: FloatArray
    throughput_qps: FloatArray
    division: IntArray  # devices that encode; 0: RRA, or no point


def sweeps_of(problem: Problem, timing: TimingSource) -> list[Sweep]:
    """RRA and both kinds of WAA, one box for each tensor-parallel degree."""
    plans = all_tensor_plans(problem, timing)
    found = []
    for degree in sorted({degree for degree, _ in plans}):
        gpus = sorted((n for d, n in plans if d == degree), reverse=True)
        keys = [(degree, n) for n in gpus]
        if degree > 1 and (1, 0) in plans:
            keys.append((1, 0))  # the variable's other end: no groups
        found.append(_rra(problem, timing, keys))
        found += [sweep for name in ("waa-c", "waa-m")
                  if (sweep := _waa(name, problem, timing, keys)) is not None]
    return found


def _rra(problem: Problem, timing: TimingSource, keys: Sequence[tuple[int, int]]) -> Sweep:
    policy: Any = make_policy("rra", problem, timing)
    last = problem.lengths.outputs.max - (0 if problem.model.is_encoder_decoder else 1)
    iterations = geometric(last)[::-1]
    easiest = [RraConfig(encode_batch=1, decode_iterations=last, tp_degree=d, tp_gpus=n)
               for d, n in keys]
    batches = geometric(max(int(largest_batches(policy, easiest).max()), 1))
    key, n_d, batch = (axis.ravel() for axis in np.meshgrid(
        np.arange(len(keys)), np.array(iterations), np.array(batches), indexing="ij"))
    degree, gpus = (np.array([k[place] for k in keys])[key] for place in (0, 1))
    figures = policy.evaluate(RraConfigs(
        encode_batch=batch, decode_iterations=n_d, tp_degree=degree, tp_gpus=gpus,
        decode_micro_batches=np.zeros(len(key), np.int64)))
    return _sweep("RRA", {"TP": 0, "N_D": 1, "B_E": 2}, figures,
                  (len(keys), len(iterations), len(batches)))


def _waa(name: str, problem: Problem, timing: TimingSource,
         keys: Sequence[tuple[int, int]]) -> Sweep | None:
    policy: Any = make_policy(name, problem, timing)
    keys = [key for key in keys if policy.grid(1, [key])]  # both pools can be laid out
    if not keys:
        return None
    groups = range(problem.cluster.num_devices, 0, -1)
    easiest = [WaaConfig(encode_batch=1, decode_micro_batches=groups[0], tp_degree=d, tp_gpus=n)
               for d, n in keys]
    batches = geometric(max(int(largest_batches(policy, easiest).max()), 1))
    configs = [WaaConfig(encode_batch=batch, decode_micro_batches=group, tp_degree=d, tp_gpus=n)
               for d, n in keys for group in groups for batch in batches]
    figures = policy.evaluate(configs)
    division = np.zeros(len(configs), np.int64)
    for row, config in enumerate(configs):
        division[row] = policy.estimate(config).deployment.encoding.num_devices
    for row, config in enumerate(configs):
        ranks = pool_ranks(problem.cluster, int(division[row]), config.tp_degree, config.tp_gpus)
        if ranks is None or config.decode_micro_batches > len(ranks[1]):
            division[row] = 0
    return _sweep("WAA", {"TP": 0, "B_m": 1, "B_E": 2}, figures,
                  (len(keys), len(groups), len(batches)), division)


def _sweep(policy: str, axes: dict[str, int], figures: Any, shape: tuple[int, ...],
           division: IntArray | None = None) -> Sweep:
    is_point = figures.fits & np.isfinite(figures.latency_s)
    if division is not None:
        is_point &= division > 0
    latency, throughput = (np.where(is_point, values, np.nan).reshape(shape)
                           for values in (figures.latency_s, figures.throughput_qps))
    return Sweep(policy, axes, latency, throughput,
                 np.zeros(shape, np.int64) if division is None else division.reshape(shape))


class Cell(NamedTuple):
    """One variable at one tolerance: points that are not monotone in latency, in throughput."""

    latency: Count
    throughput: Count


def cells(sweeps: Sequence[Sweep], bound_s: float, tolerance: float,
          reading: Reading = "extreme", *, is_divided: bool = False) -> list[Cell]:
    """[VARIABLES]. `is_divided`: points are compared with those of the same division alone."""
    found = []
    for policy, variable in VARIABLES:
        own = [sweep for sweep in sweeps if sweep.policy == policy]
        achieved = max((float(np.max(s.throughput_qps, initial=0.0, where=s.latency_s <= bound_s))
                        for s in own), default=0.0)
        latency = throughput = Count(0, 0)
        for sweep in own:
            axis = sweep.axes[variable]
            if sweep.latency_s.shape[axis] < 2:
                continue
            for part in np.unique(sweep.division) if is_divided else [None]:
                seen = True if part is None else sweep.division == part
                latency, throughput = (
                    _plus(total, count(np.where(seen, values, np.nan), axis, most, reading))
                    for total, values, most in (
                        (latency, sweep.latency_s, tolerance * bound_s),
                        (throughput, sweep.throughput_qps, tolerance * achieved)))
        found.append(Cell(latency, throughput))
    return found


def _plus(one: Count, other: Count) -> Count:
    return Count(one.not_monotone + other.not_monotone, one.points + other.points)


def worst_falls(sweeps: Sequence[Sweep]) -> list[tuple[float, float]]:
    """[VARIABLES] largest falls below the largest before, as shares: (latency, throughput)."""
    found = []
    for policy, variable in VARIABLES:
        own = [sweep for sweep in sweeps if sweep.policy == policy]
        found.append((max((worst(s.latency_s, s.axes[variable]) for s in own), default=0.0),
                      max((worst(s.throughput_qps, s.axes[variable]) for s in own), default=0.0)))
    return found


def table(name: str, sweeps: Sequence[Sweep], bound_s: float,
          paper: dict[float, Any] | None) -> list[str]:
    """Rows of one model and task."""
    lines = []
    for tolerance in TOLERANCES:
        for words, reading, is_divided in READINGS:
            row = cells(sweeps, bound_s, tolerance, reading, is_divided=is_divided)
            lines.append(f"| {name} | {tolerance:.0%} | {words} | " + " | ".join(
                f"({cell.latency.share:.1%}, {cell.throughput.share:.1%})" for cell in row) + " |")
        if paper is not None:
            lines.append(f"| {name} | {tolerance:.0%} | the paper | " + " | ".join(
                "" if cell is None else f"({cell[0]}%, {cell[1]}%)" for cell in paper[tolerance])
                + " |")
    points = [cell.latency.points for cell in cells(sweeps, bound_s, 0.0)]
    falls = " | ".join(f"({a:.0%}, {b:.0%})" for a, b in worst_falls(sweeps))
    lines.append(f"| {name} | | points | " + " | ".join(f"{n:,}" for n in points) + " |")
    return [*lines, f"| {name} | | deepest fall | {falls} |"]


READINGS: tuple[tuple[str, Reading, bool], ...] = (
    ("extreme", "extreme", False), ("neighbours", "neighbour", False),
    ("one division", "extreme", True))
EXPLANATION = ("""Beside the paper's figures:

- *RRA* is about as monotone as in the paper. What is left are falls of latency at small encode
  batches, up to a few times the stages: the query that a bound is about is there for certain, and
  the closed form makes too much of steps that it takes nearly alone. Replays of the deepest fall
  (GPT-3 101B and T, encode batches of 1 to 10) rise throughout; the closed form is 14 % above them
  at a batch of 1, 1 % at 4.
- *RRA's tp_gpus*, which the paper leaves out, is not monotone in throughput: more groups raise it
  wherever reading weights takes longer than the all-reduces.
- *WAA's encode_batch* is monotone, as in the paper, while the devices are divided alike. Where
  another batch moves a device from one pool to the other, throughput and latency leap; nearly all
  that is counted is that.
- *WAA's tp_gpus and B_m*: latency is much as in the paper, few points, and more for B_m with task
  T. Throughput goes the other way: the decode batch is one encode batch for each output token,
  whatever tp_gpus and B_m, and by Little's law the same batch in less time a token is more
  throughput. Only where the encode pool sets the pace does it stay. The paper has both rise
  together, which its own size of the decode batch does not allow in a decode-bound pipeline.
- *Micro-batches beyond the stages* are left out: they lengthen an iteration and bring nothing. With
  up to as many as devices, B_m's latency falls at four points of five (GPT-3 39B).""",)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=[model for model, _ in CASES])
    parser.add_argument("--tasks", nargs="*", default=list(TASKS))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    lines = ["# Points that are not monotone (latency, throughput)", "",
             "| model, task | tolerance | reading | "
             + " | ".join(f"{policy} {name}" for policy, name in VARIABLES) + " |",
             "|---|---|---|" + "---|" * len(VARIABLES)]
    for model, cluster in CASES:
        for task in TASKS:
            if model not in arguments.models or task not in arguments.tasks:
                continue
            scenario = Scenario(model=model, cluster=cluster, task=task, has_peer_access=True)
            problem, timing = scenario.problem(), scenario.timing()
            paper = PAPER.get(task) if model == "gpt3-39b" else None
            rows = table(f"{model}, {task}", sweeps_of(problem, timing),
                         bounds_of(problem, timing)[2], paper)
            print("\n".join(rows), flush=True)
            lines += rows
    lines += ["", *EXPLANATION, "", f"One thread of {cpu()}, {datetime.date.today()}."]
    text = "\n".join(lines)
    print("\n".join(EXPLANATION))
    if arguments.out is not None:
        path = arguments.out / f"monotonicity-{datetime.date.today()}.md"
        path.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
