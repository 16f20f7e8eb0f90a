"""What no WAA configuration can better, told before any plan's pools are timed: from one group of
each degree that holds all layers (xsimulator.policies.waa.bounds has what follows it)."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import NamedTuple

import numpy as np

from xgpt.core.lengths import FloatArray, IntArray
from xsimulator.envelope import rising_minorant
from xsimulator.policies.waa.chunk_bounds import ChunkedPoolBounds
from xsimulator.policies.waa.closed_form import Waa
from xsimulator.policies.waa.config import WaaBoxes, WaaConfigs
from xsimulator.policies.waa.few_each import least_busy
from xsimulator.policies.waa.plan_bounds import QUICK_TOLERANCE, by_batch, leap
from xsimulator.policies.waa.plans import WaaPlans
from xsimulator.policies.waa.room import held_by_division, most_in_system
from xsimulator.policies.waa.step_columns import ROWS_RATIO


class _Divisions(NamedTuple):
    """Divisions of the devices under tensor plans of one degree, [..., boxes] or [..., 1] for all
    boxes: (encode stages, decode stages) that are groups, then those that are single devices; no
    more queries find room in the decode pool whatever the division, and in this one."""

    tp_degree: int
    stages: Sequence[tuple[FloatArray | IntArray, FloatArray | IntArray]]
    most_in_system: FloatArray
    held: FloatArray

    @property
    def degrees(self) -> list[int]:
        """Of the stages."""
        return list(dict.fromkeys((self.tp_degree, 1)))

    def shape(self, boxes: WaaBoxes) -> tuple[int, ...]:
        """[..., boxes]."""
        return np.broadcast_shapes(self.held.shape, (len(boxes),))

    def take(self, rows: IntArray) -> _Divisions:
        """Those of some of the boxes."""
        if self.held.shape[-1] == 1:
            return self
        return self._replace(
            stages=[(encode[rows], decode[rows]) for encode, decode in self.stages],
            most_in_system=self.most_in_system[rows], held=self.held[rows])


class _Single(NamedTuple):
    """A single group that holds all layers takes no less: seconds [batches] of encoding for each
    query, and of a step; seconds [sizes] of a decode step."""

    encode_each: FloatArray
    encode_step: FloatArray
    sizes: FloatArray
    decode_steps: FloatArray

    def decode_step(self, rows: FloatArray) -> FloatArray:
        """A decode step of so many rows takes no less [boxes]."""
        return np.asarray(np.interp(np.maximum(rows, 1.0), self.sizes, self.decode_steps))


class QuickBounds:
    """The bounds are for one Waa."""

    def __init__(self, waa: Waa, *, is_modest: bool) -> None:
        """`is_modest`: for configurations with modest chunks alone (Waa.modest_chunk)."""
        self._waa, self._is_modest = waa, is_modest
        self._shared = cache(lambda degree: ChunkedPoolBounds(  # by degree: of a single group
            waa.times, waa.times.single(degree), waa.problem.lengths.outputs.mean))
        room = (waa.memory, waa.capacity_bytes)  # WAA-C and WAA-M share what there is room for
        self._most_in_system: Callable[[WaaPlans], float] = waa.times.kept.setdefault(
            most_in_system, cache(partial(most_in_system, *room)))
        self._held_by_division: Callable[[WaaPlans], FloatArray] = waa.times.kept.setdefault(
            held_by_division, cache(partial(held_by_division, *room)))

    def by_division(self, split: WaaPlans, boxes: WaaBoxes,
                    latency_bound_s: float) -> FloatArray:
        """No throughput_qps [counts of encode devices, boxes] is higher: each stage's share of the
        layers takes it no longer than the time between two queries, and the shares are all of
        them."""
        counts = [(encode[:, None], decode[:, None]) for encode, decode in split.stage_counts]
        return self._divided(_Divisions(
            split.tp_degree, counts, np.asarray(self._most_in_system(split)),
            self._held_by_division(split)[:, None]), boxes, latency_bound_s)

    def of_points(self, splits: Sequence[WaaPlans], configs: WaaConfigs, which: IntArray,
                  latency_bound_s: float) -> FloatArray:
        """None of the configurations has a higher throughput_qps by its division. `which`: the
        tensor plan of each; all are of one tp_degree."""
        batch, groups, chunk = (values.astype(np.int64) for values in (
            configs.batch, configs.groups, configs.chunk))
        most, held = np.empty((2, len(batch)))
        counts = np.empty((len(splits[0].stage_counts), 2, len(batch)))
        for index, split in enumerate(splits):
            rows = np.flatnonzero(which == index)
            place = np.searchsorted(split.encode_devices, self._waa.division.divide(
                split, configs.take(rows)))
            most[rows], held[rows] = (self._most_in_system(split),
                                      self._held_by_division(split)[place])
            counts[..., rows] = np.array(split.stage_counts)[..., place]
        return self._divided(
            _Divisions(splits[0].tp_degree, [(encode, decode) for encode, decode in counts],
                       most, held), WaaBoxes(
                least=batch, most=batch, fewest=groups, highest=groups, chunk=chunk,
                largest_chunk=chunk), latency_bound_s)

    def _divided(self, divisions: _Divisions, boxes: WaaBoxes,
                 latency_bound_s: float) -> FloatArray:
        waa, degrees = self._waa, divisions.degrees
        decoding = np.minimum(boxes.most * waa.problem.lengths.outputs.mean,
                              divisions.most_in_system)
        rows = _most_each(decoding, boxes)
        most_rows = self._most_rows(boxes, degrees, float(rows.max()), latency_bound_s)
        rows = np.minimum(rows, most_rows)
        encode_qps: FloatArray = np.zeros(divisions.shape(boxes))
        decode_qps, by_quickest = np.zeros_like(encode_qps), np.full_like(encode_qps, np.inf)
        quickest, share = self._least_share(boxes, degrees, float(rows.max()), latency_bound_s)
        for own, (encode, decode) in zip(degrees, divisions.stages, strict=False):
            single = self._single(own, int(boxes.most.max()), float(rows.max()))
            decode_each = (waa.times.mean_iterations * self._decode_step(single, own, boxes, rows)
                           / np.maximum(rows, 1.0))
            encode_qps += encode / single.encode_each[boxes.most]
            decode_qps += decode / decode_each
            if own == quickest and share.any():
                by_quickest = np.where(share > 0, decode / np.where(
                    share > 0, share * decode_each, 1.0), np.inf)
        if len(taken := np.flatnonzero(boxes.chunk)):
            encode_qps[..., taken] = self._shared_by_division(
                divisions.take(taken), boxes.take(taken), encode_qps[..., taken],
                most_rows[taken])
        limit = np.minimum(np.minimum(encode_qps, decode_qps), by_quickest)
        return np.asarray(limit * (1 + QUICK_TOLERANCE))

    def _shared_by_division(self, divisions: _Divisions, boxes: WaaBoxes, sent_qps: FloatArray,
                            most_rows: FloatArray) -> FloatArray:
        """Likewise where the decode pool encodes what the other, which sends no more than
        `sent_qps`, cannot: in steps that both kinds of work share. No more than `most_rows` decode
        together."""
        waa, degrees = self._waa, divisions.degrees
        iterations, mean = waa.times.mean_iterations, waa.times.mean_input
        planned = boxes.most * waa.problem.lengths.outputs.mean
        decoding = np.minimum(np.minimum(planned, boxes.highest * most_rows), divisions.held)
        rows = np.maximum(np.minimum(_most_each(decoding, boxes), most_rows), 1.0)
        chunk = np.full(rows.shape, boxes.largest_chunk.astype(float))
        if self._is_modest:
            chunk = np.minimum(chunk, decoding * mean / (iterations * boxes.fewest))
        decoded, encoded, step = np.full((3, rows.size), np.inf)
        stages = np.sum([decode for _, decode in divisions.stages], axis=0)
        for own, _ in zip(degrees, divisions.stages, strict=False):
            shared = self._shared(own)
            ((work, more),) = shared.work_s(rows.ravel(), chunk.ravel())
            np.minimum(decoded, work, out=decoded)
            np.minimum(encoded, more, out=encoded)
            np.minimum(step, shared.least_step_s(np.maximum(
                decoding / boxes.highest, 1.0).ravel(), chunk.ravel()), out=step)
        decoded, encoded, step = (part.reshape(rows.shape) for part in (decoded, encoded, step))
        limit = (stages + sent_qps * encoded) / (decoded + encoded)
        return np.asarray(np.minimum(np.maximum(limit, sent_qps), decoding / (iterations * step)))

    def of_boxes(self, splits: Sequence[WaaPlans], boxes: WaaBoxes, degrees: Sequence[int],
                 latency_bound_s: float = math.inf) -> tuple[FloatArray, FloatArray]:
        """Each of the boxes has (most throughput_qps, least latency_s) whatever the division, from
        one group of each degree alone: no device does more than work all the time, no token is
        quicker than through all layers without a pipeline, and no more decode than memory holds,
        nor than `latency_bound_s` leaves time for. `splits`: one of each box, or of all; groups
        of all are of these `degrees`."""
        waa = self._waa
        decoding = np.minimum(boxes.most * waa.problem.lengths.outputs.mean,
                              np.array([self._most_in_system(split) for split in splits]))
        most_rows = self._most_rows(boxes, degrees, float(_most_each(decoding, boxes).max()),
                                    latency_bound_s)
        decoding = np.minimum(decoding, boxes.highest * most_rows)
        rows = np.minimum(_most_each(decoding, boxes), most_rows)
        least_rows = decoding / boxes.highest
        encode_work, decode_work, step = (np.full(len(boxes), np.inf) for _ in range(3))
        iterations = waa.times.mean_iterations
        for degree in degrees:
            single = self._single(degree, int(boxes.most.max()), float(rows.max()))
            np.minimum(encode_work, degree * single.encode_each[boxes.most], out=encode_work)
            step_of_most, step_of_least = self._decode_step(
                single, degree, boxes, np.array([rows, least_rows]))
            np.minimum(decode_work, degree * step_of_most / np.maximum(rows, 1.0),
                       out=decode_work)
            np.minimum(step, step_of_least, out=step)
            if len(taken := np.flatnonzero(boxes.chunk)):  # inputs and queries share their steps
                ((decoded, encoded),) = self._shared(degree).work_s(
                    np.maximum(rows[taken], 1.0), boxes.largest_chunk[taken].astype(float))
                encode_work[taken] = np.minimum(encode_work[taken], degree * encoded)
                decode_work[taken] = np.minimum(decode_work[taken], degree * decoded / iterations)
        encode_s, decode_s = self._quickest(degrees, int(boxes.most.max()), float(rows.max()),
                                            int(boxes.largest_chunk.max()))
        through = encode_s[boxes.least] + waa.iterations_waited * decode_s
        devices = waa.problem.cluster.num_devices
        limit = np.minimum(devices / (encode_work + iterations * decode_work),
                           decoding / (iterations * step))
        return limit * (1 + QUICK_TOLERANCE), through / (1 + QUICK_TOLERANCE)

    def largest_within(self, largest: int, degrees: Sequence[int], latency_bound_s: float,
                       chunk: int = 0) -> int:
        """No encode_batch beyond this one, of those up to `largest`, is quick enough whatever the
        division, with stages of such degrees (see `of_boxes`) and chunks of so many tokens at most;
        0: none is."""
        # the quickest step may be one of more rows
        rows = largest * self._waa.problem.lengths.outputs.mean
        encode_s, decode_s = self._quickest(degrees, largest, rows, chunk)
        waited_s = self._waa.iterations_waited * decode_s
        return bisect_right(range(1, largest + 1), latency_bound_s * (1 + QUICK_TOLERANCE),
                            key=lambda batch: float(encode_s[batch]) + waited_s)

    def _quickest(self, degrees: Sequence[int], most: int, rows: float,
                  chunk: int) -> tuple[FloatArray, float]:
        """Seconds that no encode step of a batch or a larger one takes less [batches], and no step
        in which queries decode: the pools' stages may be of different degrees, and each pool's the
        quickest."""
        singles = [(degree, self._single(degree, most, rows)) for degree in degrees]
        columns = [single.encode_step for _, single in singles]
        # tables of one length are the same ones
        kept, key = self._waa.times.kept, ("quickest", *degrees, *map(len, columns))
        if key not in kept:
            shortest = min(map(len, columns))
            kept[key] = np.minimum.reduce([column[:shortest] for column in columns])
        encode_s: FloatArray = kept[key][:most + 1]
        return encode_s, min(float(self._steps(*one, chunk)[0]) for one in singles)

    def _steps(self, degree: int, single: _Single, chunk: int) -> FloatArray:
        """Seconds [sizes] that no step in which so many rows decode, or more, takes a single group
        less, whether it also encodes up to `chunk` tokens or not: of times that are not monotone a
        larger step may be the quicker."""
        if not chunk:
            return single.decode_steps
        kept, key = self._waa.times.kept, ("steps", degree, chunk, len(single.sizes))
        if key not in kept:
            kept[key] = np.minimum(single.decode_steps, self._shared(degree).least_step_s(
                single.sizes, np.full(len(single.sizes), float(chunk))))
        steps: FloatArray = kept[key]
        return steps

    def _decode_step(self, single: _Single, degree: int, boxes: WaaBoxes,
                     rows: FloatArray) -> FloatArray:
        """A step in which so many rows decode takes a single group no less [..., boxes], whether it
        also encodes or not."""
        seconds = single.decode_step(rows)
        if len(taken := np.flatnonzero(boxes.chunk)):
            chunk = np.full(rows[..., taken].shape, boxes.largest_chunk[taken].astype(float))
            least = self._shared(degree).least_step_s(
                np.maximum(rows[..., taken], 1.0).ravel(), chunk.ravel())
            seconds[..., taken] = np.minimum(seconds[..., taken], least.reshape(chunk.shape))
        return seconds

    def _least_share(self, boxes: WaaBoxes, degrees: Sequence[int], rows: float,
                     latency_bound_s: float) -> tuple[int, FloatArray]:
        """(the degree whose steps are quickest, the share of the layers [boxes] that its stages
        have at least): with fewer no token is quick enough, since it passes the others' as well."""
        iteration_s = self._longest_iteration_s(boxes, degrees, rows, latency_bound_s)
        chunk = int(boxes.largest_chunk.max())
        least = sorted((float(self._steps(degree, self._single(
            degree, int(boxes.most.max()), rows), chunk)[0]), degree) for degree in degrees)
        (quick_s, quickest), (slow_s, _) = least[0], least[-1]
        if slow_s <= quick_s:
            return quickest, np.zeros(len(boxes))
        return quickest, np.clip((slow_s - iteration_s) / (slow_s - quick_s), 0.0, 1.0)

    def _longest_iteration_s(self, boxes: WaaBoxes, degrees: Sequence[int], rows: float,
                             latency_bound_s: float) -> FloatArray:
        """No iteration of a configuration within the bound takes longer [boxes]."""
        waited = self._waa.iterations_waited
        if math.isinf(latency_bound_s) or waited <= 0:
            return np.full(len(boxes), np.inf)
        encode_s, _ = self._quickest(degrees, int(boxes.most.max()), rows,
                                     int(boxes.largest_chunk.max()))
        bound_s = latency_bound_s * (1 + QUICK_TOLERANCE)
        return np.asarray((bound_s - encode_s[boxes.least]) / waited * (1 + QUICK_TOLERANCE))

    def _most_rows(self, boxes: WaaBoxes, degrees: Sequence[int], rows: float,
                   latency_bound_s: float) -> FloatArray:
        """No more rows [boxes] can decode together within the latency bound: a query waits for so
        many iterations, each no shorter than a step through all layers. `rows`: of that many it is
        asked at most."""
        iteration_s = self._longest_iteration_s(boxes, degrees, rows, latency_bound_s)
        most = np.zeros(len(boxes))
        if math.isinf(latency_bound_s) or self._waa.iterations_waited <= 0:
            return np.full(len(boxes), np.inf)
        chunk = int(boxes.largest_chunk.max())
        for degree in degrees:
            single = self._single(degree, int(boxes.most.max()), rows)
            place = np.searchsorted(self._steps(degree, single, chunk), iteration_s, side="right")
            np.maximum(most, np.append(single.sizes, np.inf)[place], out=most)
        return most

    def _single(self, degree: int, most: int, rows: float) -> _Single:
        """One group's times are known as far as these sizes."""
        # WAA-C and WAA-M share them
        known: _Single | None = self._waa.times.kept.get(("single", degree))
        if known is None or len(known.encode_each) <= most or known.sizes[-1] < rows:
            batch = np.arange(1, leap(most) + 1, dtype=float)
            each, longest = (_encode_query_s(self._waa, batch, degree, share)
                             for share in (1.0, self._waa.times.longest_share))
            # where times are not monotone the batch of most tokens may be the quicker
            step = np.minimum(each, longest) * batch
            count = int(np.log(max(2 * rows, 2.0)) / np.log(ROWS_RATIO)) + 3
            sizes: FloatArray = np.asarray(ROWS_RATIO ** np.arange(count), float)
            per_query = (self._waa.times.decode_query_s(sizes, degree)
                         / self._waa.times.mean_iterations)
            known = self._waa.times.kept["single", degree] = _Single(
                encode_each=by_batch(np.minimum.accumulate(each)),
                encode_step=by_batch(np.minimum.accumulate(step[::-1])[::-1]),
                sizes=sizes, decode_steps=rising_minorant(sizes, per_query * sizes))
        return known


def _encode_query_s(waa: Waa, batch: FloatArray, degree: int, share: float) -> FloatArray:
    """[batches] seconds of one query's encoding through a single group that holds all layers, in
    batches with `share` of the mean tokens."""
    each, times = waa.times.encode_query_s(batch, degree, share), waa.times.single(degree).times
    if not times.is_encoder_decoder:
        return each
    # WAA projects in the decode pool, which is not counted
    tokens = share * batch * waa.problem.lengths.inputs.mean
    with np.errstate(invalid="ignore"):  # refused sizes are infinite
        rest = each - times.cross_kv_s(tokens)[..., 0] / batch
    return np.where(np.isfinite(each), rest, np.inf)


def _most_each(decoding: FloatArray, boxes: WaaBoxes) -> FloatArray:
    """No group that holds a query holds more in the mean [..., boxes]."""
    return decoding / least_busy(decoding, boxes.fewest, boxes.highest)
