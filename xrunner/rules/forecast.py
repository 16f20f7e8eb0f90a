"""Forecasts of output lengths: how many tokens requests will write.

A request that has written as many tokens as forecast and goes on gets a new forecast: the mean of
the known outputs that are longer, E[L | L > written, input]. Beyond the longest known output it is
the request's cap. Known outputs are counted by range of input lengths. Each range has about as many
requests; there is one range where inputs say nothing of outputs.

Class k of width w holds the outputs k w + 1 to (k + 1) w, so that each class has w lengths."""

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np

from xgpt.core.controls import CAP, CLASS, DISTRIBUTION, FORECAST_VALUES, KNOWN, Forecasting
from xgpt.core.lengths import FloatArray, IntArray, JointLengths
from xgpt.core.problem import UNLIMITED, Problem, QueryLengths

PLANNED_WEIGHT = 100  # chosen: finished requests that a planned distribution counts as


# output tokens of a request: fewest, expected, most; UNLIMITED stands for its cap
Forecast = tuple[int, int, int]


class Forecaster(Protocol):
    """Forecasts of output tokens, which admission asks for. `cap`: the request's own limit."""

    def first(self, input_tokens: int, cap: int) -> int:
        """The forecast of a request that has written nothing, 1 to `cap`."""

    def beyond(self, input_tokens: int, written: int, cap: int) -> int:
        """The new forecast of a request that has outgrown its last one, `written` + 1 to `cap`."""

    def ended(self, input_tokens: int, written: int) -> None:
        """Learns from a request that has ended with `written` tokens."""


class KnownOutputs(NamedTuple):
    """Known output lengths. `edges`: [bins - 1] longest input of each range but the last.
    `counts`: [bins, longest + 1] requests of each range by output tokens."""

    edges: IntArray
    counts: FloatArray


