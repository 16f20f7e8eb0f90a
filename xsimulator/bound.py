"""What no schedule of one copy of the model exceeds, in queries/s (docs/bound.md derives it).

Symbols, of a query in the mean: L = input tokens, D = decode iterations, c = tokens of context of a
decoded row; d = iterations of the query that the latency bound T is for (xsimulator.demand). Of a
pool of stages: G = groups, n = decode steps/s, m = rows that the G groups decode in a cycle of
tau = G / n seconds. Tokens are counted, so throughput = m / (D tau), and

    tau >= G W_s(m / G)      each stage s works all groups' steps, and all encoding
    tau >= sum of P_s(m / G)  a group's step passes all stages
    T   >= own encoding + d intervals + the encoding of others that falls into them
    m c <= tokens of KV cache beside the weights

W and P are convex functions below the times of steps (xsimulator.convex_steps), which no mix of
steps gets below in the mean. m is looked at on a grid: of m from m1 to m2 the throughput is at most
m2 / (D tau(m1)), so nothing is assumed between its points; G is any real number."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache, cached_property
from heapq import heapify, heappush, heapreplace
from typing import Literal, NamedTuple

import numpy as np

from xgpt.core.errors import InputError
from xgpt.core.lengths import FloatArray
from xgpt.core.problem import Problem
from xprofiler.timing import TimingSource
from xsimulator import memory
from xsimulator.allocation import can_hold, pool_ranks
from xsimulator.convex_steps import ConvexTimes, highest_lines
from xsimulator.demand import Demand
from xsimulator.layer_times import TOGETHER, LayerTimes
from xsimulator.plans import StagePlan, shared_plans
from xsimulator.stage_times import HandoverCost

Kind = Literal["one pool", "two pools"]
RATIO = 1.01  # chosen: between numbers of rows that are looked at
BATCH_RATIO, MOST_BATCH = 1.03, 4096.0  # chosen: of queries encoded together by a pool of its own
HALVINGS = 12  # chosen: of the range of G
BATCHES: FloatArray = BATCH_RATIO ** np.arange(math.log(MOST_BATCH) / math.log(BATCH_RATIO))
SPLITS = 8  # chosen: of the range of the share of the encoding that the decode pool takes over
MOST_ROWS = 2.0**20  # of a cycle


class Curve(NamedTuple):
    """[m] no throughput exceeds `qps` while the latency is at most `latency_s`, which rises."""

    qps: FloatArray
    latency_s: FloatArray


class Lines(NamedTuple):
    """The largest of [lines] offset + slope x rows: seconds of decode attention, at least."""

    slopes: FloatArray
    offsets: FloatArray
    begins: FloatArray  # [lines - 1] rows from which on each but the first is the largest

    def mean_s(self, rows: FloatArray) -> FloatArray:
        """Seconds of so many rows."""
        place = np.searchsorted(self.begins, rows, side="right")
        return np.asarray(self.offsets[place] + self.slopes[place] * rows)


class StepBounds(NamedTuple):
    """Seconds of a group's steps by the rows that it decodes, at least, at all sizes [nodes] where
    one of the convex functions has a kink: between them they are lines."""

    rows: FloatArray
    busy_s: FloatArray  # [resources, nodes] with the encoding of the queries for these rows
    alone_s: FloatArray  # [resources, nodes] without
    path_s: FloatArray  # [nodes] the same through all stages

    def at(self, which: FloatArray, rows: FloatArray) -> FloatArray:
        """[..., m] one of them of so many rows."""
        if which.ndim == 1:
            return np.asarray(np.interp(rows, self.rows, which))
        return np.array([np.interp(rows, self.rows, own) for own in which])


def upper_bound(problem: Problem, timing: TimingSource, plans: Iterable[tuple[int, int]],
                kinds: Sequence[Kind] = ("one pool", "two pools")) -> float:
    """Queries/s that no schedule of these (tp_degree, tp_gpus) and kinds exceeds within the
    problem's bounds on latency; 0 where none keeps them."""
    bound, most_qps, plans = UpperBound(problem, timing), 0.0, list(plans)
    for kind in kinds:
        for plan in plans:
            most_qps = bound.of_plan(plan, kind, cutoff_qps=most_qps)
    return most_qps


