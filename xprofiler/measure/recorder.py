"""Collects measured steps as samples in a profile's tables."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import date

import numpy as np

from xprofiler.measure.probe import StepParts
from xprofiler.points import OWN_TABLE, Kind, Point
from xprofiler.profile import STEP_OVERHEAD, Profile, Sample, TableKey
from xprofiler.timing import Operator

MAX_SAMPLES = 15  # chosen: more are kept as so many order statistics, evenly spaced


class Recorder:
    """Samples of one profile under measurement; every rank holds the same."""

    def __init__(self, profile: Profile) -> None:
        """`profile`: result of earlier sessions, which this one adds to."""
        self._profile = profile
        self._tables = {key: {(p.x, p.y): p for p in points}
                        for key, points in profile.tables.items() if key.name != STEP_OVERHEAD}
        self._tries = {(key, p.x, p.y): p.tries for key, points in profile.tables.items()
                       for p in points}

    def has(self, point: Point, degree: int) -> bool:
        """Whether the point was measured, in this session or an earlier one."""
        table = self._tables.get(TableKey(OWN_TABLE[point.kind].value, degree), {})
        return (point.x, point.y) in table

    def done(self, degree: int) -> set[Point]:
        """The points measured at this tensor-parallel degree."""
        return {Point(kind, int(x), int(y)) for kind, operator in OWN_TABLE.items()
                for x, y in self._tables.get(TableKey(operator.value, degree), {})}

    def has_captured(self, degree: int) -> bool | None:
        """Whether the decode steps measured so far were captured; None: none was measured."""
        tables = (self._tables.get(TableKey(operator.value, degree)) for operator in (
            Operator.DECODE_REST, Operator.DECODE_ATTENTION))
        captured, decoded = map(bool, tables)
        return captured if decoded else None

    def forget_decoded(self, degree: int) -> None:
        """Drops the times of decode steps, for capturing them has failed and runs will launch them
        kernel by kernel."""
        for operator in (Operator.DECODE_REST, Operator.DECODE_ATTENTION, Operator.HEAD):
            self._tables.pop(TableKey(operator.value, degree), None)

    def add(self, key: TableKey, x: float, y: float, samples_s: Iterable[float],
            missing: float = 0.0) -> None:
        """Adds samples at (x, y) of a table to earlier ones there. Where either is disturbed, or
        the earlier are noisy, it keeps only the less disturbed, or those that agree better.
        `missing`: share of the machine that others used, see Sample."""
        new = Sample(x=x, y=y, samples_s=tuple(samples_s), date=date.today().isoformat(),
                     missing=missing)
        places = self._tables.setdefault(key, {})
        known = places.setdefault((x, y), new)
        if known is new:
            return
        is_disturbed, is_noisy = new.is_disturbed or known.is_disturbed, known.is_noisy
        if is_disturbed and new.missing != known.missing:
            kept = min(known, new, key=lambda one: one.missing)
        elif is_noisy:
            kept = min(known, new, key=lambda one: one.spread)
        else:
            kept = replace(new, samples_s=(*known.samples_s, *new.samples_s), tries=known.tries,
                           missing=max(new.missing, known.missing))
        if is_disturbed or is_noisy:  # once a session
            kept = replace(kept, tries=self._tries.get((key, x, y), 0) + 1)
        places[x, y] = kept

    def add_network(self, tables: Mapping[TableKey, tuple[Sample, ...]]) -> None:
        """Puts in whole tables of messages."""
        for key, points in tables.items():
            self._tables[key] = {(p.x, p.y): p for p in points}

    def has_network(self, key: TableKey) -> bool:
        """Whether the table of messages was measured."""
        return key in self._tables

    def add_step(self, point: Point, degree: int, rows: int, queries: int,
                 steps: Sequence[StepParts], num_layers: int) -> None:
        """Adds one point's steps to the tables of their parts. `rows`: tokens in a step;
        `num_layers`: layers that it executed."""
        missing = getattr(steps, "missing", 0.0)

        def put(operator: Operator, x: float, y: float, values: Iterable[float]) -> None:
            self.add(TableKey(operator.value, degree), x, y, values, missing)

        is_decode = point.kind in (Kind.DECODE, Kind.CROSS)
        if is_decode:
            put(Operator.DECODE_ATTENTION, point.x, point.y, (s.attention_s for s in steps))
            put(Operator.HEAD, queries, 0, (s.head_s for s in steps))
            self.add(TableKey(STEP_OVERHEAD, degree), rows, point.y,
                     (s.overhead_s(num_layers) for s in steps))
        elif point.kind is not Kind.REST:
            put(Operator.ENCODE_ATTENTION, point.x, point.y,
                (s.attention_s / queries for s in steps))
        if point.kind is Kind.CROSS:
            put(Operator.CROSS_ATTENTION, point.x, point.y, (s.cross_s for s in steps))
        if point.kind is Kind.ENCODER:
            put(Operator.ENCODER_REST, rows, 0, (s.rest_s for s in steps))
            put(Operator.CROSS_KV, rows, 0, (s.cross_kv_s for s in steps))
        elif is_decode or point.kind is Kind.REST:
            put(Operator.LAYER_REST, rows, 0, (s.rest_s for s in steps))
        if captured := [s.captured_rest_s for s in steps if s.captured_rest_s is not None]:
            put(Operator.DECODE_REST, rows, 0, captured)
        put(Operator.EMBED, rows, 0, (s.embed_s for s in steps))

    def profile(self, *, spent_s: float) -> Profile:
        """The Profile with all samples so far. `spent_s`: seconds spent measuring, in all."""
        tables = {key: tuple(replace(point, samples_s=_ordered(point.samples_s))
                             for _, point in sorted(places.items(), key=lambda one: one[0][::-1]))
                  for key, places in sorted(self._tables.items()) if key.name != STEP_OVERHEAD}
        besides = [s for key, places in self._tables.items() if key.name == STEP_OVERHEAD
                   for point in places.values() for s in point.samples_s]
        known = [s for p in self._profile.table(STEP_OVERHEAD) for s in p.samples_s]
        if samples_s := [*known, *_ordered(besides)]:
            tables[TableKey(STEP_OVERHEAD)] = (Sample(x=0, samples_s=_ordered(samples_s)),)
        return replace(self._profile, tables=tables, spent_s=spent_s)


def _ordered(values: Sequence[float]) -> tuple[float, ...]:
    """The values, or MAX_SAMPLES order statistics of them."""
    if len(values) <= MAX_SAMPLES:
        return tuple(values)
    return tuple(float(q) for q in np.quantile(values, np.linspace(0, 1, MAX_SAMPLES)))
