"""Rough formula for WAA: some devices encode (prefill), the others decode (paper sections 4.1 and
6).

Symbols: B = encode_batch, G = decode groups, S = mean output tokens, D = mean decode iterations,
T_E = time between two encode steps (slowest stage or handover), C(n) = decode cycle with n rows.
One encode batch joins in each iteration, so B S requests should decode:

    n = min(B S, D (B / T_E + rate of chunks) C(n)) rows decode;  throughput = n / (D C(n))
    latency(d) = encoding + handover + (d + 1/2) C

With encode_chunk the decode pool encodes the inputs that the encode pool has no time for, up to a
chunk in each step."""

import math
from collections.abc import Callable, Sequence
from functools import cache, cached_property, partial
from typing import Any, NamedTuple

import numpy as np

from xgpt.core.controls import EvenBatches, WaaControls
from xgpt.core.deployment import Deployment, Pool
from xgpt.core.errors import wrong
from xgpt.core.lengths import BoolArray, FloatArray, IntArray
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate
from xprofiler.timing import TimingSource
from xrunner.rules.batch_sizer import adjustment_share
from xsimulator import memory
from xsimulator.plans import PlanSource, StagePlan
from xsimulator.rough.figures import RoughFigures, Sizes, make_estimate, point_of
from xsimulator.rough.pace import Pace
from xsimulator.rough.pool_memory import PoolMemory
from xsimulator.rough.ranges import MOST_QUERIES, cross_product, grid_of
from xsimulator.rough.workload import Workload
from xsimulator.stage_times import HandoverCost

ROUNDS = 10  # chosen: of bisection
SPARE = 2.0  # chosen: chunks in stock beyond those taken between two encode steps


class Pools(NamedTuple):
    """(encode, decode) stage plans of one division of the devices, and their memory."""

    plans: tuple[StagePlan, StagePlan]
    memory: tuple[PoolMemory, PoolMemory]