class UpperBound:
    """The bounds of one problem's tensor plans; keeps their tables."""

    def __init__(self, problem: Problem, timing: TimingSource) -> None:
        self.problem = problem
        self.demand = Demand(problem)
        self._plans = shared_plans(problem, timing)
        lines = cache(lambda layers, degree: attention_lines(layers, degree, self.demand))
        self._pool = cache(lambda plan: PoolBound(plan, problem, self.demand, lines))

    def of_plan(self, plan: tuple[int, int], kind: Kind, latency_s: float | None = None, *,
                cutoff_qps: float = 0.0) -> float:
        """Queries/s that no schedule of this (tp_degree, tp_gpus) exceeds, or `cutoff_qps` where
        that is more; 0 where model or cluster refuse the plan. `latency_s`: another limit than the
        problem's."""
        limit_s = self.problem.constraint.latency_s if latency_s is None else latency_s
        if kind == "one pool":
            try:
                pool = self._pool(self._plans.both(*plan))
            except InputError:
                return cutoff_qps
            return max(pool.alone_qps(limit_s), cutoff_qps)
        pools = [(self._pool(encode), self._pool(decode), HandoverCost(
            self.problem, self._plans.timing, encode.stages, decode.stages))
            for encode, decode in self._divisions(*plan)]
        # the likeliest first, for what they reach others need not be looked at
        for encoding, decoding, link in sorted(pools, key=lambda own: -min(
                own[0].most_encode_qps, own[1].most_decode_qps)):
            cutoff_qps = max(cutoff_qps, self._divided_qps(
                encoding, decoding, link, limit_s, cutoff_qps))
        return cutoff_qps

    def _divisions(self, degree: int, gpus: int) -> Iterable[tuple[StagePlan, StagePlan]]:
        """The (encode, decode) pools of every number of encoding devices."""
        problem = self.problem
        for count in range(1, problem.cluster.num_devices):
            ranks = pool_ranks(problem.cluster, count, degree, gpus)
            if ranks is not None and can_hold(problem.model, *ranks):
                yield (self._plans.pool(ranks[0], "encode"),
                       self._plans.pool(ranks[1], "decode", len(ranks[0])))

    def _divided_qps(self, encoding: PoolBound, decoding: PoolBound, link: HandoverCost,
                     limit_s: float, cutoff_qps: float) -> float:
        """Of two pools, the second of which may take over any share of the encoding: the range of
        the share is split where the bound is highest, until it is `cutoff_qps` or less."""
        if min(encoding.room_tokens, decoding.room_tokens) <= 0:
            return 0.0
        moved_s = link.seconds(BATCHES * self.demand.inputs)
        busy_s, path_s = encoding.encode_s(BATCHES)
        # that of the largest batch is that of larger ones, too, but for their fixed costs
        rates = np.append(BATCHES[1:] / np.maximum(busy_s, moved_s)[1:], encoding.most_encode_qps)
        left_s = limit_s - path_s - moved_s

        def within(low: float, high: float) -> tuple[float, float, float]:
            curve = decoding.curve(low)
            # a query that the decode pool encodes waits for no handover
            spare_s = np.maximum(left_s, limit_s - decoding.own_s) if high else left_s
            place = np.searchsorted(curve.latency_s, spare_s, side="right")
            decoded = np.append(0.0, np.maximum.accumulate(curve.qps))[place]
            encoded = rates / (1 - high) if high < 1 else np.full_like(rates, np.inf)
            return -float(np.minimum(encoded, decoded).max()), low, high

        ranges = [within(0.0, 0.0), within(0.0, 1.0)]
        heapify(ranges)
        for _ in range(SPLITS):
            qps, low, high = ranges[0]
            if -qps <= cutoff_qps or low == high or -qps <= -within(low, low)[0]:
                break
            heapreplace(ranges, within(low, (low + high) / 2))
            heappush(ranges, within((low + high) / 2, high))
        return -ranges[0][0]


