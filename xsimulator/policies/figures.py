"""What closed forms find: figures of many configurations, and of one of them an Estimate."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from xgpt.core.lengths import FloatArray, IntArray
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate, StageAssignment
from xgpt.core.schedule_file import estimate_from_flat
from xprofiler.timing import TimingSource
from xsimulator import memory

BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EstimateArrays:
    """The figures of an Estimate for many configurations, in their order. `memory_bytes` is that
    of the fullest rank."""

    throughput_qps: FloatArray
    latency_s: FloatArray
    period_s: FloatArray
    encode_s: FloatArray
    decode_batch: FloatArray
    present: FloatArray  # queries in the pool right after encoding, in the mean
    kv_tokens: FloatArray
    memory_bytes: FloatArray
    stretch: FloatArray  # largest size presented over the largest measured; refused beyond 4
    fits: BoolArray


def gathered(count: int, parts: Iterable[tuple[Any, Mapping[str, FloatArray]]],
             ) -> dict[str, FloatArray]:
    """[count] columns by name, put together from (rows, their figures by name)."""
    columns: dict[str, FloatArray] = {}
    for rows, figures in parts:
        for name, values in figures.items():
            columns.setdefault(name, np.empty(count))[rows] = values
    return columns


def by_plan(plans: Sequence[tuple[int, int]]) -> dict[tuple[int, int], IntArray]:
    """The rows of each (tp_degree, tp_gpus) among those of many configurations."""
    rows: dict[tuple[int, int], list[int]] = {}
    for row, plan in enumerate(plans):
        rows.setdefault(plan, []).append(row)
    return {plan: np.array(own) for plan, own in rows.items()}


def extrapolation(stretch: float) -> list[str]:
    """A note of an Estimate whose sizes are so many times those measured; none up to once."""
    return [f"extrapolated: sizes up to {stretch:.2g} times those measured"] if stretch > 1 else []


class TensorPlanned(Protocol):
    """A configuration, as far as it says which devices form groups."""

    @property
    def tp_degree(self) -> int: ...
    @property
    def tp_gpus(self) -> int: ...


class Assembler:
    """Puts the Estimate of one configuration together, for every policy alike."""

    def __init__(self, problem: Problem, timing: TimingSource) -> None:
        self._problem, self._timing = problem, timing

    @property
    def capacity_bytes(self) -> int:
        return memory.capacity_bytes(self._problem.cluster.device)

    def estimate(self, config: TensorPlanned, figures: Mapping[str, float], *,
                 stages: Sequence[StageAssignment], held_bytes: FloatArray, notes: Sequence[str],
                 **controls: Any) -> Estimate:
        """`figures` as of EstimateArrays, with decode_iteration_s; `held_bytes` [stages] on each
        rank of a stage; `controls`: what else the Estimate says of its policy."""
        by_rank = {rank: int(np.ceil(size)) for stage, size in zip(
            stages, held_bytes, strict=True) for rank in stage.ranks}
        taken: dict[str, Any] = {name: figures[name] for name in (
            "throughput_qps", "latency_s", "encode_s", "decode_iteration_s", "period_s",
            "decode_batch")}
        fits = figures.get("fits", max(by_rank.values()) <= self.capacity_bytes)
        return estimate_from_flat(
            tp_degree=config.tp_degree, tp_gpus=config.tp_gpus, **taken, **controls,
            output_tokens_per_s=figures["throughput_qps"] * self._problem.lengths.outputs.mean,
            memory_bytes=tuple(by_rank[rank] for rank in sorted(by_rank)),
            memory_capacity_bytes=self.capacity_bytes, kv_tokens=int(figures["kv_tokens"]),
            fits=bool(fits), stages=tuple(stages),
            notes=(f"times: {self._timing.provenance()}", *notes))
