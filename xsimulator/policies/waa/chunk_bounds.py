"""What no WAA configuration whose decode pool takes chunks can better, over a box.

Symbols: as in waa.chunk_rates; all step times are those of envelopes, lower bounds.

*Fewest decoding.* Where chunks do not keep the decode batch as planned, n is where n = E[D]
(lambda_E T(n, c) + G c / E[L]): no less than where that is for less of everything, and no less than
any step on the way there from 0.

*Throughput.* A chunk brings c / E[L] queries in a step that lasts as long as it does with the
fewest that decode, so lambda <= lambda_E + G c / (E[L] T(n, c)), and no more where chunks come in
some of the steps only. Besides, while lambda queries a second are served, lambda - lambda_E of them
at least are encoded in chunks. With d_k, the least that stage k of the decode pool works for the
decoding of a query, and e_k, the least for encoding one in chunks, its second is full with

    lambda d_k + (lambda - lambda_E) e_k <= 1.

A row takes no less than the least that it takes in any step up to the largest: of the most queries
that may decode, and a whole chunk. Those are limited by the planned decode batch, by memory, and,
where a latency bound limits an iteration to T seconds, by what is brought in it.

*Modest chunks.* What is searched has chunks that hold, over all groups, no more tokens than are
encoded in an iteration where the decode batch is as planned (waa.closed_form: modest_chunk). Then
n >= E[D] G c / E[L], whether all steps have a chunk or not; c is limited by the most that decode.

*Time.* Little's law: an iteration takes n / (E[D] lambda), least with the fewest that decode and
the most throughput."""

from typing import NamedTuple

import numpy as np

from xgpt.core.lengths import FloatArray, IntArray
from xsimulator.addresses import address_of
from xsimulator.envelope import rising_minorant
from xsimulator.layer_times import TOGETHER
from xsimulator.plans import StagePlan
from xsimulator.policies.waa.config import WaaBoxes
from xsimulator.policies.waa.few_each import least_busy
from xsimulator.policies.waa.pool_times import PoolTimes
from xsimulator.policies.waa.step_columns import ROWS_RATIO

TOLERANCE = 0.01  # of throughput and time: as xsimulator.policies.rra.chunk_bounds
_STEPS = 5  # towards the fewest that decode


class ChunkLimits(NamedTuple):
    """[boxes] No configuration has more throughput_qps, fewer queries that decode, or a shorter
    iteration."""

    most_qps: FloatArray
    decoding: FloatArray
    iteration_s: FloatArray


