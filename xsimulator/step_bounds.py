"""Seconds of one pool's steps, at least, whatever their sizes: convex functions of the rows in the
mean, for xsimulator.bound."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np

from xgpt.core.lengths import FloatArray
from xsimulator.convex_steps import ConvexTimes, highest_lines
from xsimulator.demand import Demand
from xsimulator.layer_times import TOGETHER, LayerTimes
from xsimulator.plans import StagePlan

MOST_ROWS = 2.0**20  # chosen: of a cycle
QUERIES: FloatArray = 2.0 ** np.arange(0, 17, 0.5)  # chosen: at which decode attention is looked at
CONTEXTS = 24  # chosen
_BATCHES: FloatArray = np.array(TOGETHER, float)


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


class PoolSteps:
    """The steps of one pool. Arrays [resources, ...] hold what a step keeps busy: each kind of
    stages, or, where ranks share cores, their mean besides."""

    def __init__(self, plan: StagePlan, num_devices: int, demand: Demand,
                 lines: Callable[[LayerTimes, int], Lines]) -> None:
        """`num_devices`: of the problem, pools of other stages included. `lines`: below a layer's
        decode attention in groups of a degree (attention_lines)."""
        self._demand, self._lines = demand, lines
        self._layers, self._steps = plan.times.layers, plan.convex_steps
        self._number = np.array(self._steps.number, float)
        first = [plan.kinds.kind_of.index(kind) for kind in range(len(self._number))]
        self._decoder_layers, self._encode_layers = (
            own[first] for own in (plan.times.decoder_layers, plan.times.encode_layers))
        self._is_apart = plan.times.is_encoder_decoder
        self._sharing = self._layers.timing.facts.sharing
        # each kind's share of all devices
        self._weights = self._number * self._steps.degrees / num_devices
        self.of_share = cache(self._find)

    def _find(self, share: float) -> StepBounds:
        """Of a pool that encodes this share of the queries whose rows it decodes."""
        demand, head, head_rows = self._demand, self._steps.head, self._layers.head_rows
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

    def encode_s(self, batches: FloatArray) -> tuple[FloatArray, FloatArray]:
        """([batches] seconds that one keeps the busiest stage, seconds through all stages), where
        this pool encodes alone."""
        work = self._encoding(batches * self._demand.inputs, batches, self._mean_attention_s)
        return np.asarray(self._resources(work).max(axis=0)), self._path_s(work)

    @cached_property
    def most_encode_qps(self) -> float:
        """Queries/s of the largest batches, where this pool encodes alone."""
        huge = np.array([MOST_ROWS])  # of which the fixed costs are next to nothing
        return float(MOST_ROWS / self.encode_s(huge)[0][0])

    @cached_property
    def own_s(self) -> float:
        """Seconds of encoding the query that the bound is for, through all stages."""
        return self.alone_s(self._demand.watched_inputs)

    def alone_s(self, inputs: float) -> float:
        """Seconds of encoding one query, through all stages."""
        attention_s = np.array([self._layers.encode_attention_s(
            inputs, _BATCHES, degree).min() for degree in self._steps.degrees])
        work = self._encoding(np.array([inputs]), np.ones(1), attention_s)
        return float(self._path_s(work)[0])

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
        return np.array([self._layers.mean_attention_s(_BATCHES, degree).min()
                         for degree in self._steps.degrees])

    @cached_property
    def _attention(self) -> list[Lines]:
        """[kinds] a layer's decode attention."""
        return [self._lines(self._layers, degree) if self._decoder_layers.any() else NO_LINES
                for degree in self._steps.degrees]


NO_LINES = Lines(np.zeros(1), np.zeros(1), np.empty(0))
def attention_lines(layers: LayerTimes, degree: int, demand: Demand) -> Lines:
    """Below a layer's decode attention for the mean over steps of any rows and contexts, whose mean
    context is the demand's: planes below the seconds of so many queries and so many tokens in all,
    each nearly touching at one number of queries. A row that is encoded again instead, after it was
    evicted, takes no less."""
    low, high = demand.contexts
    contexts = np.sort(np.append(np.geomspace(low, high, CONTEXTS), demand.context))
    seconds = layers.decode_attention_s(QUERIES[:, None], contexts[None, :], degree)
    again_s = layers.encode_attention_s(contexts[:, None], _BATCHES,
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
