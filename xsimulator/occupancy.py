"""How many queries, and how many tokens of context, are present at each decode iteration of RRA.

Exact in steady state by Little's law (design.md section 3.2; the paper's section 6 uses E[1/c]
where 1/E[c] is right). Symbols: N_D = decode_iterations, D = decode iterations a query needs
(S - 1 for decoder-only models, whose encode yields the first token; S otherwise), B_E = queries
encoded per phase, u = iteration within a phase, j = phases a query has already been through.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy import special

from xgpt.core.lengths import FloatArray, IntArray, JointLengths

MAX_CONTEXT_BINS = 512  # resolution of the context histograms behind `maximum_context`
MAX_DOUBLINGS = 12  # maxima are tabulated over 1, 2, 4, ... 4096 queries
GROUP_OCTAVES = np.arange(-6, 9)  # queries encoded in a group, as powers of 2
MAX_PAIRS = 4096  # observed (input, output) pairs used for those histograms; more are thinned out


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
    maximum_context: FloatArray | None  # [N_D, MAX_DOUBLINGS + 1] E[max context of 2^k active]


class QueryFlow:
    """Derives an Occupancy for any N_D from the joint distribution of lengths; keeps each."""

    def __init__(self, lengths: JointLengths, *, is_encoder_decoder: bool,
                 reserved_output_tokens: int = 0) -> None:
        """`reserved_output_tokens`: output tokens a query may generate, and so reserves, where that
        is more than the distribution's longest."""
        self.lengths = lengths
        self._reserved_output_tokens = max(reserved_output_tokens, lengths.outputs.max)
        self._iterations_fewer = 0 if is_encoder_decoder else 1
        self._known: dict[tuple[int, bool], Occupancy] = {}
        # of the N_D last asked for: one is worked out at a time
        self._last_absence: tuple[int, _Absence] | None = None
        self._read_until: dict[int, FloatArray] = {}
        self._last_own: tuple[tuple[int, int], tuple[FloatArray, FloatArray]] | None = None

    @property
    def max_iterations(self) -> int:
        """Largest D, at least 1: more decode iterations a phase than this change nothing."""
        return max(self.lengths.outputs.max - self._iterations_fewer, 1)

    @property
    def mean_iterations(self) -> float:
        """E[D]."""
        return float(self._survival.sum())

    def least_variance(self, fewest: int, most: int, count: int) -> FloatArray:
        """[count] no N_D from `fewest` to `most` has a lower `variance_active` at iterations
        1..count: a query's share, S (1 - S) of its survival S, rises and then falls with the
        iteration, so that over a range of iterations it is least at an end."""
        share = self._survival * (1 - self._survival)
        total: FloatArray = np.zeros(count)
        for phase in range(-(-len(share) // fewest)):
            first, last = (np.zeros(count), np.zeros(count))
            for part, begin in ((first, phase * fewest), (last, phase * most)):
                known = share[begin:begin + count]
                part[: len(known)] = known
            total += np.minimum(first, last)
        return total

    @cached_property
    def mean_context_read(self) -> float:
        """Tokens of context that a query's decode iterations read in all, in the mean."""
        return float(self._context.sum())

    def context_read_until(self, iterations: int) -> FloatArray:
        """[N_D = 1..max] tokens of context that are read while a query goes through that many
        decode iterations, by all queries present, per query encoded in each phase."""
        known = self._read_until.get(iterations)
        if known is None:
            n_d = np.arange(1, self.max_iterations + 1)
            before, left = np.divmod(iterations - 1, n_d)
            left += 1  # of the last phase
            read = np.append(0.0, np.cumsum(self._context))
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

    @property
    def largest_context(self) -> float:
        """No mean context at an iteration is larger."""
        return float(self.lengths.inputs.max + self.max_iterations)

    @property
    def max_reserve_tokens(self) -> int:
        """KV tokens the longest query reserves at admission."""
        return self.lengths.inputs.max + self._reserved_output_tokens

    def iterations_of(self, output_tokens: int) -> int:
        """D of a query with that many output tokens."""
        return output_tokens - self._iterations_fewer

    def occupancy(self, decode_iterations: int, *, padded: bool) -> Occupancy:
        """The steady state with `decode_iterations` between two encodings."""
        assert decode_iterations >= 1, f"{decode_iterations = }"
        key = (decode_iterations, padded)
        if key not in self._known:
            self._known[key] = self._derive(decode_iterations, padded)
        return self._known[key]

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
            variance_reserved=float((reserve_squared - reserve**2).sum()),
            max_present=len(entering),
            maximum_context=self.maximum_context(n_d, np.arange(n_d)) if padded else None,
        )

    def own_absent(self, decode_iterations: int, phases_before: int) -> tuple[FloatArray,
                                                                               FloatArray]:
        """As log_absent, but the chances themselves and for the group of a query that is in its
        phase number `phases_before`: [N_D, octaves] (in the mean of the phases before, in that
        one)."""
        key = (decode_iterations, phases_before)
        if self._last_own is None or self._last_own[0] != key:
            absence = self._absence(decode_iterations)
            always = absence.of_multiples
            before, last = (np.stack([*absence.mean_of(phases), *always], axis=1) for phases in (
                np.arange(max(phases_before, 1)), np.array([phases_before])))
            self._last_own = key, (before, last)
        return self._last_own[1]

    def _absence(self, n_d: int) -> _Absence:
        """Kept until another N_D is asked for."""
        if self._last_absence is None or self._last_absence[0] != n_d:
            survival = self._by_phase(self._survival[None], n_d)[0]
            self._last_absence = n_d, _Absence(survival)
        return self._last_absence[1]

    @cached_property
    def _by_iteration(self) -> FloatArray:
        """[4, D max]."""
        return np.stack([self._survival, self._context, self._reserve, self._reserve_squared])

    @staticmethod
    def _by_phase(rows: FloatArray, n_d: int) -> FloatArray:
        """[rows, D max] -> [rows, phases, N_D], zero beyond the end."""
        phases = -(-rows.shape[1] // n_d)
        padded = np.zeros((len(rows), phases * n_d))
        padded[:, : rows.shape[1]] = rows
        return padded.reshape(len(rows), phases, n_d)

    def _tail(self, per_output: FloatArray) -> FloatArray:
        """Sums over D >= k, k = 1..max, of what `per_output` gives for each output length."""
        tail = np.cumsum(per_output[::-1])[::-1][self._iterations_fewer:]
        return tail if tail.size else np.zeros(1)

    @cached_property
    def _survival(self) -> FloatArray:
        return np.minimum(self._tail(self.lengths.outputs.pmf), 1.0)

    @cached_property
    def _context(self) -> FloatArray:
        """E[(input + k) 1{D >= k}]: tokens of KV read at a query's k-th decode iteration."""
        inputs = self._tail(self.lengths.outputs.pmf * self.lengths.mean_input_given_output())
        return inputs + self._survival * np.arange(1, self.max_iterations + 1)

    @cached_property
    def _reserve(self) -> FloatArray:
        """E[(input + max output) 1{D >= k}]."""
        return self._tail(self._reserve_per_output[0])

    @cached_property
    def _reserve_squared(self) -> FloatArray:
        return self._tail(self._reserve_per_output[1])

    @cached_property
    def _all_reserve(self) -> tuple[float, float]:
        first, second = self._reserve_per_output
        return float(first.sum()), float(second.sum())

    @cached_property
    def _reserve_per_output(self) -> tuple[FloatArray, FloatArray]:
        pmf, cap = self.lengths.outputs.pmf, self._reserved_output_tokens
        mean = self.lengths.mean_input_given_output()
        square = _mean_squared_input_given_output(self.lengths)
        return pmf * (mean + cap), pmf * (square + 2 * cap * mean + cap**2)

    @cached_property
    def _context_histogram(self) -> tuple[FloatArray, float]:
        """([D max, bins] P(D >= k, context in bin), width of a bin in tokens)."""
        steps = self.max_iterations
        top = self.lengths.inputs.max + steps
        width = -(-top // MAX_CONTEXT_BINS)
        histogram = np.zeros((steps, top // width + 1))
        pairs = self.lengths.pairs
        if pairs is None:
            support, weights = self.lengths.inputs.support, self.lengths.inputs.pmf
            for k in range(1, steps + 1):
                histogram[k - 1] = self._survival[k - 1] * np.bincount(
                    (support + k) // width, weights, minlength=histogram.shape[1])
        else:
            thinned = pairs[:: -(-len(pairs) // MAX_PAIRS)]
            iterations = thinned[:, 1] - self._iterations_fewer
            for k in range(1, steps + 1):
                present = thinned[iterations >= k, 0]
                histogram[k - 1] = np.bincount(
                    (present + k) // width, minlength=histogram.shape[1]) / len(thinned)
        return histogram, float(width)

    def maximum_context(self, n_d: int, at: IntArray) -> FloatArray:
        """[len(at), doublings + 1] expected largest context among 2^k queries active at each of
        the rising iterations `at` (0..N_D - 1) of a phase."""
        histogram, width = self._context_histogram
        mass = np.zeros((len(at), histogram.shape[1]))  # [iterations, bins]
        for begin in range(0, len(histogram), n_d):
            known = at[begin + at < len(histogram)]
            mass[: len(known)] += histogram[begin + known]
        total = mass.sum(axis=1, keepdims=True)
        below = np.cumsum(mass, axis=1) / np.where(total > 0, total, 1.0)
        top = width * (mass.shape[1] - 0.5)  # upper half of the last bin is never reached
        columns = []
        for _ in range(MAX_DOUBLINGS + 1):
            # E[max] = top - sum of F(x)^m over the bins' edges; squaring doubles m
            columns.append(top - width * below[:, :-1].sum(axis=1))
            below = below * below
        return np.where(total > 0, np.stack(columns, axis=1), 0.0)


def expected_maximum_z(count: FloatArray) -> FloatArray:
    """Expected largest of `count` standard normals (Blom's approximation); 0 for one or fewer."""
    many = np.maximum(count, 1.0)
    return np.asarray(special.ndtri((many - 0.375) / (many + 0.25)))


class _Absence:
    """Chances that none of a group's queries is active, at each iteration of a phase, by how many
    queries the group encodes (GROUP_OCTAVES) and, where that is one every so many phases, by how
    many phases ago it last did: its offset."""

    def __init__(self, survival: FloatArray) -> None:
        """survival: [phases, N_D] P(D >= j N_D + u)."""
        with np.errstate(divide="ignore"):
            logs = np.log1p(-np.minimum(survival, 1.0))
        self._of_one = logs.sum(axis=0)
        self._by_offset: list[FloatArray] = []  # [offsets, N_D], for strides that fall to 2
        for stride in 2 ** np.arange(-GROUP_OCTAVES[0], 0, -1):
            # sums over the phases of one offset; offsets without a phase are certain, left out
            logs = _folded(logs, int(stride))
            self._by_offset.append(np.exp(logs))

    def log_mean(self) -> FloatArray:
        """[N_D, octaves] logarithm of the mean over offsets."""
        with np.errstate(divide="ignore", invalid="ignore"):
            found = [np.log((rows.sum(axis=0) + stride - len(rows)) / stride)
                     for stride, rows in self._strides()]
            found += [self._of_one * times for times in self._multiples]
        return np.stack(found, axis=1)

    def mean_of(self, phases: IntArray) -> list[FloatArray]:
        """[N_D] mean over the offsets that these phases are at, for the octaves below 0."""
        found = []
        for stride, rows in self._strides():
            at = phases % stride
            certain = int((at >= len(rows)).sum())
            found.append((rows[at[at < len(rows)]].sum(axis=0) + certain) / len(phases))
        return found

    @property
    def of_multiples(self) -> list[FloatArray]:
        """[N_D] for the other octaves: offsets make no difference there."""
        return [np.exp(self._of_one * times) for times in self._multiples]

    def _strides(self) -> list[tuple[int, FloatArray]]:
        return [(2 ** (len(self._by_offset) - k), rows) for k, rows in enumerate(self._by_offset)]

    @property
    def _multiples(self) -> list[float]:
        return [2.0**octave for octave in GROUP_OCTAVES if octave >= 0]


def _folded(rows: FloatArray, stride: int) -> FloatArray:
    """Sums of rows that are `stride` apart: at most `stride` of them."""
    found = rows[:stride].copy()
    for begin in range(stride, len(rows), stride):
        part = rows[begin:begin + stride]
        found[: len(part)] += part
    return found


def expected_maximum(table: FloatArray, queries: FloatArray) -> FloatArray:
    """Largest context among `queries` [..., rows] from `maximum_context` [rows, doublings + 1],
    linear in the logarithm of the number."""
    position = np.clip(np.log2(np.maximum(queries, 1.0)), 0, table.shape[-1] - 1)
    lower = np.minimum(position.astype(np.int64), table.shape[-1] - 2)
    at = np.arange(len(table)) * table.shape[-1] + lower
    left, right = table.take(at), table.take(at + 1)
    between: FloatArray = left + (position - lower) * (right - left)
    return between


def _mean_squared_input_given_output(lengths: JointLengths) -> FloatArray:
    """E[input^2 | output = k], k = 1..max; the overall value where P(k) = 0."""
    inputs = lengths.inputs
    overall = np.full(lengths.outputs.max, float(inputs.pmf @ inputs.support.astype(float) ** 2))
    if lengths.pairs is None:
        return overall
    outputs: IntArray = lengths.pairs[:, 1]
    size = lengths.outputs.max + 1
    counts = np.bincount(outputs, minlength=size)[1:]
    sums = np.bincount(outputs, weights=lengths.pairs[:, 0].astype(float) ** 2, minlength=size)[1:]
    return np.where(counts > 0, sums / np.maximum(counts, 1), overall)
