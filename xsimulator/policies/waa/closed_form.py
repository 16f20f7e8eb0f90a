"""WAA-C and WAA-M in closed form (paper sections 4.1 and 6; design.md section 3.3).

Symbols: B_E = encode_batch, G = decode_micro_batches, S = output tokens of a query, D = its decode
iterations, lambda = queries a second, B_D = decode_batch, T_E = time between two encode steps (the
encode pool's slowest stage, or the handover), T_iter(B_D) = time between two tokens of a query. The
decode batch is meant to be B_E E[S] (one encode batch for each iteration, as in the paper) and is
never more. Where the encode pool is too slow for that, it is what Little's law gives:

    lambda = B_E / T_E,  B_D = lambda E[D] T_iter(B_D)      if that B_D <= B_E E[S]
    B_D = B_E E[S],  lambda = B_D / (E[D] T_iter(B_D))      else: the encode pool is throttled
    latency(d) = L_E + T_handover + (d + wait) T_iter(B_D)

L_E is a batch's time through the encode pool, `wait` the part of an iteration until its group's
turn comes, uniform over one. L_E is charged for a batch at the upper threshold of the workload
adjustment (the paper's buffer, section 5.2): a schedule holds its bound for such batches too.

T_iter(B) = max(G slowest stage, all stages in turn) for groups of B / G queries. The devices are
divided by the time that encoding and decoding of a query take at these batch sizes (WAA-C), or so
that the fullest device is as empty as can be (WAA-M).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from xgpt.core.errors import InputError, Mistake
from xgpt.core.lengths import FloatArray, IntArray
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate
from xgpt.core.schedule_file import estimate_from_flat
from xprofiler.timing import Operator, TimingSource
from xrunner.rules.batch_sizer import share_of
from xsimulator import memory
from xsimulator.handover import HandoverCost
from xsimulator.longest_context import expected_maximum
from xsimulator.occupancy import QueryFlow
from xsimulator.plans import Plans
from xsimulator.policies.figures import BoolArray, EstimateArrays
from xsimulator.policies.grids import geometric, group_counts
from xsimulator.policies.waa.memory import WaaMemory
from xsimulator.policies.waa.plans import WaaPlan, WaaPlans

ROWS_RATIO = 1.03  # between the group sizes at which decode steps are tabulated
_ROWS_SPARE = 24  # of them beyond what is asked for: twice as large
_ROOT_STEPS = 100  # to the decode batch at most; 6 to 10 are usual
_ROOT_ACCURACY = 1e-12  # of the decode batch that is wanted
_DEVIATIONS = 3.0  # of the number in the system, where the encode pool sets the pace


@dataclass(frozen=True, slots=True, kw_only=True)
class WaaConfig:
    """One point of WAA's space."""

    encode_batch: int
    decode_micro_batches: int = 1
    tp_degree: int = 1
    tp_gpus: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WaaPoints:
    """Configurations of one tensor plan. [configs] each."""

    batch: FloatArray
    groups: FloatArray


class Boxes(Protocol):
    """[boxes] ranges of encode_batch and decode_micro_batches."""

    @property
    def least(self) -> IntArray: ...
    @property
    def most(self) -> IntArray: ...
    @property
    def fewest(self) -> IntArray: ...
    @property
    def highest(self) -> IntArray: ...


