"""What no WAA configuration of a box can better: bounds for branch and bound (paper section 5.1).

A box holds ranges of encode_batch B and decode_micro_batches G of one tensor plan. For each number
of encode devices that its configurations may be divided by (xsimulator.policies.waa.closed_form:
the division follows from B and G),

    throughput <= min( largest B / T_E(B), B_D / (E[D] T_iter(B_D)) at the largest B_D )
    latency    >= T_E through the pool + handover + iterations x T_iter at the smallest B_D

with B_D = B E[S] or what Little's law leaves of it, and T_iter = max(G x slowest stage, all stages)
at the smallest G and at the largest, in that order. The encode pool's times are tables over every
B, so their least and largest over a range are exact. Of a box whose decode pools take chunks the
encode pool's throughput is none of a limit, but what both encode together is
(xsimulator.policies.waa.chunk_bounds); its latencies are no less than without chunks, which only
make more decode. The decode pool's times are taken from a lower
envelope (xsimulator.envelope), so that T_iter rises with the batch and falls in relation to it."""

import math
from collections.abc import Sequence
from functools import cache, partial
from typing import NamedTuple

import numpy as np

from xgpt.core.lengths import BoolArray, FloatArray, IntArray
from xsimulator.envelope import rising_minorant
from xsimulator.policies.waa.chunk_bounds import ChunkedPoolBounds
from xsimulator.policies.waa.closed_form import Waa
from xsimulator.policies.waa.config import WaaBoxes, WaaConfigs
from xsimulator.policies.waa.held import HeldSizes
from xsimulator.policies.waa.native import bounds_of_pairs
from xsimulator.policies.waa.plan_bounds import (
    QUICK_TOLERANCE,
    PlanBounds,
    by_batch,
    leap,
)
from xsimulator.policies.waa.plans import WaaPlan, WaaPlans
from xsimulator.policies.waa.room import held_by_division, most_in_system
from xsimulator.policies.waa.step_columns import ROWS_RATIO

TOLERANCE = 0.001  # of throughput and latency: the decode table is linear in a logarithm
NEW_WORK = 3  # looks into a division's tables that their making takes


class BoxBounds(NamedTuple):
    """[boxes] No configuration has more throughput_qps, or is quicker: seconds of the latency's
    query, until its first token, and between two tokens; nor holds less on its fullest device."""

    most_qps: FloatArray
    latency_s: FloatArray
    ttft_s: FloatArray
    iteration_s: FloatArray
    held_bytes: FloatArray


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


