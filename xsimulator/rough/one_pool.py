"""Rough formulas for policies with one pool: RRA, ORCA, prefill-first (`vllm`) and Sarathi. To
encode is to prefill.

Symbols: L = mean input tokens, D = mean decode iterations, d = those of a request of the latency
limit's quantile, S = stages, G = groups that take turns, n = requests that a group decodes. By
Little's law n / D of them end and begin in each step of a group. A cycle is the time between two
steps of a group: the longer of G times the slowest stage and the way through all stages. All sizes
are means.

RRA (paper section 4.1): period = encoding of B_E requests + N_D cycles with fewer and fewer rows.
latency(d) = (c(d) - 1) periods + encoding + the cycles of the last phase. With chunks, B_E / N_D
requests are encoded in each cycle, beside decoding."""

import math
from abc import ABC, abstractmethod
from functools import cache
from typing import NamedTuple

import numpy as np

from xgpt.core.controls import ContinuousControls, Controls, EvenBatches, RraControls
from xgpt.core.deployment import Deployment, Pool
from xgpt.core.errors import InputError
from xgpt.core.lengths import FloatArray, IntArray
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate
from xprofiler.timing import TimingSource
from xrunner.rules.batch_sizer import adjustment_share
from xrunner.rules.paged import BLOCK_TOKENS, WATERMARK
from xsimulator import memory
from xsimulator.plans import PlanSource, StagePlan
from xsimulator.rough.figures import RoughFigures, Sizes, make_estimate, point_of
from xsimulator.rough.pace import Pace, with_long_steps
from xsimulator.rough.pool_memory import PoolMemory
from xsimulator.rough.ranges import MOST_QUERIES, cross_product, grid_of
from xsimulator.rough.workload import Workload

DEFAULT_TOKEN_BUDGET = 2048  # tokens of a step: vLLM's default
PHASES = (1, 2, 3, 4, 6)  # chosen: numbers of phases of the request that the limit is for
PAGED_FULL = 0.95  # chosen: mean share of the blocks in use
MOST_FOREST = 0.5  # chosen: most of the KV cache for shared prefixes that wait for requests


class TimedPool(NamedTuple):
    """A pool's stage plan, step times and memory."""

    plan: StagePlan
    pace: Pace
    memory: PoolMemory

    @property
    def stages(self) -> int:
        return len(self.plan.stages)


class OnePool(ABC):
    """The rough formula of one policy. Methods without a docstring are those of Formula."""

    def __init__(self, policy: str, problem: Problem, timing: TimingSource, plans: PlanSource,
                 workload: Workload) -> None:
        self.policy, self.problem, self.timing = policy, problem, timing
        self._plans, self._workload = plans, workload
        self._capacity = memory.capacity_bytes(problem.cluster.device)
        self._pool, self._timed_pool = cache(self._make_pool), cache(self._with_paces)

    def can_allocate(self, plan: tuple[int, int]) -> bool:
        try:
            pool = self._pool(*plan)
        except InputError:
            return False
        return bool(pool.memory.most_tokens(self._capacity, np.ones(1), np.ones(1))[0]
                    >= self._workload.longest)

    def _make_pool(self, tp_degree: int, tp_gpus: int) -> TimedPool:
        return self._timed_pool(self._plans.both(tp_degree, tp_gpus))

    def _with_paces(self, plan: StagePlan) -> TimedPool:
        return TimedPool(plan, Pace.of(plan.times, self._workload), PoolMemory(self.problem, plan))

    def rough(self, plan: tuple[int, int], points: IntArray) -> RoughFigures:
        return self._figures(self._pool(*plan), points.astype(float))

    def _figures(self, pool: TimedPool, points: FloatArray) -> RoughFigures:
        with np.errstate(invalid="ignore"):  # unknown times are infinite
            return self._rough(pool, points)

    def of_estimate(self, estimate: Estimate) -> dict[str, float]:
        pool = self._timed_pool(self._plans.of_stages(estimate.deployment.stages, "both"))
        return self._figures(pool, np.array([point_of(estimate)], float)).of(0)

    def estimate(self, plan: tuple[int, int], point: tuple[int, ...]) -> Estimate:
        pool = self._pool(*plan)
        found = self._figures(pool, np.array([point], float)).of(0)
        groups, sizes = self._groups(pool, point), self._step_sizes(pool, np.array([point], float))
        deployment = Deployment(pools=(Pool(
            name="all", role="both", stages=pool.plan.stages, num_groups=groups,
            kv_tokens=int(found["kv_tokens"])),), tp_degree=plan[0], tp_gpus=plan[1])
        controls, encode_batch, iterations = self._controls(point, groups, found)
        rows, heads = (float(own[0]) for own in sizes)
        slack = self._slack(np.array(point, float), found["kv_tokens"], found["decode_batch"])
        return make_estimate(self.problem, self.timing, controls, deployment, found, Sizes(
            pool.memory.by_stage(found["kv_tokens"] + float(slack), rows, heads), encode_batch,
            iterations, rows, heads))

    def _most_queries(self) -> int:
        return self.problem.num_queries or MOST_QUERIES

    def _slack(self, point: FloatArray, kv_tokens: FloatArray | float,
               active: FloatArray | float) -> FloatArray | float:
        """[configs] tokens of memory for blocks that are not full, where prefixes are shared.
        point: [variables, configs]. active: mean decode batch."""
        sharing = self._workload.sharing
        most = point[0] + (active + 3 * np.sqrt(active)) * (self.policy == "rra")
        return 0.0 if sharing is None else sharing.slack(most, kv_tokens)

    @abstractmethod
    def points(self, plan: tuple[int, int]) -> IntArray: ...

    @abstractmethod
    def _rough(self, pool: TimedPool, points: FloatArray) -> RoughFigures: ...

    @abstractmethod
    def _groups(self, pool: TimedPool, point: tuple[int, ...]) -> int: ...

    @abstractmethod
    def _step_sizes(self, pool: TimedPool, points: FloatArray) -> tuple[FloatArray, FloatArray]:
        """[configs] (rows of the largest step, those of them that yield a token)."""

    @abstractmethod
    def _controls(self, point: tuple[int, ...], groups: int, found: dict[str, float],
                  ) -> tuple[Controls, float, float]:
        """(controls, requests encoded together, decode iterations between two encodings)."""


