"""How many queries, and how many tokens of context, are present at each decode iteration of RRA.

Exact in steady state by Little's law (docs/design.md; the paper's section 6 uses E[1/c]
where 1/E[c] is right). Symbols: N_D = decode_iterations, D = decode iterations a query needs
(S - 1 for decoder-only models, whose encode yields the first token; S otherwise), B_E = queries
encoded per phase, u = iteration within a phase, j = phases a query has already been through."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from threading import Lock
from typing import Any

import numpy as np

from xgpt.core.lengths import FloatArray, IntArray, JointLengths
from xgpt.core.normal import ndtri
from xgpt.core.problem import Problem
from xsimulator.addresses import address_of
from xsimulator.longest_context import LongestContext, expected_maximum

GROUP_OCTAVES = np.arange(-6, 9)  # queries encoded in a group, as powers of 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Occupancy:
    """Per query encoded in each phase, so everything but the quantiles scales with B_E.

    `active[u - 1]` = n(u) / B_E, `context[u - 1]` = tokens of KV read at u / B_E;
    `log_absent[u - 1, k]` = log P(a group that encodes g = 2^GROUP_OCTAVES[k] queries a phase has
    none active at u). g < 1: the odd queries of a batch go round the groups, so that such a group
    encodes one query every 1/g phases."""

    decode_iterations: int
    active: FloatArray  # [N_D]
    context: FloatArray  # [N_D]
    variance_active: FloatArray  # [N_D] of the number active at u, per query encoded in each phase
    removed: FloatArray  # [N_D] queries that ended with the iteration before u, per one encoded
    log_absent: FloatArray  # [N_D, octaves]; -inf where one is active for certain
    mean_phases: float  # E[c(D)] = B_D / B_E
    mean_present: float  # queries present right after encoding / B_E, those with D = 0 included
    mean_reserved: float  # tokens reserved right after encoding / B_E
    variance_reserved: float
    max_present: int  # phases a query can stay at most
    maximum_context: FloatArray | None  # [N_D, doublings + 1] E[max context of 2^k active]


_flows: dict[tuple[object, ...], QueryFlow] = {}
_MOST_FLOWS = 4  # kept, the latest
_flows_lock = Lock()  # a job that runs is planned anew in a thread


def flow_of(problem: Problem) -> QueryFlow:
    """The flow of a problem's queries, which does not depend on the devices: all policies, on parts
    of any size, look into the same one."""
    lengths, reserved = problem.lengths, problem.default_max_tokens
    key = id(lengths), problem.model.is_encoder_decoder, reserved
    with _flows_lock:
        flow = _flows.pop(key, None) or QueryFlow(
            lengths, is_encoder_decoder=problem.model.is_encoder_decoder,
            reserved_output_tokens=reserved)
        while len(_flows) >= _MOST_FLOWS:
            del _flows[next(iter(_flows))]
        _flows[key] = flow  # as the last; it holds its lengths, so no others have that id
    return flow


class QueryFlow:
    """Derives an Occupancy for any N_D from the joint distribution of lengths; keeps each. Arrays
    [D max] are over a query's own iterations k = 1..max D."""

    def __init__(self, lengths: JointLengths, *, is_encoder_decoder: bool,
                 reserved_output_tokens: int = 0) -> None:
        """`reserved_output_tokens`: output tokens a query may generate, and so reserves, where that
        is more than the distribution's longest."""
        self.lengths, pmf = lengths, lengths.outputs.pmf
        self.tables: dict[Hashable, Any] = {}  # that others derive from it, and share
        self.iterations_fewer = 0 if is_encoder_decoder else 1
        # largest D, at least 1: more decode iterations a phase change nothing
        self.max_iterations = max(lengths.outputs.max - self.iterations_fewer, 1)
        # no mean context at an iteration is larger
        self.largest_context = float(lengths.inputs.max + self.max_iterations)
        most_output = max(reserved_output_tokens, lengths.outputs.max)
        # KV tokens that the longest query reserves at admission
        self.max_reserve_tokens = lengths.inputs.max + most_output
        self._survival: FloatArray = np.minimum(self._tail(pmf), 1.0)  # P(D >= k)
        self.mean_iterations = float(self._survival.sum())  # E[D]
        # [D max] a query's share in the variance of the number active
        self.survival_spread: FloatArray = self._survival * (1 - self._survival)
        mean = lengths.mean_input_given_output()
        # E[(input + k) 1{D >= k}]: tokens of KV read at a query's k-th decode iteration
        self.context: FloatArray = self._tail(pmf * mean) + self._survival * np.arange(
            1, self.max_iterations + 1)
        square = inputs_given_output(lengths, power=2)
        reserve = pmf * (mean + most_output)
        reserve_squared = pmf * (square + 2 * most_output * mean + most_output**2)
        # what is reserved, and its square, over all queries, those with D = 0 included
        self._all_reserve = float(reserve.sum()), float(reserve_squared.sum())
        # mean and variance of what one query reserves
        self.reserve_moments = (self._all_reserve[0], max(
            self._all_reserve[1] - self._all_reserve[0]**2, 0.0))
        # [4, D max] P(D >= k), context, and what is reserved, with its square
        self._by_iteration = np.stack([
            self._survival, self.context, self._tail(reserve), self._tail(reserve_squared)])
        self.longest = LongestContext(lengths, self._survival, self.iterations_fewer)
        self._derived = cache(self._derive)
        self._absence = lru_cache(maxsize=1)(lambda n_d: Absence(  # one is asked for at a time
            self._by_phase(self._survival[None], n_d)[0]))
        self.own_absent = lru_cache(maxsize=1)(self._find_own_absent)
        self.context_read_until = cache(self._find_context_read)

    @cached_property
    def described(self) -> tuple[IntArray, FloatArray]:
        """The C structure Flow of csrc/planning_phases.cpp, and what it points to."""
        values = np.ascontiguousarray(self._by_iteration)
        reserved = np.array(self._all_reserve).view(np.int64)
        return np.array([address_of(values), values.shape[1], *reserved], np.int64), values

    def iterations_of(self, output_tokens: int) -> int:
        """D of a query with that many output tokens."""
        return output_tokens - self.iterations_fewer

    def _tail(self, per_output: FloatArray) -> FloatArray:
        """Sums over D >= k, k = 1..max, of what `per_output` gives for each output length."""
        tail = np.cumsum(per_output[::-1])[::-1][self.iterations_fewer:]
        return tail if tail.size else np.zeros(1)

    def least_variance(self, fewest: int, most: int, count: int) -> FloatArray:
        """[count] no N_D from `fewest` to `most` has a lower `variance_active` at iterations
        1..count: a query's share, S (1 - S) of its survival S, rises and then falls with the
        iteration, so that over a range of iterations it is least at an end."""
        share = self.survival_spread
        total: FloatArray = np.zeros(count)
        for phase in range(-(-len(share) // most)):  # later ones are empty at `most`
            first, last = (np.zeros(count), np.zeros(count))
            for part, begin in ((first, phase * fewest), (last, phase * most)):
                known = share[begin:begin + count]
                part[: len(known)] = known
            total += np.minimum(first, last)
        return total

    def _find_context_read(self, iterations: int) -> FloatArray:
        """[N_D = 1..max] tokens of context that are read while a query goes through that many
        decode iterations, by all queries present, per query encoded in each phase."""
        n_d = np.arange(1, self.max_iterations + 1)
        before, left = np.divmod(iterations - 1, n_d)
        left += 1  # of the last phase
        read = np.append(0.0, np.cumsum(self.context))
        last = len(read) - 1
        tokens: FloatArray = before * read[-1]
        few = math.isqrt(last)  # of short phases each N_D, of long ones each phase: both are few
        for own, each in enumerate(n_d[:few].tolist()):
            begin = np.arange(0, last, each)
            terms = read[np.minimum(begin + left[own], last)] - read[begin]
            tokens[own] = np.cumsum(np.append(tokens[own], terms))[-1]
        n_d, left, long = n_d[few:], left[few:], tokens[few:]
        for phase in range(-(-last // (few + 1)) if len(n_d) else 0):
            begin = np.minimum(phase * n_d, last)
            long += read[np.minimum(begin + left, last)] - read[begin]
        return tokens

    def occupancy(self, decode_iterations: int, *, padded: bool) -> Occupancy:
        """The steady state with `decode_iterations` between two encodings."""
        assert decode_iterations >= 1, f"{decode_iterations = }"
        return self._derived(decode_iterations, padded)

    def charged_context(self, queries: FloatArray, *, padded: bool) -> FloatArray:
        """[configs] tokens of context that each of so many queries decoding together is charged,
        where queries join at every iteration."""
        occupancy = self.occupancy(1, padded=padded)
        mean = float(occupancy.context[0]) / max(float(occupancy.active[0]), 1e-300)
        if occupancy.maximum_context is None:
            return np.full(queries.shape, mean)
        return np.maximum(mean, expected_maximum(
            occupancy.maximum_context, queries[..., None])[..., 0])

    def _derive(self, n_d: int, padded: bool) -> Occupancy:
        # [phases, N_D] P(D >= j N_D + u), context, and what is reserved, with its square
        survival, context, reserve, reserve_squared = self._by_phase(self._by_iteration, n_d)
        entering = survival[:, 0]  # who is present when phase j begins
        reserve, reserve_squared = reserve[:, 0].copy(), reserve_squared[:, 0].copy()
        # at j = 0 every query is there, those that will end with their first token too
        reserve[0], reserve_squared[0] = self._all_reserve
        active = survival.sum(axis=0)
        staying = active.copy()
        staying[0] -= survival[0, 0]  # those new at u do not
        return Occupancy(
            decode_iterations=n_d, active=active, context=context.sum(axis=0),
            removed=np.maximum(np.roll(active, 1) - staying, 0.0),
            variance_active=(survival * (1 - survival)).sum(axis=0),
            log_absent=self._absence(n_d).log_mean(),
            mean_phases=float(entering.sum()),
            mean_present=float(1.0 + entering[1:].sum()), mean_reserved=float(reserve.sum()),
            # rounding may leave less than nothing of lengths that are nearly one
            variance_reserved=max(float((reserve_squared - reserve**2).sum()), 0.0),
            max_present=len(entering),
            maximum_context=self.longest.expected(n_d, np.arange(n_d)) if padded else None)

    def _find_own_absent(self, decode_iterations: int,
                         phases_before: int) -> tuple[FloatArray, FloatArray]:
        """[N_D, octaves] chances that nobody else is active in the group of a query that is in its
        phase number `phases_before`: in the mean of the phases before, and in that one. (Of any
        group, log_absent has their logarithms.)"""
        absence = self._absence(decode_iterations)
        return (absence.mean_of(np.arange(max(phases_before, 1))),
                absence.mean_of(np.array([phases_before])))

    @staticmethod
    def _by_phase(rows: FloatArray, n_d: int) -> FloatArray:
        """[rows, D max] -> [rows, phases, N_D], zero beyond the end."""
        phases = -(-rows.shape[1] // n_d)
        padded = np.zeros((len(rows), phases * n_d))
        padded[:, : rows.shape[1]] = rows
        return padded.reshape(len(rows), phases, n_d)


class Absence:
    """Chances that none of a group's queries is active, at each iteration of a phase, by how many
    queries the group encodes (GROUP_OCTAVES) and, where that is one every so many phases, by how
    many phases ago it last did: its offset."""

    def __init__(self, survival: FloatArray) -> None:
        """survival: [phases, N_D] P(D >= j N_D + u)."""
        with np.errstate(divide="ignore"):
            logs = np.log1p(-np.minimum(survival, 1.0))
        # [N_D] for the octaves from 0 on: offsets make no difference there
        self._log_multiples = [logs.sum(axis=0) * 2.0**k for k in GROUP_OCTAVES if k >= 0]
        self._multiples = list(np.exp(self._log_multiples))
        self._strides: list[tuple[int, FloatArray]] = []  # (2^-octave, [offsets, N_D]) below 0
        for stride in (2 ** -GROUP_OCTAVES[GROUP_OCTAVES < 0]).tolist():
            # sums over the phases of one offset; offsets without a phase are certain, left out
            logs = _folded(logs, stride)
            self._strides.append((stride, np.exp(logs)))

    def log_mean(self) -> FloatArray:
        """[N_D, octaves] logarithm of the mean over offsets."""
        with np.errstate(divide="ignore", invalid="ignore"):
            octaves = [np.log((rows.sum(axis=0) + stride - len(rows)) / stride)
                       for stride, rows in self._strides]
        return np.stack([*octaves, *self._log_multiples], axis=1)

    def mean_of(self, phases: IntArray) -> FloatArray:
        """[N_D, octaves] mean over the offsets that these phases are at."""
        means = []
        for stride, rows in self._strides:
            at = phases % stride
            certain = int((at >= len(rows)).sum())
            means.append((rows[at[at < len(rows)]].sum(axis=0) + certain) / len(phases))
        return np.stack([*means, *self._multiples], axis=1)


def _folded(rows: FloatArray, stride: int) -> FloatArray:
    """Sums of rows that are `stride` apart: at most `stride` of them."""
    sums = rows[:stride].copy()
    for begin in range(stride, len(rows), stride):
        part = rows[begin:begin + stride]
        sums[: len(part)] += part
    return sums


def inputs_given_output(lengths: JointLengths, power: int) -> FloatArray:
    """E[input ** power | output = k], k = 1..max; the overall value where P(k) = 0."""
    inputs = lengths.inputs.support.astype(float) ** power
    overall = np.full(lengths.outputs.max, float(lengths.inputs.pmf @ inputs))
    if lengths.pairs is None:
        return overall
    outputs, size = lengths.pairs[:, 1], lengths.outputs.max + 1
    counts = np.bincount(outputs, minlength=size)[1:]
    sums = np.bincount(outputs, lengths.pairs[:, 0].astype(float) ** power, minlength=size)[1:]
    return np.where(counts > 0, sums / np.maximum(counts, 1), overall)


def expected_maximum_z(count: FloatArray) -> FloatArray:
    """Expected largest of `count` standard normals (Blom's approximation); 0 for one or fewer."""
    many = np.maximum(count, 1.0)
    if not (many > 1).any():
        return np.zeros_like(many)
    return ndtri((many - 0.375) / (many + 0.25))