@lru_cache(maxsize=16)
def known_outputs(lengths: JointLengths, bins: int, is_known: bool) -> KnownOutputs:
    """The output lengths of a distribution, in at most `bins` ranges of inputs. `is_known`: False
    for outputs that are only caps, which are not counted."""
    edges, pairs, outputs = np.zeros(0, np.int64), lengths.pairs, lengths.outputs
    if pairs is not None and len(pairs) >= bins:
        inputs = np.sort(pairs[:, 0]).astype(np.int64)
        edges = np.unique(inputs[np.arange(1, bins) * len(inputs) // bins - 1])
        edges = edges[edges < inputs[-1]]
    counts = np.zeros((len(edges) + 1, outputs.max + 1 if is_known else 1))
    if is_known and pairs is not None:
        np.add.at(counts, (np.searchsorted(edges, pairs[:, 0]), pairs[:, 1]), 1)
    elif is_known:
        counts[0, 1:] = outputs.pmf * (outputs.num_samples or PLANNED_WEIGHT)
    return KnownOutputs(edges, counts)


class LengthForecaster:
    """Forecasts by the kind that a job asks for, from known output lengths."""

    def __init__(self, forecasting: Forecasting, known: KnownOutputs, *,
                 learns: bool = False) -> None:
        """`learns`: whether finished requests count; only kinds made from them learn."""
        self.forecasting = forecasting
        self.value = FORECAST_VALUES.index(forecasting.use)  # place of what admission reads
        self.learns = learns and forecasting.is_learned
        self.known = known._replace(counts=known.counts.copy()) if self.learns else known
        self._rows: dict[int, tuple[Forecast, IntArray]] = {}  # by range, computed on demand

    def first(self, input_tokens: int, cap: int) -> int:
        return self.forecast(input_tokens, cap)[self.value]

    def forecast(self, input_tokens: int, cap: int) -> Forecast:
        """The forecast of a request that has written nothing, within its cap."""
        least, expected, most = self._row(self._bin(input_tokens))[0]
        return min(least, cap), min(expected, cap), min(most, cap)

    def beyond(self, input_tokens: int, written: int, cap: int) -> int:
        row = self._row(self._bin(input_tokens))[1]
        return min(int(row[written]), cap) if written < len(row) else cap

    def ended(self, input_tokens: int, written: int) -> None:
        if not self.learns:
            return
        counts, row = self.known.counts, self._bin(input_tokens)
        if (more := written + 1 - counts.shape[1]) > 0:
            # chosen: a table grows by a quarter, since each growth copies it
            counts = np.pad(counts, ((0, 0), (0, more + counts.shape[1] // 4)))
            self.known = self.known._replace(counts=counts)
        counts[row, written] += 1
        self._rows.pop(row, None)

    def bins_of(self, inputs: IntArray) -> IntArray:
        """The range of each input length, [requests]."""
        return np.searchsorted(self.known.edges, inputs)

    @property
    def beyond_table(self) -> IntArray:
        """New forecasts by range and tokens written, [bins, longest + 1]; UNLIMITED for the cap."""
        return np.stack([self._row(row)[1] for row in range(len(self.known.counts))])

    def forecasts(self, queries: QueryLengths, seed: int) -> IntArray:
        """(least, expected, most) output tokens of each request, [requests, 3], within its cap.
        `seed`: of simulated classes."""
        own, caps = self.forecasting, queries.most_outputs
        outputs = caps if queries.outputs is None else queries.outputs
        if own.kind == KNOWN:
            found = np.repeat(outputs[:, None], 3, axis=1)
        elif own.needs_outputs:
            found = np.add.outer(_drawn_classes(outputs, caps, own, seed) * own.width,
                                 [1, (own.width + 1) // 2, own.width])
        else:
            rows = np.array([self._row(row)[0] for row in range(len(self.known.counts))])
            found = rows[self.bins_of(queries.inputs)]
        return np.clip(found, 1, caps[:, None])

    def _bin(self, input_tokens: int) -> int:
        return int(np.searchsorted(self.known.edges, input_tokens))

    def _row(self, row: int) -> tuple[Forecast, IntArray]:
        """(first forecast, new forecasts by tokens written) of a range of inputs."""
        if row in self._rows:
            return self._rows[row]
        counts, kind, width = self.known.counts[row], self.forecasting.kind, self.forecasting.width
        beyond = _mean_beyond(counts)
        mean = int(beyond[0])
        first = mean, mean, mean
        if kind == CAP or mean == UNLIMITED:
            first = UNLIMITED, UNLIMITED, UNLIMITED
        elif kind == DISTRIBUTION:
            first = 1, mean, UNLIMITED
        elif kind == CLASS:
            sums = np.add.reduceat(counts[1:], np.arange(0, len(counts) - 1, width))
            below = int(sums.argmax()) * width
            first = below + 1, below + (width + 1) // 2, below + width
        self._rows[row] = first, beyond
        return first, beyond


def forecaster_of(problem: Problem, forecasting: Forecasting, *,
                  learns: bool = False) -> LengthForecaster:
    """The forecaster of a job, from requests that earlier runs finished, else from the planned
    lengths. `learns`: as of LengthForecaster."""
    known = known_outputs(problem.learned or problem.lengths, forecasting.bins,
                          problem.learned is not None or not problem.observes)
    return LengthForecaster(forecasting, known, learns=learns)


def with_forecasts(queries: QueryLengths, problem: Problem,
                   forecasting: Forecasting) -> QueryLengths:
    """`queries` with their forecasts, unless they have some, or are forecast at their caps."""
    if forecasting.kind == CAP or queries.forecasts is not None:
        return queries
    return replace(queries, forecasts=forecaster_of(problem, forecasting).forecasts(
        queries, problem.seed))


def _mean_beyond(counts: FloatArray) -> IntArray:
    """Mean of the lengths above each, rounded, [longest + 1]; UNLIMITED where there is none."""
    size = np.arange(len(counts))
    number, tokens = (np.append(own[::-1].cumsum()[::-1][1:], 0.0) for own in (
        counts, counts * size))
    mean = np.rint(tokens / np.where(number > 0, number, 1.0)).astype(np.int64)
    return np.asarray(np.where(number > 0, np.maximum(mean, size + 1), UNLIMITED))


def _drawn_classes(outputs: IntArray, caps: IntArray, own: Forecasting, seed: int) -> IntArray:
    """Classes that a classifier of the stated accuracy finds, [requests]: the right one that often,
    else a neighbour."""
    right, top = (outputs - 1) // own.width, (caps - 1) // own.width
    is_wrong, is_above = np.random.default_rng((seed, 2)).random((2, len(outputs))) >= (
        [own.accuracy], [0.5])
    near = np.where((is_above & (right < top)) | (right == 0), right + 1, right - 1)
    return np.clip(np.where(is_wrong, near, right), 0, top)
