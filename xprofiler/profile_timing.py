"""A Profile as a `TimingSource`: interpolation between its points, never far beyond them. And a
source scaled by the measured times of steps."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from xgpt.core.cluster import Link
from xgpt.core.errors import XgptError
from xgpt.core.lengths import FloatArray
from xgpt.core.policies import Role
from xgpt.core.system.machine import Layout
from xprofiler.interpolation import Grid, Shape, interpolation_errors
from xprofiler.points import Needs, skipped_points
from xprofiler.profile import (
    COPY,
    ENGINE_START,
    HANDOVER,
    HANDOVER_DIRECT,
    STEP_OVERHEAD,
    Profile,
    Sample,
    TableKey,
)
from xprofiler.timing import MessageKind, Operator, Reach, TimingFacts, TimingSource, of_role

# time per request in a batch settles as the batch grows
_SHARES = Shape(grows_with_x=False, grows_with_y=False, is_power=True)
_MESSAGE = Shape(through_zero=False)
# measured: ../shared/data/vidur (Llama-2-70B) beside vLLM 0.2's runs: as far off as computed times.
# For tables of another engine than the one that runs.
IMPORTED = 0.20
MOST_NOISE = 0.1  # chosen: noise of a table's medians that counts; more comes from other programs
LEARNED_KEPT = 5  # chosen: latest runs that count, for each kind of step
# chosen: the table goes on to so many times the largest measured size; UNPACK has one speed
_PIECES, _FAR = 16, 1e6
_IN_PIECES = (Operator.LAYER_REST.value, Operator.EMBED.value)
# Least interpolation error of a table without all points of the skeleton: its own points lie too
# far apart to estimate it. Measured as the root mean square error of quick profiles at the points
# that only whole ones have (SmolLM2-135M on 1 rank x 2 threads and on 2 ranks of a Xeon). Tables of
# encoder-decoder models are assumed to be like those of decoder-only ones.
_LEFT_OUT_ERRORS = {
    Operator.LAYER_REST: 0.05, Operator.DECODE_REST: 0.05, Operator.ENCODER_REST: 0.05,
    Operator.DECODE_ATTENTION: 0.06, Operator.CROSS_ATTENTION: 0.06,
    Operator.ENCODE_ATTENTION: 0.1, Operator.HEAD: 0.04}


class TableError(NamedTuple):
    """Standard deviations of a table's systematic relative error, by cause. The noise is capped at
    MOST_NOISE: a disturbed measurement must not decide which schedule is chosen."""

    interpolation: float  # in the middle between points, root mean square
    noise: float  # of the points' medians, root mean square over those of three samples and more
    unknown: float  # share of the points that have fewer: nothing is known of their noise
    is_brief: bool = False  # whether points of the skeleton are missing
    is_noisy: bool = False  # whether the noise exceeds MOST_NOISE

    @property
    def relative(self) -> float:
        """Standard deviation of the relative error, both causes together."""
        return math.hypot(self.interpolation, self.noise)


class ProfileTiming:
    """Times of a Profile: exact at the measured points, linear between and beyond, infinite beyond
    four times the largest (xprofiler.interpolation). Operators are multiplied by `sharing`.
    `fallback` times links that the profile lacks, such as the network; without it they raise."""

    def __init__(self, profile: Profile, fallback: TimingSource | None = None,
                 marks: Sequence[str] = ()) -> None:
        """`marks`: how the profile differs from the run; `provenance` shows them."""
        self.profile, self._fallback, self._marks = profile, fallback, tuple(marks)
        self._borrowed: set[str] = set()  # messages timed by the fallback, in words
        # XRunner takes many rows through a CPU's decoder-only layers in pieces (StageModel.mixed)
        in_pieces = (profile.metadata.origin.startswith("measured")
                     and profile.metadata.device.startswith("cpu-")
                     and not any(key.name == Operator.ENCODER_REST.value for key in profile.tables))
        self._grids = {key: _grid(key, points, in_pieces and key.name in _IN_PIECES)
                       for key, points in profile.tables.items()}
        self._sharing = profile.metadata.sharing
        learned = learned_factors(profile)
        self._learned = Factors(learned, leaves_unseen=True) if learned else None
        self.facts = TimingFacts(
            step_overhead_s=self._step_overhead_s(), is_padded=profile.metadata.is_padded,
            sharing=self._sharing,
            # true of our own runner; other engines' steps hold such messages
            sends_in_groups=not profile.metadata.origin.startswith("imported") and any(
                key.name == HANDOVER for key in profile.tables),
            # degrees whose all-reduces were measured, or which the fallback times
            tp_degrees=frozenset(degree for degree in profile.tp_degrees if any((
                degree == 1, fallback is not None,
                *(key[:2] == (MessageKind.ALL_REDUCE.value, degree) for key in self._grids)))),
            **({} if (c := profile.serial_share) is None else {"serial_share": c}),
            copy_rates={key.link: points[-1].x / points[-1].median_s
                        for key, points in profile.tables.items() if key.name == COPY},
            start_s={key.tp_degree: points[-1].median_s for key, points in profile.tables.items()
                     if key.name == ENGINE_START},
            captured_degrees=frozenset(key.tp_degree for key in profile.tables
                                       if key.name == Operator.DECODE_REST.value))

    def operator_s(self, operator: Operator, x: ArrayLike, y: ArrayLike = 0.0, *,
                   tp_degree: int = 1) -> FloatArray:
        """Seconds of an operator; see TimingSource. Raises XgptError for a degree or operator that
        was not measured."""
        seconds = self._grid(operator, tp_degree)(x, y) * self._sharing
        return seconds if self._learned is None else np.asarray(
            seconds * self._learned.of(operator, x))

    def message_s(self, kind: MessageKind, num_bytes: ArrayLike, link: Link, *,
                  tp_degree: int = 1) -> FloatArray:
        """Seconds of a message; see TimingSource. Where both ways of a handover were measured, the
        quicker counts."""
        if kind is MessageKind.ALL_REDUCE and tp_degree == 1:
            return np.zeros_like(np.asarray(num_bytes, float))
        names = (HANDOVER, HANDOVER_DIRECT) if kind is MessageKind.HANDOVER else (kind.value,)
        ways = [grid(num_bytes) for name in names
                if (grid := self._grids.get(TableKey(name, tp_degree, link.name))) is not None]
        if not ways:
            return self._other(kind.value, tp_degree, link).message_s(
                kind, num_bytes, link, tp_degree=tp_degree)
        return ways[0] if len(ways) == 1 else np.asarray(np.min(ways, axis=0))

    def _step_overhead_s(self) -> float:
        overhead = self.profile.table(STEP_OVERHEAD)
        if overhead:
            return overhead[0].median_s * self._sharing
        return 0.0 if self._fallback is None else self._fallback.facts.step_overhead_s

    def reach(self, operator: Operator, tp_degree: int) -> Reach:
        """The largest measured sizes; y is infinite where the table does not depend on it."""
        grid = self._grid(operator, tp_degree)
        is_open = len(grid.ys) == 1 or operator is Operator.ENCODE_ATTENTION
        return Reach(float(grid.xs[-1]), float("inf") if is_open else float(grid.ys[-1]))

    def table_errors(self) -> Mapping[TableKey, TableError]:
        """Error of each table, estimated from its own samples. Interpolation: a quarter of the
        points' distances from lines between their neighbours, and at least that of quick profiles
        where it is one. Noise: the standard error of the medians."""
        least: dict[TableKey, float] = {}
        for degree in self.profile.tp_degrees:
            if skipped_points(self.profile, degree):
                least |= {TableKey(operator.value, degree): error
                          for operator, error in _LEFT_OUT_ERRORS.items()}
        return {key: _table_error(key, points, least.get(key))
                for key, points in self.profile.tables.items() if points}

    @property
    def common_error(self) -> float:
        """Standard deviation of a relative error that all tables share; 0 for a profile measured
        here. Imported tables were measured under another engine."""
        return IMPORTED if self.profile.metadata.origin.startswith("imported") else 0.0

    @property
    def kind_of_times(self) -> str:
        """Origin of the times, in a word: measured or imported."""
        return self.profile.metadata.origin.partition(" ")[0]

    def provenance(self) -> str:
        """One line for reports: device, dtype, layout, date, and what the times rest on besides."""
        m = self.profile.metadata
        text = (f"{m.origin} on {m.device}, {m.dtype}, "
                f"{Layout(m.ranks, m.threads_per_rank).words}, {m.date}")
        if self._learned is not None:
            text += f"; scaled by later runs here: {self._learned.words}"
        if self._fallback is not None and self._borrowed:
            text += f"; {', '.join(sorted(self._borrowed))}: {self._fallback.provenance()}"
        if self._marks:
            text += f"; NOT OF WHAT WILL RUN: {'; '.join(self._marks)}"
        return text

    def _grid(self, operator: Operator, tp_degree: int) -> Grid:
        grid = self._grids.get(TableKey(operator.value, tp_degree))
        if grid is not None:
            return grid
        reason, degrees = self.profile.refused.get(tp_degree), self.profile.tp_degrees
        if reason is not None:
            raise XgptError(f"tensor-parallel degree {tp_degree}: {reason}")
        if tp_degree not in degrees:
            measured = ", ".join(str(d) for d in degrees)
            raise XgptError(f"this profile has no tensor-parallel degree {tp_degree}; it has: "
                            f"{measured}. `xgpt profile` measures more")
        raise XgptError(f"this profile ({self.profile.metadata.origin}) has no table "
                        f"{operator.value!r}")

    def _other(self, name: str, tp_degree: int, link: Link) -> TimingSource:
        if self._fallback is not None:
            self._borrowed.add(f"{name} over {link.name}")
            return self._fallback
        links = sorted({k.link for k in self.profile.tables if k.name == name and k.link})
        raise XgptError(f"this profile has no {name} over {link.name!r} at degree {tp_degree}; "
                        f"it has: {', '.join(links) or 'none'}")


def learned_factors(profile: Profile) -> dict[str, Factor]:
    """Factor on the profile's times by kind of step: the median over the latest LEARNED_KEPT
    runs."""
    found = {}
    for kind in dict.fromkeys(own.kind for own in profile.learned):
        latest = [own for own in profile.learned if own.kind == kind][-LEARNED_KEPT:]
        found[kind] = Factor(rows=statistics.median(own.rows for own in latest),
                             factor=statistics.median(own.factor for own in latest))
    return found


def _grid(key: TableKey, points: Sequence[Sample], is_in_pieces: bool) -> Grid:
    xs, ys, seconds = ([p.x for p in points], [p.y for p in points], [p.median_s for p in points])
    most, is_unpack = max(xs, default=0.0), key.name == Operator.UNPACK.value
    if is_unpack or is_in_pieces and xs and xs[-1] == most >= Needs().tokens:  # whole pieces
        times = _FAR if is_unpack else _PIECES
        xs, ys = [*xs, times * xs[-1]], [*ys, ys[-1]]
        seconds.append(times * seconds[-1])
    return Grid(xs, ys, seconds, table_shape(key))


def table_shape(key: TableKey) -> Shape:
    """The Shape by which the points of a table are interpolated."""
    if key.name == Operator.ENCODE_ATTENTION.value:
        return _SHARES
    return _MESSAGE if key.link else Shape()


def _table_error(key: TableKey, points: Sequence[Sample], least: float | None) -> TableError:
    """Error of a table. `least`: least interpolation error, where skeleton points are missing."""
    missed = np.concatenate([np.zeros(1), *errors_along(key, points, 0), *(
        errors_along(key, points, 1) if table_shape(key).grows_with_y else ())])
    noise = [p.standard_error for p in points if math.isfinite(p.standard_error)]
    interpolation = float(np.sqrt(np.sum(missed**2) / max(np.count_nonzero(missed), 1))) / 4
    scatter = float(np.sqrt(np.mean(np.square(noise)))) if noise else 0.0
    return TableError(
        interpolation=max(interpolation, least or 0.0), is_brief=least is not None,
        noise=min(scatter, MOST_NOISE),
        is_noisy=scatter > MOST_NOISE and key.name in {
            operator.value for operator in _LEFT_OUT_ERRORS},
        unknown=1 - len(noise) / len(points))


def errors_along(key: TableKey, points: Sequence[Sample], axis: int) -> Iterator[FloatArray]:
    """Yields for each line of points along x (axis 0) or y (axis 1) their relative leave-one-out
    errors, [points of the line]."""
    lines: dict[float, list[tuple[float, float]]] = {}
    for point in points:
        place = (point.x, point.y)
        lines.setdefault(place[1 - axis], []).append((place[axis], point.median_s))
    for line in map(sorted, lines.values()):
        yield interpolation_errors([at for at, _ in line], [s for _, s in line],
                                   is_power=table_shape(key).is_power and axis == 0)


ENCODE, DECODE, MIXED = "encode", "decode", "mixed"  # xrunner.rules.steps.StepKind
_ENCODED = frozenset({Operator.ENCODE_ATTENTION, Operator.ENCODER_REST, Operator.CROSS_KV})
_DECODED = frozenset({Operator.DECODE_ATTENTION, Operator.DECODE_REST, Operator.CROSS_ATTENTION,
                      Operator.HOST_ATTENTION, Operator.KV_COMPACTION})
_UNSEEN_RATIO = 4.0  # chosen: see Factors


class Factor(NamedTuple):
    """Measured over expected time (`factor`) of steps with `rows` tokens."""

    rows: float
    factor: float


class Factors:
    """Factors on each operator's seconds, derived from factors per kind of step.

    Attention is scaled by the factor of the kind of step that has it. Operators that depend on
    rows are scaled by the factor measured at as many rows. Between the rows of two kinds the
    logarithm of the factor is interpolated along that of the rows; beyond them it stays."""

    def __init__(self, by_kind: Mapping[str, Factor], *, leaves_unseen: bool = False) -> None:
        """`by_kind`: factor by kind of step, at least one. `leaves_unseen`: whether encoding or
        decoding keeps the factor 1 if no step with it was measured. The factor of operators that
        depend on rows then returns to 1 within _UNSEEN_RATIO times the rows towards that kind:
        encode steps have more rows than decode steps."""
        assert by_kind and all(own.factor > 0 for own in by_kind.values()), f"{by_kind = }"
        self.by_kind = dict(by_kind)
        nodes = sorted(by_kind.values())
        if leaves_unseen and len(by_kind) == 1 and MIXED not in by_kind:
            (own,) = nodes
            ratio = _UNSEEN_RATIO if DECODE in by_kind else 1 / _UNSEEN_RATIO
            nodes = sorted((own, Factor(max(own.rows, 1.0) * ratio, 1.0)))
            by_kind = {ENCODE: Factor(own.rows, 1.0), DECODE: Factor(own.rows, 1.0), **by_kind}
        self._rows = np.log([max(node.rows, 1.0) for node in nodes])
        self._factors = np.log([node.factor for node in nodes])
        self.encode, self.decode = (
            next(by_kind[kind].factor for kind in (own, MIXED, other) if kind in by_kind)
            for own, other in ((ENCODE, DECODE), (DECODE, ENCODE)))

    def of(self, operator: Operator, x: ArrayLike) -> FloatArray | float:
        """Factor on the seconds of `operator` at x."""
        if operator in _ENCODED:
            return self.encode
        if operator in _DECODED:
            return self.decode
        rows = np.log(np.maximum(np.asarray(x, float), 1.0))
        return np.asarray(np.exp(np.interp(rows, self._rows, self._factors)))

    @property
    def words(self) -> str:
        """The factors by kind of step, as in "decode steps x 0.56"."""
        return ", ".join(f"{kind} steps x {own.factor:.2f}"
                         for kind, own in sorted(self.by_kind.items()))


class Retimed:
    """`source` with its times multiplied by factors per kind of step. A kind that was not measured
    takes the factor of the others: what slows a machine slows everything."""

    def __init__(self, source: TimingSource, factors: Mapping[str, Factor]) -> None:
        """`factors`: factor by kind of step, at least one."""
        self.source, self.factors, self.reach = source, Factors(factors), source.reach

    def of_role(self, role: Role) -> TimingSource:
        """The source for steps of a pool of this role (xprofiler.timing.of_role)."""
        kinds = {ENCODE: (ENCODE,), DECODE: (DECODE, MIXED)}.get(role, ())
        own = {kind: self.factors.by_kind[kind] for kind in kinds if kind in self.factors.by_kind}
        return Retimed(of_role(self.source, role), own) if own else self

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)

    def operator_s(self, operator: Operator, x: ArrayLike, y: ArrayLike = 0.0, *,
                   tp_degree: int = 1) -> FloatArray:
        """See TimingSource."""
        seconds = self.source.operator_s(operator, x, y, tp_degree=tp_degree)
        return np.asarray(seconds * self.factors.of(operator, x))

    def message_s(self, kind: MessageKind, num_bytes: ArrayLike, link: Link, *,
                  tp_degree: int = 1) -> FloatArray:
        """See TimingSource. All-reduces are part of steps and scaled, other messages are not."""
        seconds = self.source.message_s(kind, num_bytes, link, tp_degree=tp_degree)
        return seconds * self.factors.decode if kind is MessageKind.ALL_REDUCE else seconds

    def provenance(self) -> str:
        """See TimingSource."""
        return f"{self.source.provenance()}; scaled by measured steps: {self.factors.words}"

    @property
    def facts(self) -> TimingFacts:
        """See TimingSource."""
        facts = self.source.facts
        return replace(facts, step_overhead_s=facts.step_overhead_s * self.factors.decode)
