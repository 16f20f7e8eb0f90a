"""Rough figures of many configurations, and the Estimate of one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from xgpt.core.controls import Controls, FixedSchedule
from xgpt.core.deployment import Deployment
from xgpt.core.lengths import FloatArray, IntArray
from xgpt.core.policies import policy
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate, Figures
from xprofiler.timing import TimingSource
from xsimulator import memory
from xsimulator.measured_range import LargestSizes, beyond_measured

EXTRAPOLATED = "extrapolated: "  # begins a note on sizes beyond those measured


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoughFigures:
    """Figures [configs] within about 15 % of a replay's, to order candidates by.

    decode_batch: requests active at the first decode iteration after an encoding. present: requests
    in the system, from the start of their encoding to their last token. Seconds are infinite for
    sizes without known times."""

    throughput_qps: FloatArray
    latency_s: FloatArray
    ttft_s: FloatArray
    encode_s: FloatArray
    iteration_s: FloatArray
    period_s: FloatArray
    decode_batch: FloatArray
    present: FloatArray
    kv_tokens: FloatArray
    memory_bytes: FloatArray

    @classmethod
    def from_columns(cls, throughput_qps: FloatArray,
                     **seconds_and_sizes: FloatArray) -> RoughFigures:
        """The figures, with throughput 0 and infinite seconds where times are unknown."""
        is_timed = np.isfinite(seconds_and_sizes["latency_s"])
        return cls(throughput_qps=np.where(is_timed, throughput_qps, 0.0), **{
            name: np.where(np.isnan(values), np.inf, values)
            for name, values in seconds_and_sizes.items()})

    def of(self, row: int) -> dict[str, float]:
        """{name: figure} of the configuration with index `row`."""
        return {name: float(getattr(self, name)[row]) for name in self.__slots__}


class Formula(Protocol):
    """The rough formula of one policy on the devices of one problem. A point has one value for each
    of the policy's control variables, in the order of its row. A plan is (tp_degree, tp_gpus)."""

    problem: Problem
    policy: str

    def can_allocate(self, plan: tuple[int, int]) -> bool:
        """Whether the devices can be divided by this plan and the weights fit."""

    def points(self, plan: tuple[int, int]) -> IntArray:
        """[points, variables] a grid over the values that memory and the job allow."""

    def rough(self, plan: tuple[int, int], points: IntArray) -> RoughFigures:
        """The rough figures [points] of points under one plan."""

    def of_estimate(self, estimate: Estimate) -> dict[str, float]:
        """{name: rough figure} of an Estimate on its own stages."""

    def estimate(self, plan: tuple[int, int], point: tuple[int, ...]) -> Estimate:
        """The Estimate of one point under one plan, with its rough figures."""


def fixed_point(name: str, fixed: FixedSchedule) -> tuple[tuple[int, ...], list[str]]:
    """(values of control variables that a job fixes, names of those that it should fix)."""
    values = {one.name: fixed.value_of(one.name) for one in policy(name).variables}
    missing = [one.name for one in policy(name).variables
               if values[one.name] is None and one.otherwise is None]
    return tuple(one.otherwise or 0 if values[one.name] is None else int(values[one.name] or 0)
                 for one in policy(name).variables), missing


def point_of(estimate: Estimate) -> tuple[int, ...]:
    """Values of the control variables in the order of the policy's row; 0 for unset ones."""
    return tuple(int(estimate.variables.get(name) or 0)
                 for name in policy(estimate.policy).variable_names)


class Sizes(NamedTuple):
    """Sizes of one configuration: bytes held on a rank of each stage [stages], requests encoded
    together, decode iterations between two encodings, rows of the largest step, and those of them
    that yield a token (`heads`)."""

    held_bytes: FloatArray
    encode_batch: float
    decode_iterations: float
    rows: float
    heads: float


def make_estimate(problem: Problem, timing: TimingSource, controls: Controls,
                  deployment: Deployment, found: dict[str, float], sizes: Sizes,
                  notes: tuple[str, ...] = ()) -> Estimate:
    """The Estimate of one configuration. found: {name: rough figure}. notes: shown after those on
    the source of times and on sizes beyond the measured ones."""
    by_rank = {rank: int(np.ceil(size)) for stage, size in zip(
        deployment.stages, sizes.held_bytes, strict=True) for rank in stage.ranks}
    capacity = memory.capacity_bytes(problem.cluster.device)
    qps, outputs = found["throughput_qps"], problem.lengths.outputs
    after = max(outputs.quantile(problem.constraint.quantile) - 1, 1)
    figures: dict[str, Any] = {name: found[name] for name in (
        "throughput_qps", "latency_s", "encode_s", "period_s", "ttft_s")}
    lengths = problem.lengths
    notes += tuple(f"{EXTRAPOLATED}{words}" for words in beyond_measured(
        problem, timing, {stage.tp_degree for stage in deployment.stages}, LargestSizes(
            sizes.rows, min(sizes.heads, sizes.encode_batch), sizes.heads,
            lengths.inputs.max + outputs.max, lengths.inputs.max)))
    if error := problem.input_error:
        notes = (f"inputs: estimated from characters, which may be {error:.0%} off", *notes)
    return Estimate(controls=controls, deployment=deployment, figures=Figures(
        **figures, output_tokens_per_s=qps * outputs.mean, decode_batch=found["decode_batch"],
        decode_iteration_s=found["iteration_s"],
        tpot_s=max(found["latency_s"] - found["ttft_s"], 0.0) / after,
        encode_batch=max(round(sizes.encode_batch), 1),
        decode_iterations=max(round(sizes.decode_iterations), 1),
        memory_bytes=tuple(by_rank[rank] for rank in sorted(by_rank)),
        memory_capacity_bytes=capacity, fits=max(by_rank.values()) <= capacity),
        notes=(f"times: {timing.provenance()}", *notes))
