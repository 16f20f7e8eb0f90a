"""Length statistics for the rough formulas: how long requests stay in the system, and how many KV
tokens they hold.

Symbols: D = decode iterations of a request (output tokens, minus one if encoding yields the first),
S(k) = P(D >= k), N_D = decode iterations of a phase of RRA, c(D) = ceil(D / N_D) = phases that a
request stays."""

import math
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from xgpt.core.controls import Admission
from xgpt.core.lengths import FloatArray, JointLengths, ndtri
from xgpt.core.problem import Problem
from xsimulator import memory
from xsimulator.rough.look_ahead import LookAhead
from xsimulator.sharing import sharing_of

RESERVE = Admission(rule="reserve")
BLOCKS = np.array([0.0, 0.08, 0.25, 0.5, 0.75, 1.0])  # chosen: blocks of a phase's iterations


def expected_maximum_z(count: FloatArray) -> FloatArray:
    """Expected largest of `count` standard normals (Blom's approximation); 0 for one or fewer."""
    many = np.maximum(count, 1.0)
    return np.where(many > 1, ndtri((many - 0.375) / (many + 0.25)), 0.0)


class Phase(NamedTuple):
    """A phase of N_D iterations in steady state (RRA), per request encoded in it.

    widths: [blocks] iterations of each block of the phase. active: [blocks] mean number of active
    requests in it. mean_phases: E[c(D)]. counted, counted_variance: mean and variance of the KV
    tokens that admission counts right after encoding. most_phases: phases of the longest
    request."""

    widths: FloatArray
    active: FloatArray
    mean_phases: float
    counted: float
    counted_variance: float
    most_phases: int


class Workload:
    """Length statistics of one problem under one admission rule. `inputs`: tokens that a request
    encodes and holds. With shared prefixes they are its own and a share of all prefixes
    (xsimulator.sharing), and `longest_input`, `context` count whole inputs.

    tokens_at_work: mean KV tokens that admission counts for a request at work. variance_at_work:
    their variance, that of the number at work included. variance_of_each: without it."""

    def __init__(self, problem: Problem, admission: Admission = RESERVE, *,
                 shares: bool = False) -> None:
        """shares: whether the policy encodes shared prefixes once."""
        lengths: JointLengths = problem.lengths
        self.sharing = sharing = sharing_of(problem) if shares else None
        held = lengths if sharing is None else sharing.lengths(lengths, sharing.each)
        self.admission = admission
        self.inputs, self.outputs = held.inputs, lengths.outputs
        self.longest_input = lengths.inputs.max
        # mean tokens that no prefix holds, and tokens that prefixes hold between their requests
        self.own_input = held.inputs.mean - (0.0 if sharing is None else sharing.each)
        self.forest = 0 if sharing is None else sharing.forest
        self.fewer = 0 if problem.model.is_encoder_decoder else 1
        most_output = max(problem.default_max_tokens, lengths.outputs.max)
        self.longest = lengths.inputs.max + most_output  # tokens that the longest request reserves
        pmf, mean = lengths.outputs.pmf, lengths.mean_input_given_output()
        square = lengths.mean_input_given_output(power=2)
        self.survival = np.minimum(self._tail(pmf), 1.0)  # S(k), k = 1 ..
        self.iterations = max(float(self.survival.sum()), 1e-9)  # E[D]
        self.most_iterations = len(self.survival)
        # variance / mean of the number of requests in the system, if they come one by one
        self.coming_and_going = float((self.survival * (1 - self.survival)).sum()) / max(
            self.iterations, 1e-9)
        self.decoding_share = float(self.survival[0])  # share of requests with a decode iteration
        count = np.arange(1, self.most_iterations + 1)
        # KV tokens that a decoded row reads, summed over all iterations of all requests
        read = self._tail(pmf * mean) + self.survival * count
        read_square = (self._tail(pmf * square) + 2 * count * self._tail(pmf * mean)
                       + self.survival * count**2)
        self.context = float(read.sum()) / self.iterations
        self.context_std = math.sqrt(max(
            float(read_square.sum()) / self.iterations - self.context**2, 0.0))
        self.reserve = float(pmf @ mean) + most_output  # over all requests, as they come
        self._ahead = LookAhead(admission, held, most_output, self.fewer)
        counted = self._ahead.counted(has_ended=False)
        self.tokens_at_work = max(counted.mean / self.iterations, 1.0)
        self.variance_at_work = counted.variance / self.iterations
        self.variance_of_each = max(counted.square / self.iterations - self.tokens_at_work**2, 0.0)
        self._until = np.concatenate([[0.0], np.cumsum(self.survival)])
        self._below = np.minimum(np.concatenate([[0.0], np.cumsum(pmf)])[self.fewer:], 1.0)
        bound = problem.constraint
        # D of a request of the latency limit's quantile
        self.watched = max(self.outputs.quantile(bound.quantile) - self.fewer, 0)
        self.phase = cache(self._find_phase)
        self._other = cache(lambda *of: Workload(problem, of[0], shares=of[1]))
        self._has_prefixes = sharing_of(problem) is not None
        self.paces: dict[Any, Any] = {}  # stage times -> Pace, see Pace.of

    def by(self, admission: Admission, *, shares: bool = False) -> "Workload":
        """The statistics under another rule; `shares` as of the constructor."""
        key = admission, shares and self._has_prefixes
        return self if key == (self.admission, self.sharing is not None) else self._other(*key)

    def charged_context(self, rows: FloatArray, *, is_padded: bool) -> FloatArray:
        """Context tokens that each of `rows` decoded together costs: the mean context, or the
        expected longest one if the kernel pads (is_padded)."""
        if not is_padded:
            return np.full(np.shape(rows), self.context)
        longest = self.context + self.context_std * expected_maximum_z(np.asarray(rows, float))
        return np.minimum(longest, self.longest_input + self.most_iterations)

    def largest_rows(self, encode: FloatArray) -> FloatArray:
        """[configs] tokens of an encode step of `encode` requests that is hardly ever exceeded."""
        if self.sharing is None:
            return memory.largest_rows(self.inputs, encode)
        return self.sharing.most_encoded(encode)

    def rounds(self, batch: FloatArray, least: int = 0) -> FloatArray:
        """[configs] mean of the largest D of `batch` requests, one of which has `least` or more."""
        sizes, place = np.unique(batch, return_inverse=True)
        not_done = 1 - self._below[None, :-1] ** sizes[:, None]
        not_done[:, :least] = 1.0
        return np.asarray(not_done.sum(axis=1)[place])

    def _find_phase(self, iterations: int) -> Phase:
        phases = -(-self.most_iterations // iterations)
        begins = np.arange(phases)[:, None] * iterations
        edges = np.unique(np.round(BLOCKS * iterations))
        until = self._until[np.minimum(begins + edges.astype(np.int64), self.most_iterations)]
        widths = np.diff(edges)
        active = np.diff(until, axis=1).sum(axis=0) / widths
        entering = self.survival[begins[:, 0]]  # share that is present in each of its phases
        counted = self._ahead.counted(iterations)
        return Phase(widths, active, float(entering.sum()), counted.mean, counted.variance, phases)

    def _tail(self, per_output: FloatArray) -> FloatArray:
        """[D] sums of `per_output` (by output length) over all D >= k, for k = 1 ..."""
        tail = np.cumsum(per_output[::-1])[::-1][self.fewer:]
        return tail if tail.size else np.zeros(1)
