"""Points measured so far, taken apart into the profile's tables; and the host's cost of a step
besides executing it: deciding, composing, committing."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import date

import numpy as np
import torch
from torch import Tensor

from xprofiler.measure.probe import StepParts
from xprofiler.points import OWN_TABLE, Kind, Point
from xprofiler.profile import DISTURBED_LIMIT, STEP_OVERHEAD, Profile, Sample, TableKey
from xprofiler.timing import Operator
from xrunner.engine.head import Head
from xrunner.engine.pipeline import ALONE, Neighbours
from xrunner.engine.roster import Vocabulary
from xrunner.query import FinishedQuery, PreparedQuery
from xrunner.rules.rra import RraRule
from xrunner.rules.steps import StepKind
from xrunner.transport.comm import local_comms
from xrunner.transport.messages import StartMessage, StepMessage

MAX_SAMPLES = 15  # more are kept as so many order statistics, evenly spaced


class Recorder:
    """The samples of one profile under measurement; every rank holds the same."""

    def __init__(self, profile: Profile) -> None:
        """`profile`: what an earlier session measured; its points are not measured again."""
        self._profile = profile
        self._tables: dict[TableKey, dict[tuple[float, float], list[float]]] = {
            key: {(p.x, p.y): list(p.samples_s) for p in points}
            for key, points in profile.tables.items() if key.name != STEP_OVERHEAD}
        # (date, share of the machine that was missing) of each place
        self._marks: dict[tuple[TableKey, float, float], tuple[str, float]] = {
            (key, p.x, p.y): (p.date, p.missing) for key, points in profile.tables.items()
            for p in points}
        self._tries = {(key, p.x, p.y): p.tries for key, points in profile.tables.items()
                       for p in points}
        self._tried: set[tuple[TableKey, float, float]] = set()  # anew, in this session

    def has(self, point: Point, degree: int) -> bool:
        """Whether the point was measured, here or in the profile given."""
        table = self._tables.get(TableKey(OWN_TABLE[point.kind].value, degree), {})
        return (point.x, point.y) in table

    def done(self, degree: int) -> set[Point]:
        return {Point(kind, int(x), int(y)) for kind, operator in OWN_TABLE.items()
                for x, y in self._tables.get(TableKey(operator.value, degree), {})}

    def has_captured(self, degree: int) -> bool | None:
        """Whether the decode steps measured so far were captured; None: none was measured."""
        tables = (self._tables.get(TableKey(operator.value, degree)) for operator in (
            Operator.DECODE_REST, Operator.DECODE_ATTENTION))
        captured, decoded = map(bool, tables)
        return captured if decoded else None

    def forget_decoded(self, degree: int) -> None:
        """What captured decode steps took: they are launched kernel by kernel in runs."""
        for operator in (Operator.DECODE_REST, Operator.DECODE_ATTENTION, Operator.HEAD):
            self._tables.pop(TableKey(operator.value, degree), None)

    def add(self, key: TableKey, x: float, y: float, samples_s: Iterable[float],
            missing: float = 0.0) -> None:
        """Samples of one place; those of the same place measured before stay, but where they were
        disturbed, or their repeats disagree: then those do that were less disturbed, or agree
        better. `missing`: share of the machine, see Sample."""
        places, new = self._tables.setdefault(key, {}), list(samples_s)
        known, mark = places.setdefault((x, y), []), (date.today().isoformat(), missing)
        before = self._marks.get((key, x, y), ("", 0.0))
        is_either = max(missing, before[1]) > DISTURBED_LIMIT
        if known and (is_either or _sample(x, y, known).is_noisy):
            self._tried.add((key, x, y))
        if known and is_either and missing != before[1]:
            if missing < before[1]:
                places[x, y], self._marks[key, x, y] = new, mark
        elif known and _sample(x, y, known).is_noisy:
            if _sample(x, y, new).spread < _sample(x, y, known).spread:
                places[x, y], self._marks[key, x, y] = new, mark
        else:
            known.extend(new)
            self._marks[key, x, y] = (mark[0], max(missing, before[1]))

    def add_network(self, tables: Mapping[TableKey, tuple[Sample, ...]]) -> None:
        for key, points in tables.items():
            self._tables[key] = {(p.x, p.y): list(p.samples_s) for p in points}

    def has_network(self, key: TableKey) -> bool:
        return key in self._tables

    def add_step(self, point: Point, degree: int, rows: int, queries: int,
                 steps: Sequence[StepParts], num_layers: int) -> None:
        """One point's steps, taken apart. `rows`: tokens that went through the layers."""
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

    def operator(self, operator: Operator, degree: int) -> tuple[Sample, ...]:
        return _samples(self._tables.get(TableKey(operator.value, degree), {}))

    def profile(self, *, spent_s: float, host_s: Sequence[float]) -> Profile:
        """The profile of everything so far. `host_s`: the head's own seconds a step, added to what
        a step takes besides its parts."""
        tables = {key: tuple(self._marked(key, sample) for sample in _samples(places))
                  for key, places in sorted(self._tables.items()) if key.name != STEP_OVERHEAD}
        overhead = TableKey(STEP_OVERHEAD)
        besides = [s for key, places in self._tables.items() if key.name == STEP_OVERHEAD
                   for values in places.values() for s in values]
        known = [s for p in self._profile.table(STEP_OVERHEAD) for s in p.samples_s]
        host = float(np.median(host_s)) if host_s else 0.0
        if samples_s := [*known, *_ordered([host + s for s in besides])]:
            tables[overhead] = (Sample(x=0, samples_s=_ordered(samples_s)),)
        return replace(self._profile, tables=tables, spent_s=spent_s)

    def _marked(self, key: TableKey, sample: Sample) -> Sample:
        place = (key, sample.x, sample.y)
        day, missing = self._marks.get(place, ("", 0.0))
        return replace(sample, date=day, missing=missing,
                       tries=self._tries.get(place, 0 if place in self._tried else 1)
                       + (place in self._tried))