class ChunkedPoolBounds:
    """The bounds are for one decode pool."""

    def __init__(self, times: PoolTimes, decode: StagePlan, mean_outputs: float) -> None:
        self._times, self._decode, self._outputs = times, decode, mean_outputs
        self._attention_of: dict[int, FloatArray] = {}  # by degree: seconds a row, least up to size
        encode = decode.times.mean_attention_s(np.asarray(TOGETHER, float))
        self._encoded_s = {degree: float(own.min()) for degree, own in encode.items()}
        self._words: IntArray | None = None  # see described
        self._kept: list[FloatArray] = []  # that it was made of
        self._held: list[object] = []  # that it points to
        self._number = np.bincount(decode.least_steps.kind_of)[:, None]

    def limits(self, boxes: WaaBoxes, sent_qps: tuple[FloatArray, FloatArray],
               most_in_system: float, most_iteration_s: FloatArray, *,
               is_modest: bool) -> ChunkLimits:
        """`sent_qps`: lambda_E at the least and at the most; no more are in the decode pool than
        `most_in_system`, and no iteration takes longer than `most_iteration_s` [boxes].
        `is_modest`: of configurations with modest chunks alone."""
        chunk, iterations = boxes.largest_chunk.astype(float), self._times.mean_iterations
        brought = chunk / self._times.mean_input  # by a step
        # queries that decode at most
        most = np.minimum(np.minimum(boxes.most * self._outputs, most_in_system), iterations * (
            sent_qps[1] * most_iteration_s + boxes.highest * brought))
        if is_modest:
            chunk = np.minimum(chunk, most * self._times.mean_input / (iterations * boxes.fewest))
            brought = chunk / self._times.mean_input
        # first what asks for the largest steps: envelopes are of all sizes that were asked for
        limit = self._by_work(boxes, sent_qps[1], most, chunk)
        least = self._fewest(boxes, sent_qps[0])
        if is_modest:
            least = np.maximum(least, iterations * boxes.fewest * boxes.chunk
                               / self._times.mean_input)
        limit = np.minimum(limit, self._by_chunks(boxes, sent_qps[1], least, chunk, brought))
        limit = np.maximum(limit, sent_qps[1]) * (1 + TOLERANCE)
        plain = np.zeros(len(chunk))
        limit = np.minimum(limit, most * (1 + TOLERANCE) / (
            iterations * self._iteration_s(boxes, most, plain)))
        every = np.maximum(self._iteration_s(boxes, least, plain) / (1 + TOLERANCE),
                           least / (iterations * limit))
        return ChunkLimits(limit, least, every)

    def described(self) -> IntArray:
        """The C structure Pool of csrc/planning_waa.cpp."""
        steps, pool = self._decode.least_steps, self._decode
        tables = steps.encode_rows, steps.ends, steps.decode_rows
        for degree in steps.degrees:
            if degree not in self._attention_of:
                self._attention_s(degree, np.ones(1))
        attention = [self._attention_of[degree] for degree in steps.degrees]
        kept = [*(table.nodes for table in tables), *attention]
        if self._words is None or any(a is not b for a, b in zip(self._kept, kept, strict=True)):
            held = [self._number[:, 0].astype(float), np.array(pool.layers_of_kinds, float),
                    np.array([self._encoded_s[degree] for degree in steps.degrees]),
                    np.array([address_of(own) for own in attention], np.int64),
                    np.array([len(own) for own in attention], np.int64)]
            self._kept, self._held = kept, [held, *(table.rises for table in tables)]
            self._words = np.array([
                len(attention), steps.kind_of[-1], *(address_of(own) for own in held),
                *(word for table in tables for word in (
                    address_of(table.nodes), address_of(table.rises), table.nodes.shape[1]))],
                np.int64)
        return self._words

    def reach(self, size: float, *, is_attention: bool) -> None:
        """The tables of steps, or of attention, have sizes up to this one."""
        steps = self._decode.least_steps
        if is_attention:
            for degree in steps.degrees:
                self._attention_s(degree, np.array([size]))
        else:
            for table in (steps.encode_rows, steps.ends, steps.decode_rows):
                table.reach(size)

    def _fewest(self, boxes: WaaBoxes, sent_qps: FloatArray) -> FloatArray:
        planned, chunk = boxes.least * self._outputs, boxes.chunk.astype(float)
        decoding: FloatArray = np.zeros(len(planned))
        for _ in range(_STEPS):
            every_s = self._iteration_s(boxes, decoding, chunk) / (1 + TOLERANCE)
            decoding = np.minimum(self._times.mean_iterations * (
                sent_qps * every_s + boxes.fewest * chunk / self._times.mean_input), planned)
        return decoding

    def _by_chunks(self, boxes: WaaBoxes, sent_qps: FloatArray, decoding: FloatArray,
                   chunk: FloatArray, brought: FloatArray) -> FloatArray:
        kinds = self._steps_s(np.maximum(decoding / boxes.highest, 1.0), chunk)
        each = np.maximum(kinds.max(axis=0), (self._number * kinds).sum(axis=0) / boxes.highest)
        return np.asarray(sent_qps + brought / each)

    def _by_work(self, boxes: WaaBoxes, sent_qps: FloatArray, decoding: FloatArray,
                 chunk: FloatArray) -> FloatArray:
        limit = np.full(len(boxes), np.inf)
        rows = decoding / least_busy(decoding, boxes.fewest, boxes.highest)
        for decoded, encoded in self.work_s(np.maximum(rows, 1.0), chunk):
            np.minimum(limit, (1 + sent_qps * encoded) / (decoded + encoded), out=limit)
        return limit

    def work_s(self, rows: FloatArray, chunk: FloatArray) -> list[tuple[FloatArray, FloatArray]]:
        """[kinds of stages] (d_k, e_k), each [boxes], in steps of so many queries and so large a
        chunk, or less."""
        mean, iterations = self._times.mean_input, self._times.mean_iterations
        step, heads = rows + chunk, rows + chunk / mean
        pool, tables = self._decode, self._decode.least_steps
        head, work = tables.head_s(heads) / heads, []
        for kind, (mixed_s, plain_s) in enumerate(zip(
                tables.rows_s(step), self._plain_s(rows), strict=True)):
            degree, layers = tables.degrees[kind], pool.layers_of_kinds[kind]
            own = mixed_s / step
            decoded, encoded = own, mean * own + layers * self._encoded_s[degree]
            if kind == tables.kind_of[-1]:  # no other stage has the head
                decoded, encoded = decoded + head, encoded + head
            work.append((iterations * (np.minimum(decoded, plain_s / rows)
                                       + layers * self._attention_s(degree, rows)), encoded))
        return work

    def _iteration_s(self, boxes: WaaBoxes, decoding: FloatArray, chunk: FloatArray) -> FloatArray:
        """No T(n, c) of as many queries or more [boxes], and of chunks as large, is less, in any
        number of groups of the box; with no chunk no T_iter, whether steps encode or not."""
        steps = least_busy(decoding, boxes.fewest, boxes.highest)
        # at both numbers of groups together: what a call takes hangs little on how many are asked
        kinds = self._steps_s(np.maximum(np.concatenate(
            [decoding / steps, decoding / boxes.highest]), 1.0), np.tile(chunk, 2))
        slowest, through = kinds[:, :len(chunk)].max(axis=0), kinds[:, len(chunk):]
        return np.asarray(np.maximum(steps * slowest, (self._number * through).sum(axis=0)))

    def least_step_s(self, rows: FloatArray, chunk: FloatArray) -> FloatArray:
        """No step of so many queries or more, with a chunk of that size or less, takes less
        [boxes] through all stages."""
        self._decode.least_steps.encode_rows.reach(  # that the envelope is of these sizes, too
            float((rows + chunk).max(initial=0.0)))
        return np.asarray((self._number * self._steps_s(rows, np.zeros(len(rows)))).sum(axis=0))

    def _steps_s(self, rows: FloatArray, chunk: FloatArray) -> FloatArray:
        """No step of so many queries or more, and of so large a chunk (0: or none), takes less
        [kinds of stages, boxes]."""
        pool, tables = self._decode, self._decode.least_steps
        mixed = tables.rows_s(rows + chunk)
        mixed[tables.kind_of[-1]] += tables.head_s(rows)
        if not chunk.any():
            mixed = np.minimum(mixed, self._plain_s(rows))
        encoded = chunk / self._times.mean_input
        for kind, (layers, degree) in enumerate(zip(
                pool.layers_of_kinds, tables.degrees, strict=True)):
            mixed[kind] += layers * (rows * self._attention_s(degree, rows)
                                     + encoded * self._encoded_s[degree])
        return mixed

    def _plain_s(self, rows: FloatArray) -> list[FloatArray]:
        """Steps that encode nothing [kinds of stages][boxes], but for attention."""
        return self._decode.least_steps.decode_bare_s(rows)

    def _attention_s(self, degree: int, rows: FloatArray) -> FloatArray:
        """A row's attention takes no less in one layer of a step of so many rows or fewer; and so
        many times that is no more than of a step of more rows."""
        place = np.ceil(np.log(rows) / np.log(ROWS_RATIO) - 1e-9).astype(np.intp)
        known, top = self._attention_of.get(degree), int(place.max(initial=0))
        if known is None or len(known) <= top:
            sizes: FloatArray = np.asarray(ROWS_RATIO ** np.arange(2 * top + 2), float)
            known = self._attention_of[degree] = rising_minorant(
                sizes, self._times.attention_s(self._decode, degree, sizes)) / sizes
        return np.asarray(known[place])
