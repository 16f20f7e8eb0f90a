"""How many queries, and how many tokens of context, are present at each decode iteration of RRA.

Exact in steady state by Little's law (design.md section 3.2; the paper's section 6 uses E[1/c]
where 1/E[c] is right). Symbols: N_D = decode_iterations, D = decode iterations a query needs
(S - 1 for decoder-only models, whose encode yields the first token; S otherwise), B_E = queries
encoded per phase, u = iteration within a phase, j = phases a query has already been through.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import special

from xgpt.core.lengths import FloatArray, JointLengths
from xsimulator.absence import Absence
from xsimulator.longest_context import LongestContext, expected_maximum
from xsimulator.query_course import QueryCourse


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Occupancy:
    """Per query encoded in each phase, so everything but the quantiles scales with B_E.

    `active[u - 1]` = n(u) / B_E, `context[u - 1]` = tokens of KV read at u / B_E;
    `log_absent[u - 1, k]` = log P(a group that encodes g = 2^GROUP_OCTAVES[k] queries a phase has
    none active at u). g < 1: the odd queries of a batch go round the groups, so that such a group
    encodes one query every 1/g phases.
    """

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


class QueryFlow:
    """Derives an Occupancy for any N_D from the joint distribution of lengths; keeps each."""

    def __init__(self, lengths: JointLengths, *, is_encoder_decoder: bool,
                 reserved_output_tokens: int = 0) -> None:
        """`reserved_output_tokens`: output tokens a query may generate, and so reserves, where that
        is more than the distribution's longest."""
        self.lengths = lengths
        self.course = QueryCourse(lengths, is_encoder_decoder=is_encoder_decoder,
                                  reserved_output_tokens=reserved_output_tokens)
        self.longest = LongestContext(self.course)
        # more decode iterations a phase than `max_iterations` change nothing
        self.max_iterations, self.iterations_of = (
            self.course.max_iterations, self.course.iterations_of)
        self.mean_iterations = float(self.course.survival.sum())  # E[D]
        self.max_reserve_tokens = self.course.max_reserve_tokens
        # no mean context at an iteration is larger
        self.largest_context = float(lengths.inputs.max + self.max_iterations)
        self._known: dict[tuple[int, bool], Occupancy] = {}
        # of the N_D last asked for: one is worked out at a time
        self._last_absence: tuple[int, Absence] | None = None
        self._read_until: dict[int, FloatArray] = {}
        self._last_own: tuple[tuple[int, int], tuple[FloatArray, FloatArray]] | None = None

    def least_variance(self, fewest: int, most: int, count: int) -> FloatArray:
        """[count] no N_D from `fewest` to `most` has a lower `variance_active` at iterations
        1..count: a query's share, S (1 - S) of its survival S, rises and then falls with the
        iteration, so that over a range of iterations it is least at an end."""
        share = self.course.survival * (1 - self.course.survival)
        total: FloatArray = np.zeros(count)
        for phase in range(-(-len(share) // fewest)):
            first, last = (np.zeros(count), np.zeros(count))
            for part, begin in ((first, phase * fewest), (last, phase * most)):
                known = share[begin:begin + count]
                part[: len(known)] = known
            total += np.minimum(first, last)
        return total

    def context_read_until(self, iterations: int) -> FloatArray:
        """[N_D = 1..max] tokens of context that are read while a query goes through that many
        decode iterations, by all queries present, per query encoded in each phase."""
        known = self._read_until.get(iterations)
        if known is None:
            n_d = np.arange(1, self.max_iterations + 1)
            before, left = np.divmod(iterations - 1, n_d)
            left += 1  # of the last phase
            read = np.append(0.0, np.cumsum(self.course.context))
            last = len(read) - 1
            known = before * read[-1]
            for phase in range(last):
                begin = phase * n_d
                is_there = begin < last
                if not is_there.any():
                    break
                known = known + np.where(is_there, read[np.minimum(begin + left, last)]
                                         - read[np.minimum(begin, last)], 0.0)
            self._read_until[iterations] = known
        return known

    def occupancy(self, decode_iterations: int, *, padded: bool) -> Occupancy:
        """The steady state with `decode_iterations` between two encodings."""
        assert decode_iterations >= 1, f"{decode_iterations = }"
        key = (decode_iterations, padded)
        if key not in self._known:
            self._known[key] = self._derive(decode_iterations, padded)
        return self._known[key]

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
        survival, context, reserve, reserve_squared = self._by_phase(self.course.by_iteration, n_d)
        entering = survival[:, 0]  # who is present when phase j begins
        reserve, reserve_squared = reserve[:, 0].copy(), reserve_squared[:, 0].copy()
        # at j = 0 every query is there, those that will end with their first token too
        reserve[0], reserve_squared[0] = self.course.all_reserve
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
            variance_reserved=float((reserve_squared - reserve**2).sum()),
            max_present=len(entering),
            maximum_context=(
                self.longest.expected(n_d, np.arange(n_d)) if padded else None),
        )

    def own_absent(self, decode_iterations: int, phases_before: int) -> tuple[FloatArray,
                                                                               FloatArray]:
        """[N_D, octaves] chances that nobody else is active in the group of a query that is in its
        phase number `phases_before`: in the mean of the phases before, and in that one. (Of any
        group, log_absent has their logarithms.)"""
        key = (decode_iterations, phases_before)
        if self._last_own is None or self._last_own[0] != key:
            absence = self._absence(decode_iterations)
            always = absence.of_multiples
            before, last = (np.stack([*absence.mean_of(phases), *always], axis=1) for phases in (
                np.arange(max(phases_before, 1)), np.array([phases_before])))
            self._last_own = key, (before, last)
        return self._last_own[1]

    def _absence(self, n_d: int) -> Absence:
        """The chances at this N_D, kept until another is asked for."""
        if self._last_absence is None or self._last_absence[0] != n_d:
            survival = self._by_phase(self.course.survival[None], n_d)[0]
            self._last_absence = n_d, Absence(survival)
        return self._last_absence[1]

    @staticmethod
    def _by_phase(rows: FloatArray, n_d: int) -> FloatArray:
        """[rows, D max] -> [rows, phases, N_D], zero beyond the end."""
        phases = -(-rows.shape[1] // n_d)
        padded = np.zeros((len(rows), phases * n_d))
        padded[:, : rows.shape[1]] = rows
        return padded.reshape(len(rows), phases, n_d)


def expected_maximum_z(count: FloatArray) -> FloatArray:
    """Expected largest of `count` standard normals (Blom's approximation); 0 for one or fewer."""
    many = np.maximum(count, 1.0)
    return np.asarray(special.ndtri((many - 0.375) / (many + 0.25)))