class WaaBounds:
    """The bounds are for one Waa."""

    def __init__(self, waa: Waa, *, is_modest: bool = False) -> None:
        """`is_modest`: for configurations with modest chunks alone (Waa.modest_chunk)."""
        self.waa = waa
        self._shared = cache(lambda degree: ChunkedPoolBounds(  # by degree: of a single group
            waa.times, waa.times.single(degree), waa.problem.lengths.outputs.mean))
        self._most_in_system = cache(partial(most_in_system, waa.memory, waa.capacity_bytes))
        self._held_by_division = cache(partial(held_by_division, waa.memory, waa.capacity_bytes))
        self._is_modest = is_modest
        self.work = 0  # divisions that were looked at so far, batch of boxes by batch of boxes
        self._begun: set[PlanBounds] = set()

    def _tables(self, plan: WaaPlan) -> PlanBounds:
        """They do not depend on how the devices are divided."""
        kept, key = self.waa.times.kept, (plan, self._is_modest)
        if key not in kept:
            kept[key] = PlanBounds(self.waa, plan, is_modest=self._is_modest)
        tables: PlanBounds = kept[key]
        return tables

    def bound(self, split: WaaPlans, boxes: WaaBoxes, *, worth_qps: float = 0.0,
              latency_bound_s: float = math.inf) -> BoxBounds:
        """Bounds of each of the boxes over the divisions that may be. `worth_qps`: below it, a
        throughput need not be bounded tightly. What takes longer than `latency_bound_s` need not
        count for the throughput."""
        limit = np.zeros(len(boxes))
        # seconds of a latency, of a first token, of an iteration; bytes
        least = np.full((4, len(boxes)), np.inf)
        fits = self.fits(split, boxes)
        quick = np.where(fits, self.quick_by_division(split, boxes, latency_bound_s), 0.0)
        most_quick = quick.max(axis=0)
        is_low = fits.any(axis=0) & (most_quick <= worth_qps)
        limit[is_low] = most_quick[is_low]
        least[:, is_low] = 0.0  # not looked at
        rows = np.flatnonzero(fits.any(axis=0) & ~is_low)
        if not len(rows):
            return BoxBounds(limit, *least)
        wanted = fits & (quick > worth_qps)
        wanted[:, is_low] = False
        # those that are not worth it are no better than their quick bound
        limit[rows] = np.where(fits & ~wanted, quick, 0.0).max(axis=0)[rows]
        least[:, rows] = np.where((fits & ~wanted).any(axis=0), 0.0, np.inf)[rows]
        may_be = np.zeros(wanted.shape, bool)
        may_be[:, rows] = self.waa.division.possible(split, boxes.take(rows), wanted[:, rows])
        left: list[tuple[int, PlanBounds, IntArray]] = []
        places = np.flatnonzero(may_be.any(axis=1))
        plans = [split.plan(count) for count in split.encode_devices[places].tolist()]
        if plans:
            held = np.where(may_be[places], self.waa.memory.fullest_of_many(
                plans, self._halves(boxes)), np.inf)
            least[3] = np.minimum(least[3], held.min(axis=0))
            for place, plan, own in zip(places.tolist(), plans, held, strict=True):
                if len(rows := np.flatnonzero(own <= self.waa.capacity_bytes)):
                    left.append((place, self._tables(plan), rows))
        self.waa.times.lengthen([tables.plan for _, tables, _ in left])
        new = {tables for _, tables, _ in left} - self._begun
        self.work += len(left) + NEW_WORK * len(new)
        self._begun |= new
        if left:
            self._bound_left(left, boxes, latency_bound_s, quick, limit, least)
        least[:3] /= 1 + TOLERANCE
        return BoxBounds(limit * (1 + TOLERANCE), *least)

    def fits(self, split: WaaPlans, boxes: WaaBoxes) -> BoolArray:
        """Where devices may hold the least of a box, were each pool's layers even over its own:
        [counts of encode devices, boxes]."""
        size = boxes.least.astype(float)
        return np.asarray(self.waa.memory.evenly(
            split.encode_devices, size, np.ceil(0.5 * size)) <= self.waa.capacity_bytes)

    def _bound_left(self, left: list[tuple[int, PlanBounds, IntArray]], boxes: WaaBoxes,
                    latency_bound_s: float, quick: FloatArray, limit: FloatArray,
                    least: FloatArray) -> None:
        """Bounds under the divisions that are left, each of some of the boxes, into `limit` and
        `least`."""
        waa, rows = self.waa, np.concatenate([rows for _, _, rows in left])
        which = np.repeat(np.arange(len(left)), [len(rows) for _, _, rows in left])
        own, tables = boxes.take(rows), [tables for _, tables, _ in left]
        found = bounds_of_pairs(waa, tables, which, own, latency_bound_s,
                                is_modest=self._is_modest)
        # what is decoding, with its caches, may not fit
        held = waa.memory.fullest_of_pairs(
            [one.plan for one in tables], which, waa.memory.sizes(own.easiest, np.ceil(
                0.5 * own.least.astype(float) + found.decoding)))
        # the quick bound knows how many rows the latency bound leaves time for
        places = np.array([place for place, _, _ in left])[which]
        np.maximum.at(limit, rows, np.where(held <= waa.capacity_bytes, np.minimum(
            found.most_qps, quick[places, rows]), 0.0))
        for column, seconds in zip(least[:3], (found.latency_s, found.ttft_s, found.iteration_s),
                                   strict=True):
            np.minimum.at(column, rows, seconds)

    def _halves(self, boxes: WaaBoxes) -> HeldSizes:
        """What is held at least, with half a batch in the decode pool."""
        return self.waa.memory.sizes(boxes.easiest, np.ceil(0.5 * boxes.least))

    def quick_by_division(self, split: WaaPlans, boxes: WaaBoxes,
                           latency_bound_s: float) -> FloatArray:
        """No throughput_qps [counts of encode devices, boxes] is higher: each stage's share of the
        layers takes it no longer than the time between two queries, and the shares are all of
        them."""
        waa, degree = self.waa, split.tp_degree
        degrees = list(dict.fromkeys((degree, 1)))
        decoding = np.minimum(boxes.most * waa.problem.lengths.outputs.mean,
                              self._most_in_system(split))
        rows = np.minimum(decoding / boxes.fewest, self._most_rows(
            boxes, degrees, float((decoding / boxes.fewest).max()), latency_bound_s))
        encode_qps, decode_qps = (np.zeros((len(split.encode_devices), len(boxes)))
                                  for _ in range(2))
        for own, stages in zip(degrees, split.stage_counts, strict=False):
            single = self._single(own, int(boxes.most.max()), float(rows.max()))
            decode_each = (waa.times.mean_iterations * self._decode_step(single, own, boxes, rows)
                           / np.maximum(rows, 1.0))
            encode_qps += stages[0][:, None] / single.encode_each[boxes.most]
            decode_qps += stages[1][:, None] / decode_each
        if len(taken := np.flatnonzero(boxes.chunk)):
            encode_qps[:, taken] = self._shared_by_division(
                split, boxes.take(taken), encode_qps[:, taken], latency_bound_s)
        return np.asarray(np.minimum(encode_qps, decode_qps) * (1 + QUICK_TOLERANCE))

    def _shared_by_division(self, split: WaaPlans, boxes: WaaBoxes, sent_qps: FloatArray,
                            latency_bound_s: float) -> FloatArray:
        """Likewise where the decode pool encodes what the other, which sends no more than
        `sent_qps`, cannot: in steps that both kinds of work share."""
        waa, degrees = self.waa, list(dict.fromkeys((split.tp_degree, 1)))
        iterations, mean = waa.times.mean_iterations, waa.times.mean_input
        planned = boxes.most * waa.problem.lengths.outputs.mean
        most_rows = self._most_rows(boxes, degrees, float((planned / boxes.fewest).max()),
                                    latency_bound_s)
        decoding = np.minimum(np.minimum(planned, boxes.highest * most_rows),
                              self._held_by_division(split)[:, None])
        rows = np.maximum(np.minimum(decoding / boxes.fewest, most_rows), 1.0)
        chunk = np.broadcast_to(boxes.largest_chunk.astype(float), rows.shape)
        if self._is_modest:
            chunk = np.minimum(chunk, decoding * mean / (iterations * boxes.fewest))
        decoded, encoded, step = (np.full(rows.size, np.inf) for _ in range(3))
        stages: FloatArray = np.zeros(len(rows))
        for own, counts in zip(degrees, split.stage_counts, strict=False):
            shared = self._shared(own)
            ((work, more),) = shared.work_s(rows.ravel(), chunk.ravel())
            np.minimum(decoded, work, out=decoded)
            np.minimum(encoded, more, out=encoded)
            np.minimum(step, shared.least_step_s(np.maximum(
                decoding / boxes.highest, 1.0).ravel(), chunk.ravel()), out=step)
            stages = stages + counts[1]
        decoded, encoded, step = (part.reshape(rows.shape) for part in (decoded, encoded, step))
        limit = (stages[:, None] + sent_qps * encoded) / (decoded + encoded)
        return np.asarray(np.minimum(np.maximum(limit, sent_qps), decoding / (iterations * step)))

    def quick(self, split: WaaPlans, boxes: WaaBoxes, degrees: Sequence[int],
              latency_bound_s: float = math.inf) -> tuple[FloatArray, FloatArray]:
        """Each of the boxes has (most throughput_qps, least latency_s) whatever the division, from
        one group of each degree alone: no device does more than work all the time, no token is
        quicker than through all layers without a pipeline, and no more decode than memory holds,
        nor than `latency_bound_s` leaves time for."""
        waa = self.waa
        decoding = np.minimum(boxes.most * waa.problem.lengths.outputs.mean,
                              self._most_in_system(split))
        most_rows = self._most_rows(boxes, degrees, float((decoding / boxes.fewest).max()),
                                    latency_bound_s)
        decoding = np.minimum(decoding, boxes.highest * most_rows)
        rows, least_rows = np.minimum(decoding / boxes.fewest, most_rows), decoding / boxes.highest
        encode_work, decode_work, step, through = (np.full(len(boxes), np.inf) for _ in range(4))
        iterations = waa.times.mean_iterations
        for degree in degrees:
            single = self._single(degree, int(boxes.most.max()), float(rows.max()))
            np.minimum(encode_work, degree * single.encode_each[boxes.most], out=encode_work)
            step_of_most, step_of_least = self._decode_step(
                single, degree, boxes, np.stack([rows, least_rows]))
            np.minimum(decode_work, degree * step_of_most / np.maximum(rows, 1.0),
                       out=decode_work)
            np.minimum(step, step_of_least, out=step)
            if len(taken := np.flatnonzero(boxes.chunk)):  # inputs and queries share their steps
                ((decoded, encoded),) = self._shared(degree).work_s(
                    np.maximum(rows[taken], 1.0), boxes.largest_chunk[taken].astype(float))
                encode_work[taken] = np.minimum(encode_work[taken], degree * encoded)
                decode_work[taken] = np.minimum(decode_work[taken], degree * decoded / iterations)
            np.minimum(through, single.encode_step[boxes.least] + waa.iterations_waited
                       * single.decode_steps[0], out=through)
        devices = waa.problem.cluster.num_devices
        limit = np.minimum(devices / (encode_work + iterations * decode_work),
                           decoding / (iterations * step))
        return limit * (1 + QUICK_TOLERANCE), through / (1 + QUICK_TOLERANCE)

    def largest_within(self, largest: int, degrees: Sequence[int], latency_bound_s: float) -> int:
        """No encode_batch beyond this one, of those up to `largest`, is quick enough whatever the
        division, with stages of such degrees (see `quick`); 0: none is."""
        waited, through = self.waa.iterations_waited, np.full(largest, np.inf)
        # the quickest step may be one of more rows
        rows = largest * self.waa.problem.lengths.outputs.mean
        for degree in degrees:
            single = self._single(degree, largest, rows)
            np.minimum(through, single.encode_step[1:largest + 1]
                       + waited * single.decode_steps[0], out=through)
        return int(np.searchsorted(through, latency_bound_s * (1 + QUICK_TOLERANCE), side="right"))

    def _decode_step(self, single: _Single, degree: int, boxes: WaaBoxes,
                     rows: FloatArray) -> FloatArray:
        """A step in which so many rows decode takes a single group no less [..., boxes], whether it
        also encodes or not."""
        seconds = single.decode_step(rows)
        if len(taken := np.flatnonzero(boxes.chunk)):
            chunk = np.broadcast_to(boxes.largest_chunk[taken].astype(float),
                                    rows[..., taken].shape)
            least = self._shared(degree).least_step_s(
                np.maximum(rows[..., taken], 1.0).ravel(), chunk.ravel())
            seconds[..., taken] = np.minimum(seconds[..., taken], least.reshape(chunk.shape))
        return seconds

    def _most_rows(self, boxes: WaaBoxes, degrees: Sequence[int], rows: float,
                   latency_bound_s: float) -> FloatArray:
        """No more rows [boxes] can decode together within the latency bound: a query waits for so
        many iterations, each no shorter than a step through all layers. `rows`: of that many it is
        asked at most."""
        waited = self.waa.iterations_waited
        most = np.zeros(len(boxes))
        if math.isinf(latency_bound_s) or waited <= 0:
            return np.full(len(boxes), np.inf)
        for degree in degrees:
            single = self._single(degree, int(boxes.most.max()), rows)
            iteration_s = (latency_bound_s * (1 + QUICK_TOLERANCE)
                           - single.encode_step[boxes.least]) / waited
            place = np.searchsorted(single.decode_steps, iteration_s * (1 + QUICK_TOLERANCE),
                                    side="right")
            np.maximum(most, np.append(single.sizes, np.inf)[place], out=most)
        return most

    def _single(self, degree: int, most: int, rows: float) -> _Single:
        """One group's times are known as far as these sizes."""
        # WAA-C and WAA-M share them
        known: _Single | None = self.waa.times.kept.get(("single", degree))
        if known is None or len(known.encode_each) <= most or known.sizes[-1] < rows:
            batch = np.arange(1, leap(most) + 1, dtype=float)
            each = self.waa.times.encode_query_s(batch, degree)
            times = self.waa.times.single(degree).times
            if times.is_encoder_decoder:  # WAA projects in the decode pool, which is not counted
                tokens = batch * self.waa.problem.lengths.inputs.mean
                each = each - times.cross_kv_s(tokens)[..., 0] / batch
            count = int(np.log(max(2 * rows, 2.0)) / np.log(ROWS_RATIO)) + 3
            sizes: FloatArray = np.asarray(ROWS_RATIO ** np.arange(count), float)
            per_query = (self.waa.times.decode_query_s(sizes, degree)
                         / self.waa.times.mean_iterations)
            known = self.waa.times.kept["single", degree] = _Single(
                encode_each=by_batch(np.minimum.accumulate(each)),
                encode_step=by_batch(np.minimum.accumulate((each * batch)[::-1])[::-1]),
                sizes=sizes, decode_steps=rising_minorant(sizes, per_query * sizes))
        return known

    def least_bytes(self, split: WaaPlans, batch: IntArray) -> FloatArray:
        """No configuration of such a batch [batches], or a larger one, needs less on its fullest
        device."""
        size = batch.astype(float)
        even = self.waa.memory.evenly(split.encode_devices, size, np.ceil(0.5 * size))
        return np.asarray(even.min(axis=0))


def most_of_points(bounds: WaaBounds, split: WaaPlans, configs: WaaConfigs,
                   latency_bound_s: float) -> FloatArray:
    """None of the configurations has a higher throughput_qps: by its division, before its pools are
    timed."""
    batch, groups, chunk = (values.astype(np.int64) for values in (
        configs.batch, configs.groups, configs.chunk))
    limit = bounds.quick_by_division(split, WaaBoxes(
        least=batch, most=batch, fewest=groups, highest=groups, chunk=chunk,
        largest_chunk=chunk), latency_bound_s)
    place = np.searchsorted(split.encode_devices, bounds.waa.division.divide(split, configs))
    return np.asarray(limit[place, np.arange(len(batch))])