def _sample(x: float, y: float, values: Sequence[float]) -> Sample:
    return Sample(x=x, y=y, samples_s=_ordered(values))


def _samples(places: Mapping[tuple[float, float], Sequence[float]]) -> tuple[Sample, ...]:
    return tuple(Sample(x=x, y=y, samples_s=_ordered(values))
                 for (x, y), values in sorted(places.items(), key=lambda item: item[0][::-1]))


def _ordered(values: Sequence[float]) -> tuple[float, ...]:
    """The values, or MAX_SAMPLES order statistics of them."""
    if len(values) <= MAX_SAMPLES:
        return tuple(values)
    return tuple(float(q) for q in np.quantile(values, np.linspace(0, 1, MAX_SAMPLES)))


_QUERIES, _TOKENS, _GROUPS, _ROUNDS = 32, 12, 2, 5


class _NoSink:
    """Nobody listens: writing a result is paid once a query, not once a step."""

    def finished(self, result: FinishedQuery) -> None:
        """Dropped."""

    def progress(self, elapsed_s: float, output_tokens: int) -> None:
        """Dropped."""

    def should_stop(self) -> bool:
        return False


class _NoWork:
    """A stage that answers at once, so that what remains is the head's own time."""

    keeps_tokens, returns_early = True, False

    def __init__(self) -> None:
        self.steps = 0
        self._active: dict[int, int] = {}

    def start(self, message: StartMessage) -> None:
        self._active = dict.fromkeys(range(message.num_groups), 0)

    def execute(self, message: StepMessage, inputs: Tensor) -> Tensor:
        self.steps += 1
        self._active[message.group] += len(message.joined) - len(message.removed)
        is_encode = message.kind is StepKind.ENCODE
        rows = len(message.joined) if is_encode else self._active[message.group]
        return torch.zeros(rows, dtype=torch.long)

    def gives_tokens(self, message: StepMessage) -> bool:
        return True

    def awaits_encoded(self, group: int | None = None) -> bool:
        return False

    def take_encoded(self, group: int, encoded: Tensor) -> None:
        """Never called: nothing is encoded apart."""


def head_overhead() -> tuple[float, ...]:
    """Seconds of the head's loop for one step of an ordinary micro-batch; one sample a round."""
    samples = []
    for _ in range(_ROUNDS):
        stage = _NoWork()
        rule = RraRule(encode_batch=_QUERIES, decode_iterations=_TOKENS, num_groups=_GROUPS,
                       max_active=_QUERIES, kv_tokens=_QUERIES * 100)
        head = Head(rule=rule, executor=stage, neighbours=Neighbours(local_comms(1)[0], ALONE),
                    sink=_NoSink(), vocabulary=Vocabulary(eos_ids=frozenset(),
                                                          decode_text=lambda ids: ""))
        for index in range(_QUERIES):
            assert head.submit(PreparedQuery(index=index, id="", input_ids=(1,) * 64,
                                             max_new_tokens=_TOKENS, is_forced=True))
        head.start()
        start = time.perf_counter()
        head.run()
        samples.append((time.perf_counter() - start) / stage.steps)
    return tuple(samples)
