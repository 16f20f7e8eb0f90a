"""Lower bounds on the step times of one pool, as convex functions of the mean number of rows, for
xsimulator.bound."""

from collections.abc import Callable
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np

from xgpt.core.lengths import FloatArray
from xsimulator.convex_steps import MOST_ROWS, ConvexTimes, highest_lines
from xsimulator.demand import Demand
from xsimulator.layer_times import TOGETHER, LayerTimes
from xsimulator.plans import StagePlan

POINTS = 32  # chosen: numbers of requests, and contexts, at which decode attention is sampled
QUERIES: FloatArray = np.geomspace(1, MOST_ROWS, POINTS)
_BATCHES: FloatArray = np.array(TOGETHER, float)


class Lines(NamedTuple):
    """Lower bound on the seconds of decode attention: max over [lines] of offset + slope x rows."""

    slopes: FloatArray
    offsets: FloatArray
    begins: FloatArray  # [lines - 1] rows from which on each line after the first is the largest

    def mean_s(self, rows: FloatArray) -> FloatArray:
        """Lower bound on the mean seconds of steps with `rows` rows in the mean."""
        place = np.searchsorted(self.begins, rows, side="right")
        return np.asarray(self.offsets[place] + self.slopes[place] * rows)


class StepBounds(NamedTuple):
    """Lower bounds on the seconds of a group's steps by the rows that it decodes, at all kinks
    [nodes] of the convex functions. Between kinks they are linear."""

    rows: FloatArray
    busy_s: FloatArray  # [resources, nodes] with the encoding of the requests for these rows
    alone_s: FloatArray  # [resources, nodes] without
    path_s: FloatArray  # [nodes] through all stages, without encoding

    def at(self, which: FloatArray, rows: FloatArray) -> FloatArray:
        """[..., m] the array `which` of these bounds, interpolated at `rows`."""
        if which.ndim == 1:
            return np.asarray(np.interp(rows, self.rows, which))
        return np.array([np.interp(rows, self.rows, own) for own in which])


class PoolSteps:
    """Lower bounds on the step times of one pool. Arrays [resources, ...] are over the kinds of
    stages and, if ranks share cores, their mean."""

    def __init__(self, plan: StagePlan, num_devices: int, demand: Demand,
                 lines: Callable[[LayerTimes, int], Lines]) -> None:
        """num_devices: devices of the problem, both pools together. lines: see attention_lines."""
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
        self.of_share = cache(self._bounds_of_share)

    def _bounds_of_share(self, share: float) -> StepBounds:
        """Bounds on the step times of a pool that encodes this share of its requests."""
        demand, head, head_rows = self._demand, self._steps.head, self._layers.head_rows
        encoded = share / demand.iterations  # requests for a row
        tokens = 1 + encoded * demand.inputs * (not self._is_apart)  # encoded and decoded for a row
        heads = 1 / head_rows + encoded
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
            encode_s = rows * encoded * self._encode_layers[kind] * self._mean_attention_s[kind]
            if self._is_apart:  # encoder and decoder layers share no pass
                token_s = self._steps.rows[kind].lines[0][-1]  # of the largest steps
                encode_s = encode_s + rows * encoded * demand.inputs * token_s
            has_head = kind == self._steps.last and not self._is_apart
            for found, by, head_by, more_s in ((alone, 1.0, 1 / head_rows, 0.0),
                                               (busy, tokens, heads, encode_s)):
                found.append(of_rows.mean_s(rows * by) + attention_s + more_s + (
                    head.mean_s(rows * head_by) if has_head else 0.0))
        work = np.array(alone)
        return StepBounds(rows, self._resources(np.array(busy)), self._resources(work),
                          self._path_s(work))

    def encode_s(self, batches: FloatArray) -> tuple[FloatArray, FloatArray]:
        """[batches] seconds of an encode step: (on the busiest stage, through all stages)."""
        work = self._encoding(batches * self._demand.inputs, batches, self._mean_attention_s)
        return np.asarray(self._resources(work).max(axis=0)), self._path_s(work)

    @cached_property
    def most_encode_qps(self) -> float:
        """Upper bound, requests/s, if the pool only encodes."""
        huge = np.array([MOST_ROWS])  # fixed costs are negligible
        return float(MOST_ROWS / self.encode_s(huge)[0][0])

    @cached_property
    def encode_watched_s(self) -> float:
        """Seconds through all stages to encode a request of the latency limit's quantile, alone."""
        return self.encode_one_s(self._demand.watched_inputs)

    def encode_one_s(self, inputs: float) -> float:
        """Seconds through all stages to encode one request of `inputs` tokens, alone."""
        attention_s = np.array([self._layers.encode_attention_s(
            inputs, _BATCHES, degree).min() for degree in self._steps.degrees])
        work = self._encoding(np.array([inputs]), np.ones(1), attention_s)
        return float(self._path_s(work)[0])

    def _encoding(self, tokens: FloatArray, queries: FloatArray,
                  attention_s: FloatArray) -> FloatArray:
        """[kinds, batches] seconds of steps that only encode."""
        work = [rows.mean_s(tokens) + queries * layers * own for rows, layers, own in zip(
            self._steps.rows, self._encode_layers, attention_s, strict=True)]
        if not self._is_apart:
            work[self._steps.last] = work[self._steps.last] + self._steps.head.mean_s(queries)
        return np.array(work)

    def _resources(self, work: FloatArray) -> FloatArray:
        """[resources, m] seconds of work, from [kinds, m]."""
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
        """[kinds] seconds of a layer's encode attention of one request, at its cheapest batch."""
        return np.array([self._layers.mean_attention_s(
            _BATCHES, degree, self._demand.attended).min()
                         for degree in self._steps.degrees])

    @cached_property
    def _attention(self) -> list[Lines]:
        """[kinds] lower bounds on the seconds of a layer's decode attention."""
        return [self._lines(self._layers, degree) if self._decoder_layers.any() else NO_LINES
                for degree in self._steps.degrees]


NO_LINES = Lines(np.zeros(1), np.zeros(1), np.empty(0))


def attention_lines(layers: LayerTimes, degree: int, demand: Demand) -> Lines:
    """Lower bound on the mean seconds of a layer's decode attention, over any mix of steps with the
    demand's mean context. It is made of planes below seconds(requests, total tokens), each nearly
    touching at one number of requests. Evicted requests that are encoded again count, too."""
    low, high = demand.contexts
    contexts = np.sort(np.append(np.geomspace(low, high, POINTS), demand.context))
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
        # largest offsets that keep each plane below all steps, and below re-encoding
        offsets = np.nanmin(seconds - QUERIES[:, None] * a_row[:, None, :], axis=(1, 2))
        offsets = np.minimum(offsets, (again_s - a_row).min(axis=1))
        is_below = (offsets >= 0) & (a_row.min(axis=1) >= 0)
        # one line through the origin: the cheapest row, with the slope of large steps
        rate = rises[-1] if len(rises) else 0.0
        of_row = min(float(np.nanmin(seconds / QUERIES[:, None] - rate * contexts)),
                     float((again_s - rate * contexts).min()))
    at_mean = np.append((slopes + rises * demand.context)[is_below],
                        max(of_row + rate * demand.context, 0.0))
    offsets = np.append(offsets[is_below], 0.0)
    order = np.lexsort((offsets, at_mean))
    last = np.append(np.diff(at_mean[order]) > 0, True)  # the highest of equal slopes
    return Lines(*highest_lines(at_mean[order][last], offsets[order][last]))