class PoolBound:
    """The bounds of one pool of stages. Arrays [resources, m] hold what a cycle keeps busy: each
    kind of stages, or, where ranks share cores, their mean."""

    def __init__(self, plan: StagePlan, problem: Problem, demand: Demand,
                 lines: Callable[[LayerTimes, int], Lines]) -> None:
        """`lines`: below a layer's decode attention in groups of a degree (attention_lines)."""
        self._lines = lines
        self.demand, self._constraint = demand, problem.constraint
        self._layers, self._steps = plan.times.layers, plan.convex_steps
        self._number = np.array(self._steps.number, float)
        first = [plan.kinds.kind_of.index(kind) for kind in range(len(self._number))]
        self._decoder_layers, self._encode_layers = (
            own[first] for own in (plan.times.decoder_layers, plan.times.encode_layers))
        self._is_apart = plan.times.is_encoder_decoder
        self._has_decoder = bool(self._decoder_layers.any())
        self._sharing = self._layers.timing.facts.sharing
        # each kind's share of all devices
        self._weights = self._number * self._steps.degrees / problem.cluster.num_devices
        # tokens that the fullest stage has room for beside its weights and a step of one row
        held = memory.StageBytes(problem, plan.stages)
        free = (memory.capacity_bytes(problem.cluster.device) - plan.weight_bytes
                - held.step(1.0, 1.0))
        with np.errstate(divide="ignore", invalid="ignore"):
            room = np.where(free > 0, free / held.kv(1.0), 0.0)
        self.room_tokens = float(np.min(room))
        self.curve, self._steps_of = cache(self._find_curve), cache(self._find_steps)

    def alone_qps(self, limit_s: float) -> float:
        """What no one-pool schedule exceeds whose latency is `limit_s` at most."""
        low, high = self._rows
        ttft_s = self._constraint.limit_s("ttft")
        if not len(low) or self._own_s(self._watched_input("ttft")) > ttft_s:
            return 0.0
        groups, is_met = self._fewest_groups(low, high, 1.0, limit_s)
        cycle_s, alone_s = self._cycle(low, high, groups, is_met, 1.0)
        is_kept = self._latency_s(low, groups, 1.0, is_phased=True) <= limit_s
        is_kept &= self._path_latency_s(low, high, is_phased=True) <= limit_s
        is_kept &= alone_s <= self._pace_s
        qps = high / (self.demand.iterations * cycle_s)
        return float(qps[is_kept].max(initial=0.0))

    def _find_curve(self, share: float) -> Curve:
        """Of a decode pool that encodes this share of the queries."""
        low, high = self._rows
        groups, is_met = self._fewest_groups(low, high, share, math.inf)
        if not len(low):
            return Curve(low, low)
        cycle_s, alone_s = self._cycle(low, high, groups, is_met, share)
        is_kept = alone_s <= self._pace_s
        qps = high / (self.demand.iterations * cycle_s)
        latency_s = self._latency_s(low, groups, share, is_phased=False)
        if share == 0:
            latency_s = np.maximum(latency_s, self._path_latency_s(low, high, is_phased=False))
        return Curve(qps[is_kept], np.maximum.accumulate(latency_s[is_kept]))

    def encode_s(self, batches: FloatArray) -> tuple[FloatArray, FloatArray]:
        """([batches] seconds that one keeps the busiest stage, seconds through all stages), where
        this pool encodes alone."""
        work = self._encoding(batches * self.demand.inputs, batches, self._mean_attention_s)
        return np.asarray(self._resources(work).max(axis=0)), self._path_s(work)

    @cached_property
    def most_encode_qps(self) -> float:
        """Queries/s of the largest batches, where this pool encodes alone."""
        huge = np.array([MOST_ROWS])  # of which the fixed costs are next to nothing
        return float(MOST_ROWS / self.encode_s(huge)[0][0])

    @cached_property
    def most_decode_qps(self) -> float:
        """Queries/s of this pool where it decodes alone."""
        return float(self.curve(0.0).qps.max(initial=0.0))

    @cached_property
    def own_s(self) -> float:
        """Seconds of encoding the query that the bound is for, through all stages."""
        return self._own_s(self.demand.watched_inputs)

    def _own_s(self, inputs: float) -> float:
        attention_s = np.array([self._layers.encode_attention_s(
            inputs, np.array(TOGETHER, float), degree).min() for degree in self._steps.degrees])
        work = self._encoding(np.array([inputs]), np.ones(1), attention_s)
        return float(self._path_s(work)[0])

    def _watched_input(self, metric: Literal["ttft"]) -> float:
        bound = self._constraint.bound_on(metric)
        return 1.0 if bound is None else float(self.demand.lengths.inputs.quantile(bound.quantile))

    @property
    def _pace_s(self) -> float:
        """Seconds of a token at most."""
        return self._constraint.limit_s("tpot")

    @cached_property
    def _rows(self) -> tuple[FloatArray, FloatArray]:
        """([m] least, most) rows of a cycle; none where memory has no room for a query."""
        most = min(self.room_tokens / self.demand.context, MOST_ROWS)
        if most < 1:
            return np.empty(0), np.empty(0)
        low: FloatArray = RATIO ** np.arange(math.floor(math.log(most) / math.log(RATIO)) + 1)
        return low, np.asarray(np.minimum(low * RATIO, most))

    def _fewest_groups(self, low: FloatArray, high: FloatArray, share: float,
                       limit_s: float) -> tuple[FloatArray, FloatArray]:
        """([m] G below which a group's own steps are longer than a cycle of the stages, or too
        long for the latency; whether that is so for some G)."""
        steps = self._steps_of(share)

        def is_met(groups: FloatArray) -> FloatArray:
            each = np.maximum(low / groups, 1.0)
            path_s = steps.at(steps.path_s, each)
            enough = path_s <= groups * steps.at(steps.busy_s, each).max(axis=0)
            if limit_s < math.inf:
                enough &= self._path_latency_s(low, groups, is_phased=True) <= limit_s
            return np.asarray(enough & (path_s <= self._pace_s))

        few, many = np.ones(len(low)), high.copy()
        is_ever = is_met(many)
        for _ in range(HALVINGS):
            middle = np.sqrt(few * many)
            enough = is_met(middle)
            few, many = np.where(enough, few, middle), np.where(enough, middle, many)
        return few, is_ever

    def _cycle(self, low: FloatArray, high: FloatArray, groups: FloatArray, is_met: FloatArray,
               share: float) -> tuple[FloatArray, FloatArray]:
        """([m] seconds of a cycle, and of one that encodes nothing)."""
        steps, each = self._steps_of(share), np.maximum(low / groups, 1.0)
        path_s = steps.at(steps.path_s, np.maximum(low / high, 1.0))
        busy_s, alone_s = (groups * steps.at(own, each).max(axis=0)
                           for own in (steps.busy_s, steps.alone_s))
        return np.where(is_met, busy_s, path_s), np.maximum(alone_s, path_s)

    def _latency_s(self, rows: FloatArray, groups: FloatArray, share: float, *,
                   is_phased: bool) -> FloatArray:
        """[m] by the busiest stage."""
        demand, steps, (seen, queries, together) = (
            self.demand, self._steps_of(share), self._seen(rows))
        each = np.maximum(seen / groups, 1.0)
        busy, alone = (groups * steps.at(own, each) for own in (steps.busy_s, steps.alone_s))
        encode_s = (busy - alone) * demand.iterations / seen  # of a query
        latency = demand.watched * alone + demand.turnover * (seen - 1) * encode_s
        if is_phased:
            latency = np.minimum(latency, (
                together * alone + (demand.watched - together) * steps.alone_s[:, :1]
                + np.maximum(queries - 1, 0.0) / 2 * encode_s))
        return np.asarray(self.own_s * (share > 0) + latency.max(axis=0))

    def _path_latency_s(self, rows: FloatArray, groups: FloatArray, *,
                        is_phased: bool) -> FloatArray:
        """[m] by the steps of the query's own group."""
        steps, (seen, _, together) = self._steps_of(0.0), self._seen(rows)
        path_s = steps.at(steps.path_s, np.maximum(seen / groups, 1.0))
        if not is_phased:
            return np.asarray(self.demand.watched * path_s)
        return np.asarray(self.own_s + together * path_s
                          + (self.demand.watched - together) * steps.path_s[0])

    def _seen(self, rows: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        """([m] rows beside the query that the bound is for and itself; queries of a batch, and
        iterations that it is together with others, where batches are decoded to their ends)."""
        seen = np.maximum(rows - self.demand.excess, 1.0)
        return seen, *self.demand.in_batches(seen)

    def _find_steps(self, share: float) -> StepBounds:
        """Of a pool that encodes this share of the queries whose rows it decodes."""
        demand, head, head_rows = self.demand, self._steps.head, self._layers.head_rows
        begun = share / demand.iterations  # queries for a row
        tokens = 1 + begun * demand.inputs * (not self._is_apart)  # encoded and decoded for a row
        heads = 1 / head_rows + begun
        kinks = [own.lines[2] / by for by, functions in (
            (1.0, self._decode_rows), (tokens, self._decode_rows), (1 / head_rows, [head]),
            (heads, [head])) for own in functions]
        kinks += [own.begins for own in self._attention]
        rows = np.unique(np.clip(np.concatenate([[1.0, 2 * MOST_ROWS], *kinks]),
                                 1.0, 2 * MOST_ROWS))
        busy: list[FloatArray] = []
        alone: list[FloatArray] = []
        for kind, (of_rows, layers) in enumerate(zip(
                self._decode_rows, self._decoder_layers, strict=True)):
            attention_s = layers * self._attention[kind].mean_s(rows)
            encode_s = rows * begun * self._encode_layers[kind] * self._mean_attention_s[kind]
            if self._is_apart:  # encoder and decoder layers share no pass
                token_s = self._steps.rows[kind].lines[0][-1]  # of the largest steps
                encode_s = encode_s + rows * begun * demand.inputs * token_s
            has_head = kind == self._steps.last and not self._is_apart
            for found, by, head_by, more_s in ((alone, 1.0, 1 / head_rows, 0.0),
                                               (busy, tokens, heads, encode_s)):
                found.append(of_rows.mean_s(rows * by) + attention_s + more_s + (
                    head.mean_s(rows * head_by) if has_head else 0.0))
        work = np.array(alone)
        return StepBounds(rows, self._resources(np.array(busy)), self._resources(work),
                          self._path_s(work))

    def _encoding(self, tokens: FloatArray, queries: FloatArray,
                  attention_s: FloatArray) -> FloatArray:
        """[kinds, batches] of steps that encode alone."""
        work = [rows.mean_s(tokens) + queries * layers * own for rows, layers, own in zip(
            self._steps.rows, self._encode_layers, attention_s, strict=True)]
        if not self._is_apart:
            work[self._steps.last] = work[self._steps.last] + self._steps.head.mean_s(queries)
        return np.array(work)

    def _resources(self, work: FloatArray) -> FloatArray:
        """[resources, m] of [kinds, m]."""
        if self._sharing <= 1:
            return work
        return np.concatenate([work / self._sharing, [self._weights @ work]])

    def _path_s(self, work: FloatArray) -> FloatArray:
        return np.asarray(self._number @ work / max(self._sharing, 1.0))

    @cached_property
    def _decode_rows(self) -> list[ConvexTimes]:
        return self._steps.decode_rows if self._is_apart else self._steps.rows

    @cached_property
    def _mean_attention_s(self) -> FloatArray:
        """[kinds] a layer's encode attention of a query, in whichever batch it is least."""
        return np.array([self._layers.mean_attention_s(np.array(TOGETHER, float), degree).min()
                         for degree in self._steps.degrees])

    @cached_property
    def _attention(self) -> list[Lines]:
        """[kinds] a layer's decode attention."""
        return [self._lines(self._layers, degree) if self._has_decoder else NO_LINES
                for degree in self._steps.degrees]


NO_LINES = Lines(np.zeros(1), np.zeros(1), np.empty(0))
QUERIES: FloatArray = 2.0 ** np.arange(0, 17, 0.5)  # at which decode attention is looked at
CONTEXTS = 24  # chosen


def attention_lines(layers: LayerTimes, degree: int, demand: Demand) -> Lines:
    """Below a layer's decode attention for the mean over steps of any rows and contexts, whose mean
    context is the demand's: planes below the seconds of so many queries and so many tokens in all,
    each nearly touching at one number of queries. A row that is encoded again instead, after it was
    evicted, takes no less."""
    low, high = demand.contexts
    contexts = np.sort(np.append(np.geomspace(low, high, CONTEXTS), demand.context))
    seconds = layers.decode_attention_s(QUERIES[:, None], contexts[None, :], degree)
    again_s = layers.encode_attention_s(contexts[:, None], np.array(TOGETHER, float),
                                        degree).min(axis=1)
    at = int(np.searchsorted(contexts, demand.context))
    left, right = max(at - 1, 0), min(at + 1, len(contexts) - 1)
    with np.errstate(invalid="ignore", divide="ignore"):
        of_tokens = (seconds[:, right] - seconds[:, left]) / (
            QUERIES * (contexts[right] - contexts[left]))
        of_rows = (seconds[1:, at] - seconds[:-1, at]) / np.diff(QUERIES)
        of_rows = np.append(of_rows, seconds[-1, at] / QUERIES[-1]) - of_tokens * contexts[at]
        planes = np.isfinite(of_rows) & np.isfinite(of_tokens)
        slopes, rises = of_rows[planes], of_tokens[planes]
        a_row = slopes[:, None] + rises[:, None] * contexts  # [planes, contexts]
        # the cheapest that a step of one row, or of an evicted one alone, allows
        offsets = np.nanmin(seconds - QUERIES[:, None] * a_row[:, None, :], axis=(1, 2))
        offsets = np.minimum(offsets, (again_s - a_row).min(axis=1))
        is_below = (offsets >= 0) & (a_row.min(axis=1) >= 0)
        # in proportion to rows: each at its cheapest, by the slope of large steps
        rate = rises[-1] if len(rises) else 0.0
        of_row = min(float(np.nanmin(seconds / QUERIES[:, None] - rate * contexts)),
                     float((again_s - rate * contexts).min()))
    at_mean = np.append((slopes + rises * demand.context)[is_below],
                        max(of_row + rate * demand.context, 0.0))
    offsets = np.append(offsets[is_below], 0.0)
    order = np.lexsort((offsets, at_mean))
    last = np.append(np.diff(at_mean[order]) > 0, True)  # of equal slopes the highest
    return Lines(*highest_lines(at_mean[order][last], offsets[order][last]))