class Waa(ABC):
    """Evaluates configurations of one problem; keeps what they share. What divides the devices is
    the subclasses' business."""

    name: str

    def __init__(self, problem: Problem, timing: TimingSource, *,
                 adjustment: float | None = None, plans: Plans | None = None) -> None:
        """All as of xsimulator.policies.rra.closed_form.Rra."""
        self.problem, self.timing = problem, timing
        self.adjustment = share_of(problem.adjustment) if adjustment is None else adjustment
        self.flow = QueryFlow(
            problem.lengths, is_encoder_decoder=problem.model.is_encoder_decoder,
            reserved_output_tokens=problem.default_max_tokens)
        self.plans = plans or Plans(problem, timing)
        self._of_degree: dict[tuple[int, int], WaaPlans] = {}
        self._decoding: dict[WaaPlan, _DecodePool] = {}

    @property
    def capacity_bytes(self) -> int:
        return memory.capacity_bytes(self.problem.cluster.device)

    def grid(self, max_queries: int, plans: Sequence[tuple[int, int]]) -> list[WaaConfig]:
        """Every (tp_degree, tp_gpus) of `plans` that both pools can be laid out for, with decode
        groups up to twice the stages and batches 10 % apart, as far as queries reach."""
        found = []
        for tp_degree, tp_gpus in plans:
            split = WaaPlans(self.plans, tp_degree, tp_gpus)
            if not len(split.encode_devices):
                continue
            most = max(int(max_queries / self.mean_iterations), 1)  # the rest is decoding
            stages = self.problem.cluster.num_devices - tp_gpus + tp_gpus // tp_degree - 1
            found += [WaaConfig(encode_batch=batch, decode_micro_batches=groups,
                                tp_degree=tp_degree, tp_gpus=tp_gpus)
                      for groups in group_counts(max(stages, 1)) for batch in geometric(most)]
        return found

    def evaluate(self, configs: Sequence[WaaConfig]) -> EstimateArrays:
        """Figures of every configuration; vectorised over those of one (tp_degree, tp_gpus)."""
        return EstimateArrays(**self._evaluate(configs)[0])

    def estimate(self, config: WaaConfig) -> Estimate:
        """One configuration as the artefact that is shown, and executed."""
        found, devices = self._evaluate([config])
        figures = {name: float(values[0]) for name, values in found.items()}
        plan = self.split(config.tp_degree, config.tp_gpus).plan(int(devices[0]))
        held = self.memory.by_stage(plan, np.array([float(config.encode_batch)]), np.array(
            [float(config.decode_micro_batches)]), found["present"])[0]
        by_rank = {rank: int(np.ceil(size)) for stage, size in zip(
            plan.stages, held, strict=True) for rank in stage.ranks}
        problem, queries = self.problem, figures["throughput_qps"]
        notes = [f"times: {self.timing.provenance()}",
                 f"{int(devices[0])} devices encode, "
                 f"{problem.cluster.num_devices - int(devices[0])} decode"]
        if figures["stretch"] > 1:
            notes.append(f"extrapolated: sizes up to {figures['stretch']:.2g} times those measured")
        return estimate_from_flat(
            policy=self.name, encode_batch=config.encode_batch,
            decode_batch=figures["decode_batch"], decode_iterations=1,
            decode_micro_batches=config.decode_micro_batches, tp_degree=config.tp_degree,
            tp_gpus=config.tp_gpus, throughput_qps=queries,
            output_tokens_per_s=queries * problem.lengths.outputs.mean,
            latency_s=figures["latency_s"], encode_s=figures["encode_s"],
            decode_iteration_s=figures["period_s"], period_s=figures["period_s"],
            memory_bytes=tuple(by_rank[rank] for rank in sorted(by_rank)),
            memory_capacity_bytes=self.capacity_bytes, kv_tokens=int(figures["kv_tokens"]),
            fits=bool(figures["fits"]), stages=plan.stages, notes=tuple(notes),
            max_in_system=max(int(round(figures["present"])), 1),
            encode_kv_tokens=int(self.memory.encode_kv_tokens(
                np.array([float(config.encode_batch)]), len(plan.encode.stages))[0]),
            adjustment=self.adjustment, mean_input_tokens=problem.lengths.inputs.mean,
            # the pools' own pace decides, and room where it does not: leading back is left to those
            # who ask for it, since what is encoded together then depends on the clock
            steered_to=figures["decode_batch"] if problem.adjustment.steers else 0.0)

    def _evaluate(self, configs: Sequence[WaaConfig]) -> tuple[dict[str, Any], IntArray]:
        """(figures, encode devices)."""
        batch = np.array([c.encode_batch for c in configs], float)
        groups = np.array([c.decode_micro_batches for c in configs], float)
        degree = np.array([(c.tp_degree, c.tp_gpus) for c in configs]).reshape(-1, 2)
        columns: dict[str, Any] = {}
        devices = np.zeros(len(configs), np.int64)
        for key in np.unique(degree, axis=0):
            rows = np.flatnonzero((degree == key).all(axis=1))
            split = self.split(int(key[0]), int(key[1]))
            devices[rows] = self.divide(
                split, WaaPoints(batch=batch[rows], groups=groups[rows]), int(key[0]))
            for count in np.unique(devices[rows]):
                own = rows[devices[rows] == count]
                points = WaaPoints(batch=batch[own], groups=groups[own])
                figures = self._figures(split.plan(int(count)), points)
                for name, values in figures.items():
                    columns.setdefault(name, np.empty(len(configs)))[own] = values
        columns["fits"] = columns["memory_bytes"] <= self.capacity_bytes
        return columns, devices

    def split(self, tp_degree: int, tp_gpus: int) -> WaaPlans:
        """The divisions that can be. Raises InputError where there is none."""
        key = (tp_degree, tp_gpus)
        if key not in self._of_degree:
            split = WaaPlans(self.plans, tp_degree, tp_gpus)
            if not len(split.encode_devices):
                raise InputError([Mistake(
                    file="schedule", line=None, key="tp_degree, tp_gpus", value=key,
                    allowed=f"groups within one node and one pool, and no more stages in a pool "
                            f"than layers; {self.problem.cluster.num_devices} devices, "
                            f"{self.problem.model.num_layers} layers")])
            self._of_degree[key] = split
        return self._of_degree[key]

    @abstractmethod
    def divide(self, split: WaaPlans, points: WaaPoints, degree: int) -> IntArray:
        """[configs] devices that encode."""

    def divisions(self, split: WaaPlans, boxes: Boxes, wanted: BoolArray) -> BoolArray:
        """[counts of encode devices, boxes] which of those wanted may be the division of a
        configuration of each box."""
        return wanted

    # --- for bounds ---------------------------------------------------------------------------

    def encode_times(self, plan: WaaPlan,
                     batch: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        """[batches] seconds between two encode steps, of one at the upper threshold of the
        workload adjustment through the pool, and of its handover."""
        handover = self._handover_s(plan, batch * self.problem.lengths.inputs.mean
                                    * self._decoding_share)
        slowest = self._encode_steps(plan, batch).max(axis=1)
        longest = self._encode_steps(plan, batch, 1 + self.adjustment).sum(axis=1)
        return np.maximum(slowest, handover), longest, handover

    def encode_query_s(self, batch: FloatArray, degree: int) -> FloatArray:
        """C_E: one query's encoding through all layers of a single group."""
        plan = self.plans.pool([tuple(range(degree))], "both")
        inputs = self.problem.lengths.inputs
        attention = {d: batch * own for d, own in plan.times.mean_attention_s(batch).items()}
        seconds: FloatArray = plan.times.encode_s(batch * inputs.mean, batch, attention)[..., 0]
        return seconds / batch

    def decode_query_s(self, rows: FloatArray, degree: int) -> FloatArray:
        """C_D: one query's decoding through all layers of a single group, in steps of `rows`."""
        plan = self.plans.pool([tuple(range(degree))], "both")
        seconds: FloatArray = plan.times.decode_s(rows, self._context(rows))[..., 0]
        return seconds / rows * self.mean_iterations

    def decode_times(self, plan: WaaPlan, rows: FloatArray) -> tuple[FloatArray, FloatArray]:
        """[rows] seconds of a decode step of that many queries: on the slowest stage, and through
        all."""
        times = plan.decode.times
        done = rows / max(self.flow.mean_iterations, 1.0)  # leave, and join, each iteration
        seconds = times.decode_s(rows, self._context(rows), moved=done * rows / (rows + done))
        if times.is_encoder_decoder:
            seconds = seconds + times.cross_kv_s(done * self.problem.lengths.inputs.mean)
        return seconds.max(axis=1), seconds.sum(axis=1)

    # --- rates --------------------------------------------------------------------------------

    @cached_property
    def _decoding_share(self) -> float:
        """Of the queries: those that are not done with their first token, and are handed over."""
        fewer = 0 if self.problem.model.is_encoder_decoder else 1
        return float(self.problem.lengths.outputs.pmf[fewer:].sum())

    @cached_property
    def mean_iterations(self) -> float:
        return max(self.flow.mean_iterations, 1e-9)

    def _context(self, rows: FloatArray) -> FloatArray:
        """Tokens of context a query is charged in a step of `rows`."""
        occupancy = self.flow.occupancy(1, padded=self.timing.facts.is_padded)
        mean = float(occupancy.context[0]) / max(float(occupancy.active[0]), 1e-300)
        if occupancy.maximum_context is None:
            return np.full(rows.shape, mean)
        return np.maximum(mean, expected_maximum(
            occupancy.maximum_context, rows[..., None])[..., 0])

    def _pool(self, plan: WaaPlan) -> _DecodePool:
        if plan not in self._decoding:
            self._decoding[plan] = _DecodePool(self, plan)
        return self._decoding[plan]

    def _rates(self, plan: WaaPlan, points: WaaPoints) -> dict[str, FloatArray]:
        """Throughput, batches, times; infinite times where the timing source refuses a size."""
        batch, groups, inputs = points.batch, points.groups, self.problem.lengths.inputs
        steps = self._encode_steps(plan, batch)  # [configs, stages]
        handover = self._handover_s(plan, batch * inputs.mean * self._decoding_share)
        between = np.maximum(steps.max(axis=1), handover)
        pool = self._pool(plan)
        most = batch * self.problem.lengths.outputs.mean
        is_timed = np.isfinite(between) & np.isfinite(pool.iteration_s(most, groups))
        between = np.where(is_timed, between, 1.0)

        def wanted(decoding: FloatArray) -> FloatArray:
            return batch / between * self.mean_iterations * np.where(
                is_timed, pool.iteration_s(decoding, groups), 1.0)

        of_most = wanted(most) - most
        is_throttled = of_most >= 0
        decoding = root(lambda size: wanted(size) - size, most, np.minimum(of_most, 0.0))
        iteration = pool.iteration_s(decoding, groups)
        rate = np.where(is_throttled, decoding / (self.mean_iterations * np.where(
            is_timed, iteration, 1.0)), batch / between)
        # where a later stage or the link is slowest, as many steps are under way as there may be
        slowest = np.maximum(steps.max(axis=1), handover)
        through = steps.sum(axis=1)
        queued = np.where(steps[:, 0] >= slowest * (1 - 1e-9), through,
                          (steps.shape[1] + 2) * slowest - handover)
        encode = np.where(is_throttled, through, np.maximum(queued, through))
        slack = np.where(is_throttled, 0.5 * batch,
                         batch + _DEVIATIONS * np.sqrt(np.maximum(decoding, 1.0)))
        away = rate * (encode + handover + 0.5 * np.where(is_timed, iteration, 0.0))
        return {
            "throughput_qps": np.where(is_timed, rate, 0.0), "decode_batch": decoding,
            "period_s": np.where(is_timed, iteration, np.inf),
            "encode_s": np.where(is_timed, encode, np.inf), "handover_s": handover,
            "present": np.ceil(np.where(is_timed, decoding + away + slack, most))}

    def _encode_steps(self, plan: WaaPlan, batch: FloatArray, share: float = 1.0) -> FloatArray:
        """[configs, stages] seconds of an encode step with `share` of the mean tokens."""
        times, inputs = plan.encode.times, self.problem.lengths.inputs
        attention = {d: share * batch * own for d, own in times.mean_attention_s(batch).items()}
        return times.encode_s(share * batch * inputs.mean, batch, attention)

    def _handover_s(self, plan: WaaPlan, tokens: FloatArray) -> FloatArray:
        cost = HandoverCost(self.problem, self.timing, plan.encode.stages, plan.decode.stages)
        return cost.many(tokens)

    # --- figures ------------------------------------------------------------------------------

    def _figures(self, plan: WaaPlan, points: WaaPoints) -> dict[str, FloatArray]:
        found = self._rates(plan, points)
        handover = found.pop("handover_s")
        with np.errstate(invalid="ignore"):  # refused sizes are infinite
            buffer = (self._encode_steps(plan, points.batch, 1 + self.adjustment)
                      - self._encode_steps(plan, points.batch)).sum(axis=1)
            latency = (found["encode_s"] + buffer + handover
                       + self.iterations_waited * found["period_s"])
        held = self.memory.fullest(plan, points.batch, points.groups, found["present"])
        found.update(
            latency_s=np.where(found["throughput_qps"] > 0, latency, np.inf),
            kv_tokens=self.memory.kv_tokens(found["present"]), memory_bytes=held,
            stretch=self._stretch(plan, points, found["decode_batch"]))
        return found

    @cached_property
    def iterations_waited(self) -> float:
        """Iterations between a query's arrival in the decode pool and its last token, for the
        bound: of the output length at the quantile, or that quantile over all queries."""
        constraint, outputs = self.problem.constraint, self.problem.lengths.outputs
        if constraint.kind == "sequence":
            longest = self.flow.iterations_of(outputs.quantile(constraint.quantile))
            return longest + 0.5 if longest > 0 else 0.0
        # D + U with U uniform over one iteration: its distribution function is linear between
        ends = np.array([self.flow.iterations_of(int(k)) + 1 for k in outputs.support], float)
        return float(np.interp(constraint.quantile, np.cumsum(outputs.pmf), ends))

    # --- memory -------------------------------------------------------------------------------

    @cached_property
    def memory(self) -> WaaMemory:
        """Bytes of configurations."""
        return WaaMemory(self.problem, self.flow, self.plans, self.adjustment)

    def _stretch(self, plan: WaaPlan, points: WaaPoints, decoding: FloatArray) -> FloatArray:
        """Largest size presented to the timing source over the largest that it measured."""
        rows = np.maximum(decoding / points.groups, 1.0)
        most = [self._encode_stretch(points.batch, degree) for degree in plan.encode.times.degrees]
        most += [self._decode_stretch(rows, degree) for degree in plan.decode.times.degrees]
        return np.asarray(np.max(most, axis=0))

    def least_stretch(self, batch: FloatArray, degrees: Sequence[int]) -> FloatArray:
        """[batches] the same at least, of any configuration of that encode_batch or a larger one,
        with stages of these degrees."""
        encode, decode = (np.min([stretch(rows, degree) for degree in degrees], axis=0)
                          for stretch, rows in ((self._encode_stretch, batch),
                                                (self._decode_stretch, np.ones_like(batch))))
        return np.asarray(np.maximum(encode, decode))

    def _encode_stretch(self, batch: FloatArray, degree: int) -> FloatArray:
        inputs, is_apart = self.problem.lengths.inputs, self.problem.model.is_encoder_decoder
        encoder = Operator.ENCODER_REST if is_apart else Operator.LAYER_REST
        tokens = batch * inputs.mean * (1 + self.adjustment)
        return np.asarray(np.maximum(
            tokens / self.timing.reach(encoder, degree).x,
            inputs.max / self.timing.reach(Operator.ENCODE_ATTENTION, degree).x))

    def _decode_stretch(self, rows: FloatArray, degree: int) -> FloatArray:
        lengths, is_apart = self.problem.lengths, self.problem.model.is_encoder_decoder
        context = lengths.outputs.max + (0 if is_apart else lengths.inputs.max)
        reach = self.timing.reach(Operator.DECODE_ATTENTION, degree)
        return np.asarray(np.maximum(np.maximum(rows / reach.x, context / reach.y),
                                     rows / self.timing.reach(Operator.HEAD, degree).x))


def root(excess: Callable[[FloatArray], FloatArray], high: FloatArray,
          of_high: FloatArray) -> FloatArray:
    """Where `excess`, positive at 0, falls through 0 on the way to `high`, where it is `of_high`;
    `high` itself where that is 0. The Illinois method: a secant within a bracket."""
    is_open, low = of_high < 0, np.zeros_like(high)
    of_low, found = np.maximum(excess(low), np.finfo(float).tiny), high
    was_above = was_below = np.zeros(high.shape, bool)
    for _ in range(_ROOT_STEPS):
        found = high + (high - low) * of_high / (of_low - of_high)
        of_found = excess(found)
        is_open = is_open & (np.abs(of_found) > _ROOT_ACCURACY * found)
        if not is_open.any():
            break
        is_above, is_below = is_open & (of_found < 0), is_open & (of_found >= 0)
        # an end that stays twice counts as half, or the secant would only creep towards it
        of_low = np.where(is_below, of_found, np.where(is_above & was_above, 0.5, 1.0) * of_low)
        of_high = np.where(is_above, of_found, np.where(is_below & was_below, 0.5, 1.0) * of_high)
        low, high = np.where(is_below, found, low), np.where(is_above, found, high)
        was_above, was_below = is_above, is_below
    return found


class _DecodePool:
    """The decode pool's step times over group sizes, tabulated: the slowest stage's and the sum."""

    def __init__(self, waa: Waa, plan: WaaPlan) -> None:
        self._waa, self._plan = waa, plan
        self._slowest = self._slowest_rises = np.empty(0)  # at each node, and to the next
        self._through = self._through_rises = np.empty(0)

    def iteration_s(self, decoding: FloatArray, groups: FloatArray) -> FloatArray:
        """T_iter of `decoding` queries in that many groups; groups without a query take no step."""
        rows = np.maximum(decoding / groups, 1.0)
        steps = np.minimum(groups, np.maximum(decoding, 1.0))
        position = np.log(rows) / np.log(ROWS_RATIO)
        top = float(position.max(initial=0.0))
        if top >= len(self._slowest_rises):
            self._tabulate(int(top) + 2 + _ROWS_SPARE)
        index = position.astype(np.intp)
        position -= index
        with np.errstate(invalid="ignore"):
            slowest = self._slowest.take(index) + position * self._slowest_rises.take(index)
            through = self._through.take(index) + position * self._through_rises.take(index)
        return np.asarray(np.maximum(steps * slowest, through))

    def _tabulate(self, count: int) -> None:
        sizes = np.asarray(ROWS_RATIO ** np.arange(count), float)
        self._slowest, self._through = self._waa.decode_times(self._plan, sizes)
        with np.errstate(invalid="ignore"):  # from one refused size to the next
            self._slowest_rises = np.diff(self._slowest)
            self._through_rises = np.diff(self._through)
