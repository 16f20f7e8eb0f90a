"""What closed forms find: figures of many configurations, and of one of them an Estimate."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from xgpt.core.controls import Controls
from xgpt.core.deployment import Deployment, Pool, StageAssignment
from xgpt.core.lengths import BoolArray, FloatArray, IntArray
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate, Figures
from xprofiler.timing import TimingSource
from xsimulator import memory


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EstimateArrays:
    """The figures of an Estimate are given for many configurations, in their order; `memory_bytes`
    is that of the fullest rank."""

    throughput_qps: FloatArray
    latency_s: FloatArray
    ttft_s: FloatArray  # of the same query, from the start of its encoding to its first token
    tpot_s: FloatArray  # and the mean of each later one; 0 where there is none
    period_s: FloatArray
    encode_s: FloatArray
    decode_batch: FloatArray
    present: FloatArray  # queries in the pool right after encoding, in the mean
    kv_tokens: FloatArray
    memory_bytes: FloatArray
    stretch: FloatArray  # largest size presented over the largest measured; refused beyond 4
    fits: BoolArray


def per_token_s(problem: Problem, latency_s: FloatArray, ttft_s: FloatArray) -> FloatArray:
    """[configs] mean seconds of each token after the first, of a query of the quantile's output
    length: from its first token to its last."""
    tokens = problem.lengths.outputs.quantile(problem.constraint.quantile) - 1
    if (is_timed := np.isfinite(latency_s)).all():
        return np.maximum(latency_s - ttft_s, 0.0) / max(tokens, 1) * (tokens > 0)
    with np.errstate(invalid="ignore"):  # refused sizes are infinite
        after = np.maximum(latency_s - ttft_s, 0.0) / max(tokens, 1)
    return np.where(is_timed, after * (tokens > 0), np.inf)


def gathered(count: int, parts: Iterable[tuple[Any, Mapping[str, FloatArray]]],
             ) -> dict[str, FloatArray]:
    """Columns [count] by name are put together from (rows, their figures by name)."""
    columns: dict[str, FloatArray] = {}
    for rows, figures in parts:
        for name, values in figures.items():
            columns.setdefault(name, np.empty(count))[rows] = values
    return columns


class TensorPlanned(Protocol):
    """A configuration says which devices form groups."""

    @property
    def tp_degree(self) -> int: ...
    @property
    def tp_gpus(self) -> int: ...


def by_plan(configs: Iterable[TensorPlanned]) -> dict[tuple[int, int], IntArray]:
    """Each (tp_degree, tp_gpus) has these rows among those of many configurations."""
    rows: dict[tuple[int, int], list[int]] = {}
    for row, config in enumerate(configs):
        rows.setdefault((config.tp_degree, config.tp_gpus), []).append(row)
    return {plan: np.array(own) for plan, own in rows.items()}


def extrapolation(stretch: float) -> list[str]:
    """An Estimate whose sizes are so many times those measured has this note; none up to once."""
    return [f"extrapolated: sizes up to {stretch:.2g} times those measured"] if stretch > 1 else []


class Assembler:
    """The assembler puts the Estimate of one configuration together, for every policy alike."""

    def __init__(self, problem: Problem, timing: TimingSource) -> None:
        self._problem, self._timing = problem, timing
        self.capacity_bytes = memory.capacity_bytes(problem.cluster.device)

    def estimate(self, controls: Controls, deployment: Deployment, figures: Mapping[str, float], *,
                 held_bytes: FloatArray, notes: Sequence[str] = ()) -> Estimate:
        """`figures` are those of EstimateArrays, with encode_batch, decode_iterations and
        decode_iteration_s; `held_bytes` [stages] lie on each rank of a stage."""
        by_rank = {rank: int(np.ceil(size)) for stage, size in zip(
            deployment.stages, held_bytes, strict=True) for rank in stage.ranks}
        fits = figures.get("fits", max(by_rank.values()) <= self.capacity_bytes)
        means = {name: figures[name] for name in (
            "throughput_qps", "latency_s", "ttft_s", "tpot_s", "encode_s", "decode_iteration_s",
            "period_s", "decode_batch")}
        held = Figures(
            **means, fits=bool(fits), memory_capacity_bytes=self.capacity_bytes,
            output_tokens_per_s=figures["throughput_qps"] * self._problem.lengths.outputs.mean,
            encode_batch=max(round(figures["encode_batch"]), 1),
            decode_iterations=max(round(figures["decode_iterations"]), 1),
            memory_bytes=tuple(by_rank[rank] for rank in sorted(by_rank)))
        if error := self._problem.input_error:
            notes = (f"inputs: estimated from characters, which may be {error:.0%} off", *notes)
        return Estimate(controls=controls, deployment=deployment, figures=held,
                        notes=(f"times: {self._timing.provenance()}", *notes))


def one_pool(config: TensorPlanned, stages: tuple[StageAssignment, ...], num_groups: int,
             kv_tokens: float) -> Deployment:
    """All devices form one pool that works both phases."""
    pool = Pool(name="all", role="both", stages=stages, num_groups=num_groups,
                kv_tokens=int(kv_tokens))
    return Deployment(pools=(pool,), tp_degree=config.tp_degree, tp_gpus=config.tp_gpus)