class Rra(OnePool):
    """Rough formula of RRA. A point is (encode_batch, decode_iterations, decode_micro_batches,
    encode_chunk); decode_micro_batches 0 stands for one per stage."""

    def points(self, plan: tuple[int, int]) -> IntArray:
        pool, work, fixed = self._pool(*plan), self._workload, self.problem.fixed
        room = pool.memory.most_tokens(self._capacity, np.ones(1), np.ones(1))[0]
        most = max(min(int(1.2 * room / work.tokens_at_work), self._most_queries()), 1)
        given = fixed.value_of("decode_iterations")
        iterations = grid_of(work.most_iterations, given, 1.8)
        if given is None:  # N_D at which the request of the limit ends with a phase
            iterations = sorted({*iterations, *(-(-max(work.watched, 1) // count)
                                                for count in PHASES)})
        batches = grid_of(most, fixed.value_of("encode_batch"), 1.5)
        mean = self.problem.lengths.inputs.mean
        chunks = {0, *(max(round(mean * share), 1) for share in (0.06, 0.25, 1.0, 3.0))}
        if self.problem.model.is_encoder_decoder:
            chunks = {0}
        given = fixed.value_of("encode_chunk")
        groups = [0] if pool.stages == 1 else [0, max(pool.stages // 2, 1), 2 * pool.stages]
        wanted = fixed.value_of("decode_micro_batches")
        return cross_product(batches, iterations, groups if wanted is None else [wanted],
                             sorted(chunks) if given is None else [given])

    def _groups(self, pool: TimedPool, point: tuple[int, ...]) -> int:
        return int(point[2]) or pool.stages

    def _rough(self, pool: TimedPool, points: FloatArray) -> RoughFigures:
        is_chunked = points[:, 3] > 0
        if not is_chunked.any():
            return self._whole(pool, points)
        if is_chunked.all():
            return self._chunked(pool, points)
        whole, chunked = self._whole(pool, points[~is_chunked]), self._chunked(
            pool, points[is_chunked])
        columns = {}
        for name in RoughFigures.__slots__:
            columns[name] = np.empty(len(points))
            columns[name][~is_chunked] = getattr(whole, name)
            columns[name][is_chunked] = getattr(chunked, name)
        return RoughFigures(**columns)

    def _whole(self, pool: TimedPool, points: FloatArray) -> RoughFigures:
        work, batch, iterations, groups = self._workload, *self._columns(pool, points)
        each, encodes = batch / groups, np.minimum(groups, batch)
        encode_s = pool.pace.encode(batch * work.inputs.mean / encodes).cycle(encodes)
        kinds, place = np.unique(iterations.astype(np.int64), return_inverse=True)
        phases = [work.phase(int(own)) for own in kinds]
        blocks = max(len(one.widths) for one in phases)
        widths, active = np.zeros((2, len(kinds), blocks))
        for row, one in enumerate(phases):
            widths[row, :len(one.widths)] = one.widths
            active[row, :len(one.widths)] = one.active
        rows = active[place] * each[:, None]  # of a group, [configs, blocks]
        # an empty group takes no step
        busy = np.minimum(groups[:, None], np.maximum(rows * groups[:, None], 1e-9))
        cycles = pool.pace.decode(np.maximum(rows, 1.0)).cycle(busy)
        cycles = np.where(rows * groups[:, None] < 1, cycles * rows * groups[:, None], cycles)
        spent = widths[place] * cycles
        period_s = encode_s + spent.sum(axis=1)
        seen = max(work.watched, 1)
        before = np.ceil(seen / iterations) - 1
        left = seen - before * iterations
        ends = np.cumsum(widths[place], axis=1)
        inside = np.clip(left[:, None] - (ends - widths[place]), 0.0, widths[place])
        last_s = (inside * cycles).sum(axis=1) if work.watched else np.zeros(len(batch))
        means = np.array([(one.mean_phases, one.counted, one.counted_variance, one.most_phases)
                          for one in phases])[place].T
        tokens = self._kv_tokens(each, groups, *means[1:])
        return self._finish(pool, points, {
            "throughput_qps": batch / period_s, "encode_s": encode_s, "period_s": period_s,
            "latency_s": before * period_s + encode_s + last_s,
            "iteration_s": (period_s - encode_s) / iterations, "decode_batch": batch * means[0],
            "present": batch * (means[0] + 1 - work.decoding_share), "kv_tokens": tokens})

    def _chunked(self, pool: TimedPool, points: FloatArray) -> RoughFigures:
        work, batch, iterations, groups = self._workload, *self._columns(pool, points)
        rate = batch / iterations  # requests that begin in a cycle
        # at most what fixed chunks hold
        if self.problem.fixed.value_of("encode_chunk") is not None:
            rate = np.minimum(rate, points[:, 3] * groups / work.inputs.mean)
        rows, tokens = rate * work.iterations / groups, rate * work.inputs.mean / groups
        # a phase's tokens come in even chunks, in as few of its cycles as possible
        every = np.clip(np.floor(points[:, 3] / tokens), 1, iterations)
        chunk, share = tokens * every, 1 / every
        with_chunk = pool.pace.both(rows, chunk).cycle(groups)
        plain_s = pool.pace.decode(np.maximum(rows, 1.0)).cycle(groups)
        cycle_s = share * with_chunk + (1 - share) * plain_s
        # infeasible: more tokens in a phase than its chunks hold
        cycle_s = np.where(tokens > points[:, 3] * 1.0001, np.inf, cycle_s)
        parts = np.ceil(work.inputs.mean / chunk)
        encode_s = parts * with_chunk + (parts - 1) * (every - 1) * plain_s
        latency_s = encode_s + work.watched * cycle_s
        each = rows + rate / groups * ((parts - 1) * every + 1)
        wanted = np.ceil(each * work.tokens_at_work + memory.KV_QUANTILE_Z * np.sqrt(
            each * work.variance_at_work) + work.longest) * groups
        return self._finish(pool, points, {
            "throughput_qps": rate / cycle_s, "latency_s": latency_s, "encode_s": encode_s,
            "period_s": iterations * cycle_s, "iteration_s": cycle_s,
            "decode_batch": rows * groups, "present": each * groups, "kv_tokens": wanted})

    def _finish(self, pool: TimedPool, points: FloatArray,
                found: dict[str, FloatArray]) -> RoughFigures:
        rows, heads = self._step_sizes(pool, points)
        forest, wanted = self._workload.forest, found["kv_tokens"]
        slack = self._slack(points.T, wanted + forest, found["decode_batch"])
        if forest:  # as many prefixes as fit beside the requests
            room = pool.memory.most_tokens(self._capacity, rows, heads) - wanted - slack
            found["kv_tokens"] = wanted + np.floor(np.clip(room, 0.0, forest))
        is_decoded = self.problem.model.is_encoder_decoder  # the first token
        return RoughFigures.from_columns(
            ttft_s=found["encode_s"] + (found["iteration_s"] if is_decoded else 0.0),
            memory_bytes=pool.memory.fullest(found["kv_tokens"] + slack, rows, heads), **found)

    def _kv_tokens(self, each: FloatArray, groups: FloatArray, counted: FloatArray,
                   variance: FloatArray, most_phases: FloatArray) -> FloatArray:
        """[configs] KV tokens counted over all groups: a high quantile, at least those of the
        longest request, and at most what the possible requests hold at their longest."""
        longest, queries = self._workload.longest, self.problem.num_queries
        wanted = each * counted + memory.KV_QUANTILE_Z * np.sqrt(each * variance) + longest
        most = np.ceil(each) * most_phases
        if queries is not None:
            most = np.minimum(most, np.ceil(queries / np.minimum(groups, queries)))
        return np.asarray(np.ceil(np.clip(wanted, longest, np.maximum(most, 1) * longest)) * groups)

    def _step_sizes(self, pool: TimedPool, points: FloatArray) -> tuple[FloatArray, FloatArray]:
        batch, iterations, groups = self._columns(pool, points)
        each = np.ceil(batch / np.minimum(groups, batch))
        means = np.array([self._workload.phase(int(own)).mean_phases for own in iterations])
        decoded = batch / groups * means
        rows = np.maximum(self._workload.largest_rows(each), decoded)
        heads = np.maximum(each, decoded)
        is_chunked, chunk = points[:, 3] > 0, points[:, 3]
        decoded = batch / iterations * self._workload.iterations / groups
        spans = np.ceil(chunk / self._workload.inputs.mean) + 1
        return (np.where(is_chunked, chunk + 1.5 * decoded, rows),
                np.where(is_chunked, 1.5 * decoded + spans, heads))

    def _columns(self, pool: TimedPool, points: FloatArray) -> tuple[FloatArray, ...]:
        batch, iterations, groups, _ = points.T
        return batch, iterations, np.where(groups > 0, groups, float(pool.stages))

    def _controls(self, point: tuple[int, ...], groups: int, found: dict[str, float],
                  ) -> tuple[Controls, float, float]:
        batch, iterations, _, chunk = map(int, point)
        share = adjustment_share(self.problem.adjustment)
        steers = share > 0 and self.problem.adjustment.steers is not False
        even = EvenBatches(adjustment=share, mean_input_tokens=self._workload.own_input,
                           target_active=steers * max(found["present"] - batch, 0.0))
        return (RraControls(encode_batch=batch, decode_iterations=iterations, encode_chunk=chunk,
                            decode_micro_batches=groups, even=even,
                            admission=self._workload.admission), batch, iterations)


class Continuous(OnePool):
    """Rough formula of ORCA (max_active), prefill-first and Sarathi (max_active, token_budget)."""

    ratio = 1.25  # chosen: of the grid of max_active

    def points(self, plan: tuple[int, int]) -> IntArray:
        pool, work, fixed = self._pool(*plan), self._workload, self.problem.fixed
        room = pool.memory.most_tokens(self._capacity, np.ones(1), np.ones(1))[0]
        most = max(min(int(1.3 * room / max(work.tokens_at_work, 1.0)), self._most_queries()), 1)
        active = grid_of(most, fixed.value_of("max_active"), self.ratio)
        if self.policy == "orca":
            return cross_product(active)
        least = work.longest_input if self.policy != "sarathi" else 0
        budgets = sorted({max(own, least) for own in grid_of(16384, None, 2.0, least=16)})
        given = fixed.value_of("token_budget")
        return cross_product(active, budgets if given is None else [given])

    def _groups(self, pool: TimedPool, point: tuple[int, ...]) -> int:
        return min(pool.stages, int(point[0]))

    def _rough(self, pool: TimedPool, points: FloatArray) -> RoughFigures:
        work = self._workload
        active, budget = points[:, 0], self._budgets(points)
        groups = np.minimum(active, pool.stages)
        rows, heads = self._step_sizes(pool, points)
        room = pool.memory.most_tokens(self._capacity, rows, heads)
        slack = self._slack(points.T, room, active)
        room = np.floor((room - slack) / groups / BLOCK_TOKENS)
        blocks = math.ceil(work.longest / BLOCK_TOKENS)
        wanted = np.ceil(np.ceil(active / groups) * (blocks + 1) / (1 - WATERMARK))
        forest = np.ceil(work.forest / groups / BLOCK_TOKENS)
        tokens = np.clip(wanted + forest, blocks, np.maximum(room, blocks)) * BLOCK_TOKENS
        own = tokens - np.minimum(forest * BLOCK_TOKENS, MOST_FOREST * tokens)
        if self.policy == "orca":
            held = own / work.tokens_at_work
        else:
            held = PAGED_FULL * own / (work.tokens_at_work + BLOCK_TOKENS / 2)
        each = np.maximum(np.minimum(active / groups, held), 1.0)  # present in a group
        steps = self._mixed if self.policy in ("orca", "sarathi") else self._separate
        cycle_s, ended, encode_s, iteration_s = steps(pool, each, budget, groups)
        return RoughFigures.from_columns(
            throughput_qps=groups * ended / cycle_s, latency_s=encode_s + work.watched * cycle_s,
            ttft_s=encode_s, encode_s=encode_s, iteration_s=iteration_s, period_s=cycle_s,
            decode_batch=groups * each, present=groups * each, kv_tokens=tokens * groups,
            memory_bytes=np.where(room >= blocks, pool.memory.fullest(
                tokens * groups + slack, rows, heads), np.inf))

    def _mixed(self, pool: TimedPool, each: FloatArray, budget: FloatArray,
               groups: FloatArray) -> tuple[FloatArray, ...]:
        """[configs] (seconds of a cycle, requests that end in a step, seconds to encode one,
        seconds of a cycle without encoding), if steps decode and encode together. each: requests of
        a group."""
        work = self._workload
        mean, stay = work.inputs.mean, work.iterations + 1
        # a step has at most `budget` tokens
        each = np.minimum(each, budget / (work.iterations / stay + mean / stay))
        ended, rows = each / stay, each * work.iterations / stay
        tokens = ended * mean
        room = np.maximum(budget - rows, 1.0)
        if self.policy == "orca":
            ended = np.minimum(ended, 1.0)
            tokens, rows, chunk = ended * mean, ended * work.iterations, np.full(len(each), mean)
        else:
            chunk = np.clip(np.maximum(mean, tokens), 1.0, room)
        share = np.minimum(tokens / np.maximum(chunk, tokens), 1.0)
        with_chunk = pool.pace.both(rows, np.maximum(chunk, tokens))
        alone = pool.pace.decode(np.maximum(rows, 1.0))
        parts = np.ceil(mean / np.maximum(chunk, 1.0))
        cycle_s = with_long_steps(alone, with_chunk, share, groups)
        encode_s = with_chunk.through + (parts - 1) * cycle_s
        return cycle_s, ended, encode_s, alone.cycle(groups)

    def _separate(self, pool: TimedPool, each: FloatArray, budget: FloatArray,
               groups: FloatArray) -> tuple[FloatArray, ...]:
        """Figures as of `_mixed`, for steps that encode, as soon as a request fits, or decode."""
        work = self._workload
        ended = each / work.iterations
        chance = 1 - np.exp(-ended)  # probability that a request ended in a step
        tokens = np.maximum(np.minimum(ended / chance * work.inputs.mean, budget),
                            work.inputs.mean)
        encodes = np.maximum(ended * work.inputs.mean / tokens, chance)
        encode = pool.pace.encode(tokens)
        alone = pool.pace.decode(np.maximum(each, 1.0))
        # a group encodes at most once between two decode steps
        cycle_s = with_long_steps(alone, alone + encode, np.minimum(encodes, 1.0), groups)
        return (cycle_s + np.maximum(encodes - 1, 0.0) * encode.cycle(groups), ended,
                encode.through, alone.cycle(groups))

    def _budgets(self, points: FloatArray) -> FloatArray:
        if self.policy == "orca":
            return np.full(len(points), np.inf)
        least = self._workload.longest_input if self.policy != "sarathi" else 0
        return np.where(points[:, 1] > 0, points[:, 1], max(DEFAULT_TOKEN_BUDGET, least))

    def _step_sizes(self, pool: TimedPool, points: FloatArray) -> tuple[FloatArray, FloatArray]:
        slots = np.ceil(points[:, 0] / np.minimum(points[:, 0], pool.stages))
        if self.policy == "orca":
            rows = self._workload.longest_input + slots
        else:
            rows = self._budgets(points)
            if self.policy != "sarathi":
                rows = np.maximum(np.maximum(rows, slots), self._workload.longest)
        return rows, slots + 1

    def _controls(self, point: tuple[int, ...], groups: int, found: dict[str, float],
                  ) -> tuple[Controls, float, float]:
        budget = None if self.policy == "orca" else int(self._budgets(np.array([point], float))[0])
        ended = found["present"] / max(self._workload.iterations, 1.0) / groups
        return (ContinuousControls(policy=self.policy, max_active=int(point[0]),
                                   token_budget=budget, admission=self._workload.admission),
                max(ended, 1.0), 1)