class TwoPools:
    """Rough formula of WAA-C (devices divided by work) and WAA-M (by memory). A point is
    (encode_batch, decode_micro_batches, encode_chunk). Other public methods are those of
    Formula."""

    def __init__(self, policy: str, problem: Problem, timing: TimingSource, plans: PlanSource,
                 workload: Workload) -> None:
        self.policy, self.problem, self.timing = policy, problem, timing
        self._plans, self._workload = plans, workload
        self._capacity = memory.capacity_bytes(problem.cluster.device)
        self._split = cache(plans.pairs)
        self._pace = cache(lambda pool: Pace.of(pool.times, workload))
        self._memory_of = cache(
            lambda pool, encodes: PoolMemory(problem, pool, encodes_alone=encodes))
        self._pools = cache(self._make_pool)
        self._adjustment = adjustment_share(problem.adjustment)

    def can_allocate(self, plan: tuple[int, int]) -> bool:
        """Whether the devices can be divided into two pools and hold the weights twice."""
        return len(self._split(*plan).encode_devices) > 0 and self._room > self._workload.longest

    @cached_property
    def _room(self) -> float:
        """KV tokens that fit beside the weights of both pools, if they are spread evenly."""
        whole = self._plans.pool([(0,)], "decode")
        token = float(memory.kv_bytes(self.problem, whole.stages, 1.0)[0])
        free = self.problem.cluster.num_devices * self._capacity - 2 * float(
            whole.weight_bytes[0]) * (1 if not self.problem.model.is_encoder_decoder else 0.5)
        return free / token

    def _make_pool(self, plan: tuple[int, int], encode_devices: int) -> Pools:
        encode, decode = self._split(*plan).pair(encode_devices)
        return Pools((encode, decode), (
            self._memory_of(encode, True), self._memory_of(decode, False)))

    def of_estimate(self, estimate: Estimate) -> dict[str, float]:
        encode, decode = (self._plans.of_stages(pool.stages, pool.role)
                          for pool in estimate.deployment.pools)
        pools = Pools((encode, decode), (
            self._memory_of(encode, True), self._memory_of(decode, False)))
        return self._rough([pools], np.zeros(1, np.int64),
                             np.array([point_of(estimate)], float))[0].of(0)

    def points(self, plan: tuple[int, int]) -> IntArray:
        if not len(self._split(*plan).encode_devices):
            return np.empty((0, 3), np.int64)
        work, fixed = self._workload, self.problem.fixed
        most = max(min(int(2 * self._room / work.tokens_at_work / work.outputs.mean) + 1,
                       self.problem.num_queries or MOST_QUERIES), 1)
        stages = max(self.problem.cluster.num_devices - plan[1] + plan[1] // plan[0] - 1, 1)
        groups = sorted({1, 2, 3, max(stages // 2, 1), max(3 * stages // 4, 1), stages,
                         math.ceil(1.5 * stages)})
        given = [fixed.value_of(name) for name in ("decode_micro_batches", "encode_chunk")]
        chunks = [0] if self.problem.model.is_encoder_decoder else [
            0, *grid_of(1024, None, 4.0, least=4)]
        return cross_product(grid_of(most, fixed.value_of("encode_batch"), 1.5),
                             groups if given[0] is None else [given[0]],
                             chunks if given[1] is None else [given[1]])

    def rough(self, plan: tuple[int, int], points: IntArray) -> RoughFigures:
        own = points.astype(float)
        counts, which = np.unique(self._divide(plan, own), return_inverse=True)
        return self._rough([self._pools(plan, int(count)) for count in counts], which, own)[0]

    def _divide(self, plan: tuple[int, int], points: FloatArray) -> IntArray:
        """[points] number of devices that encode. Raises InputError if no division is possible."""
        work, split = self._workload, self._split(*plan)
        if not len(split.encode_devices):
            raise wrong("schedule", "tp_degree, tp_gpus", plan,
                        "one by which the devices can be divided into two pools, groups within one "
                        "node or on whole nodes, a layer for every stage")
        batch, groups, _ = points.T
        if self.policy == "waa-c":  # in proportion to a request's encode and decode time
            single = self._pace(self._plans.pool([tuple(range(split.tp_degree))], "both"))
            rows = np.maximum(batch * work.iterations / groups, 1.0)
            encode_s = single.encode(batch * work.inputs.mean).through / batch
            decode_s = work.iterations * single.decode(rows).through / rows
            with np.errstate(invalid="ignore"):
                share = encode_s / (encode_s + decode_s)
            return split.nearest(np.where(np.isfinite(share), share, 0.5))
        in_system = np.ceil(batch * (work.outputs.mean + 1))
        fullest = np.stack([self._bytes(self._pools(plan, int(count)), points, in_system)
                            for count in split.encode_devices])
        return np.asarray(split.encode_devices[np.argmin(fullest, axis=0)])

    @np.errstate(invalid="ignore")  # unknown times are infinite
    def _rough(self, pools: Sequence[Pools], which: IntArray,
               points: FloatArray) -> tuple[RoughFigures, FloatArray]:
        """(rough figures [points], input tokens in stock for the decode pool [points]). which:
        index of each point's division in `pools`."""
        work, (batch, _, chunk) = self._workload, points.T
        encoding, decoding = (Pace.concatenated(
            [self._pace(one.plans[role]) for one in pools], which) for role in (0, 1))
        between_s, encode_s, handover_s = self._encoding_s(pools, which, encoding, batch)
        handed_s = encode_s + handover_s
        cycle = partial(_cycle_s, decoding, points)
        rows, taken = _decoding(work, points, batch / between_s, cycle)
        cycle_s = cycle(rows, taken)
        of_chunks = taken / (work.inputs.mean * cycle_s)  # requests/s that the decode pool encodes
        # at most as many requests end as are encoded
        qps = np.minimum(rows / (work.iterations * cycle_s), batch / between_s + of_chunks)
        share = of_chunks / np.maximum(qps, 1e-300)
        parts = np.where(taken > 0, np.ceil(work.inputs.mean / np.maximum(chunk, 1.0)), 0.0)
        taken_s = parts * cycle_s
        first_s = (1 - share) * handed_s + share * taken_s
        inside, stock = _present(work, points, rows, taken, qps * handed_s, between_s / cycle_s)
        # without known times only the encoded requests count
        present = np.maximum(np.round(np.where(np.isfinite(inside), inside, batch)), 1.0)
        return RoughFigures.from_columns(
            throughput_qps=qps, latency_s=first_s + (work.watched + 0.5) * cycle_s,
            ttft_s=np.maximum(handed_s, taken_s), encode_s=encode_s, iteration_s=cycle_s,
            period_s=cycle_s, decode_batch=rows, present=present,
            kv_tokens=self._kv_tokens(present), memory_bytes=_by_division(
                which, lambda number, own: self._bytes(pools[number], points[own], present[own])),
        ), stock

    def _encoding_s(self, pools: Sequence[Pools], which: IntArray, encoding: Pace,
                    batch: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        """([points] T_E, seconds of the longest encode step, seconds of a handover)."""
        tokens = batch * self._workload.inputs.mean
        sent = tokens * self._workload.decoding_share
        handover_s = _by_division(which, lambda number, own: HandoverCost(
            self.problem, self.timing, *(plan.stages for plan in pools[number].plans)).seconds(
                sent[own]))
        longest = encoding.encode(tokens * (1 + self._adjustment))
        return np.maximum(encoding.encode(tokens).slowest, handover_s), longest.through, handover_s

    def _kv_tokens(self, in_system: FloatArray) -> FloatArray:
        work = self._workload
        wanted = (in_system * work.tokens_at_work
                  + memory.KV_QUANTILE_Z * np.sqrt(work.variance_of_each * in_system))
        return np.asarray(np.ceil(np.minimum(np.maximum(wanted, work.longest),
                                             np.maximum(in_system, 1.0) * work.longest)))

    def _largest(self, batch: FloatArray) -> FloatArray:
        inputs = self._workload.inputs
        return np.maximum(batch * inputs.mean * (1 + self._adjustment), inputs.max)

    def _sizes(self, points: FloatArray, in_system: FloatArray, stages: int,
               ) -> tuple[tuple[FloatArray, ...], tuple[FloatArray, ...]]:
        """For each pool [points]: KV tokens, rows of the largest step, those that yield a token."""
        batch, groups, chunk = points.T
        encoded, decoded = np.ceil(batch * (1 + self._adjustment)), np.ceil(in_system / groups)
        largest = self._largest(batch)
        return ((np.ceil((stages + 2) * largest),
                 memory.largest_rows(self._workload.inputs, encoded), encoded),
                (self._kv_tokens(in_system) + largest, decoded + chunk,
                 decoded + np.ceil(chunk / self._workload.inputs.mean)))

    def _bytes(self, pools: Pools, points: FloatArray, in_system: FloatArray) -> FloatArray:
        sizes = self._sizes(points, in_system, len(pools.plans[0].stages))
        return np.maximum(*(pool.fullest(*own) for pool, own in zip(
            pools.memory, sizes, strict=True)))

    def estimate(self, plan: tuple[int, int], point: tuple[int, ...]) -> Estimate:
        points = np.array([point], float)
        count = int(self._divide(plan, points)[0])
        pools = self._pools(plan, count)
        rough, stock = self._rough([pools], np.zeros(1, np.int64), points)
        found, (batch, groups, chunk) = rough.of(0), map(int, point)
        work, steers = self._workload, self.problem.adjustment.steers
        even = EvenBatches(adjustment=self._adjustment, mean_input_tokens=work.inputs.mean,
                           target_active=found["decode_batch"] if steers else 0.0)
        chunks: dict[str, Any] = {} if not chunk else {
            "encode_chunk": chunk, "stock_tokens": max(int(stock[0]), 1),
            # if the encode pool keeps up, it must not wait while the decode pool encodes
            "planned_active": math.ceil(batch * work.outputs.mean) if stock[0] > 1 else 1}
        controls = WaaControls(
            policy=self.policy, encode_batch=batch, decode_micro_batches=groups,
            max_in_system=max(int(found["present"]), 1), even=even,
            admission=work.admission, **chunks)
        encode, decode = pools.plans
        largest = float(self._largest(np.array([float(batch)]))[0])
        deployment = Deployment(pools=(
            # two more groups than stages: one waits for its tokens, one is handed over
            Pool(name="encode", role="encode", stages=encode.stages,
                 num_groups=len(encode.stages) + 2,
                 kv_tokens=int(np.ceil((len(encode.stages) + 2) * largest))),
            Pool(name="decode", role="decode", stages=decode.stages, num_groups=groups,
                 kv_tokens=int(found["kv_tokens"]))), tp_degree=plan[0], tp_gpus=plan[1])
        sizes = self._sizes(points, rough.present, len(encode.stages))
        by_stage = np.concatenate([pool.by_stage(*(float(one[0]) for one in own))
                                   for pool, own in zip(pools.memory, sizes, strict=True)])
        return make_estimate(
            self.problem, self.timing, controls, deployment, found,
            Sizes(by_stage, batch, 1, max(float(own[1][0]) for own in sizes),
                  float(sizes[1][2][0])),
            notes=(f"{count} devices encode, {deployment.pools[1].num_devices} decode",))


def _cycle_s(decoding: Pace, points: FloatArray, rows: FloatArray,
             tokens: FloatArray) -> FloatArray:
    """[points] C: seconds of a cycle that decodes `rows` and encodes `tokens` of chunks."""
    _, groups, chunk = points.T
    each, size = np.maximum(rows / groups, 1.0), np.maximum(chunk, 1.0)
    step = decoding.decode(each)
    if chunk.any():
        step += (decoding.encode_without_matmuls(size) + decoding.extra_matmuls(each, size)).times(
            np.minimum(tokens / groups / size, 1.0))
    return step.cycle(np.minimum(groups, np.maximum(rows, 1.0)))


def _decoding(work: Workload, points: FloatArray, encoded_qps: FloatArray,
              cycle: Callable[[FloatArray, FloatArray], FloatArray],
              ) -> tuple[FloatArray, FloatArray]:
    """[points] (n, tokens of chunks in a cycle): chunks only add what the encode pool cannot do."""
    batch, groups, chunk = points.T

    def joining(rows: FloatArray, tokens: FloatArray) -> FloatArray:
        """D times the requests that join in a cycle."""
        return work.iterations * (encoded_qps * cycle(rows, tokens) + tokens / work.inputs.mean)

    most = chunk * groups
    rows = _least(lambda rows: joining(rows, most) <= rows,
                  np.maximum(batch * work.outputs.mean, 1.0))
    needed = _least(lambda tokens: joining(rows, tokens) >= rows, most)
    return rows, np.where(joining(rows, np.zeros(len(rows))) < rows, needed, 0.0)


def _present(work: Workload, points: FloatArray, rows: FloatArray, taken: FloatArray,
             on_the_way: FloatArray, cycles: FloatArray) -> tuple[FloatArray, FloatArray]:
    """[points] (requests in the system, input tokens in stock). on_the_way: requests that are
    encoded or handed over. cycles: decode cycles between two encode steps."""
    batch, groups, chunk = points.T
    has = taken > 0
    stock = np.where(has, np.ceil(chunk * groups * (cycles + SPARE)), 0.0)
    inside = rows + on_the_way + np.where(has, stock / work.inputs.mean + 1 + groups, 0.0)
    # if the encode pool sets the pace, the number in the system fluctuates: add room
    is_steady = (rows >= batch * work.outputs.mean) & ~has
    return inside + np.where(is_steady, 0, memory.KV_QUANTILE_Z * np.sqrt(inside)), stock


def _least(is_enough: Callable[[FloatArray], BoolArray], most: FloatArray) -> FloatArray:
    """[points] the least value up to `most` that is enough, by bisection; `most` if none is."""
    low, high = np.zeros(len(most)), most
    for _ in range(ROUNDS):
        middle = (low + high) / 2
        enough = is_enough(middle)
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    return high


def _by_division(which: IntArray,
                 found: Callable[[int, BoolArray], FloatArray]) -> FloatArray:
    """[points] values of `found(index of a division, whether each point has it)`."""
    values = np.empty(len(which))
    for number in range(which.max(initial=-1) + 1):
        own = which == number
        values[own] = found(number, own)
    return values
