"""The search space: cells and their points.

A cell is a number of devices of a replica, a policy and a tensor plan. A point of it is a value of
each control variable. A rough formula estimates a point's figures. A replay of a point shows by
which factor the formula is wrong there. Elsewhere the formula is corrected by the factors of the
nearest replayed points, or by the mean factor of similar cells."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from xgpt.core.lengths import BoolArray, FloatArray, IntArray
from xgpt.core.policies import policy
from xgpt.core.problem import Problem
from xscheduler.replays import Replayed
from xsimulator.memory import capacity_bytes
from xsimulator.replay.steady_state import ROUNDING, SteadyFigures
from xsimulator.rough.figures import Formula, RoughFigures

Point = tuple[int, ...]
CHUNK = "encode_chunk"
NEAR = 0.2  # chosen: distance in log(value) over which a replay's correction fades
PRIOR = 1e-3  # chosen: weight of similar cells' correction; a replay at the point has weight 1
OPTIMISM = 0.06  # chosen: how much better than it is expected, or replayed, a cell may be
LATENCY_OFF = 0.2  # chosen: how much shorter than the formula a latency or time per token may be
NOTHING = 0.003  # chosen: a gain in throughput too small to count
LEAST_GAIN = 0.02  # chosen: shares below it are near: a schedule stays for a smaller gain
FINE = (-0.75, -0.5, -0.25, 0.0, 0.25, 0.5, 0.75)  # chosen: fractions of a grid step around a point


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits in seconds, each already divided by its safety margin."""

    latency_s: float = math.inf
    ttft_s: float = math.inf
    tpot_s: float = math.inf

    def are_kept(self, figures: SteadyFigures, longer: float = 1.0) -> bool:
        """Whether a replay's figures, its latency multiplied by `longer`, are within the limits. A
        figure that no request had (nan) is."""
        return not (longer * figures.latency_s > self.latency_s or figures.ttft_s > self.ttft_s
                    or figures.tpot_s > self.tpot_s)


class Correction(NamedTuple):
    """Natural logarithms of replay / formula."""

    throughput: float = 0.0
    latency: float = 0.0


class CellKind(NamedTuple):
    """Key of similar cells: policy, with or without chunks, number of pipeline stages."""

    policy: str
    is_chunked: bool | None
    stages: int


class Expected(NamedTuple):
    """The best point of a cell (None: it has none), its requests/s over all replicas, and whether
    they come from a replay."""

    throughput_qps: float = 0.0
    point: Point | None = None
    is_replayed: bool = False


@dataclass(eq=False)
class Cell:
    """The points of one policy under one tensor plan.

    problem: of one replica. is_chunked: only the points that encode in chunks beside decoding
    (True), only the others (False), or all (None).

    room: requests at a time that its admission rule has room for, as a multiple of those by the
    simplest rule. further: the cell of a rule with more room, searched if memory binds."""

    problem: Problem
    formula: Formula
    plan: tuple[int, int]
    is_chunked: bool | None = None
    room: float = 1.0
    further: "Cell | None" = None
    replayed: dict[Point, Replayed] = field(default_factory=dict)
    off: dict[Point, Correction] = field(default_factory=dict)
    is_coarse: bool = True  # only points of the grid were evaluated so far
    num_points: int = 0  # evaluated by the formula
    # around grid points
    _fine: dict[int, tuple[IntArray, RoughFigures]] = field(default_factory=dict)
    num_noted: int = 0
    misses: int = 0  # replays that exceeded a limit which they were expected to keep
    sure: set[Point] = field(default_factory=set)  # points with a longest replay
    longer: float = 1.0  # largest latency of a longest replay / that of the shorter one before

    @property
    def policy(self) -> str:
        return self.formula.policy

    @property
    def copies(self) -> int:
        return self.problem.copies

    @cached_property
    def alike(self) -> CellKind:
        """Key of the cells for which the formula is wrong by about the same factor. The longer a
        pipeline, the more the formula leaves out."""
        degree, gpus = self.plan
        stages = self.problem.cluster.num_devices - gpus + gpus // degree
        return CellKind(self.policy, self.is_chunked, stages)

    @cached_property
    def _after(self) -> float:
        """1 + LATENCY_OFF times the tokens after the first, at the latency limit's quantile."""
        outputs = self.problem.lengths.outputs.quantile(self.problem.constraint.quantile)
        return (1 + LATENCY_OFF) * max(outputs - 1, 1)

    @cached_property
    def points(self) -> IntArray:
        """[points, variables] a grid over the cell, without points that do not fit into memory."""
        return self._grid[0]

    @cached_property
    def rough(self) -> RoughFigures:
        """The rough figures of `points`."""
        return self._grid[1]

    @cached_property
    def _grid(self) -> tuple[IntArray, RoughFigures]:
        points = self.formula.points(self.plan)
        if self.is_chunked is not None:
            points = points[(points[:, chunk_column(self.policy)] > 0) == self.is_chunked]
        return self.with_room(points)

    def with_room(self, points: IntArray) -> tuple[IntArray, RoughFigures]:
        """(points that fit into memory and have known times, their rough figures)."""
        self.num_points += len(points)
        if not len(points):
            return points, RoughFigures(**dict.fromkeys(RoughFigures.__slots__, np.empty(0)))
        rough = self.formula.rough(self.plan, points)
        most = self.problem.num_queries or math.inf
        fits: BoolArray = ((rough.memory_bytes <= capacity_bytes(self.problem.cluster.device))
                           & (rough.throughput_qps > 0) & (rough.present <= most + 0.5))
        return points[fits], RoughFigures(**{name: getattr(rough, name)[fits]
                                             for name in RoughFigures.__slots__})

    def expected(self, limits: Limits, usual: Correction, own: Expected) -> Expected:
        """The best point within the limits by the corrected formula. usual: correction by similar
        cells. own: the best replayed point, returned if nothing beats it."""
        most_s = limits.latency_s if self.off else limits.latency_s * (1 + LATENCY_OFF)
        # replays that exceeded the limit lower it, so that not all of their neighbours are tried
        most_s *= (1 - NOTHING * self.misses) / self.longer
        off = self._off_at(self.points, usual)
        best = self._best_of(self.points, self.rough, most_s, limits, off)
        if best is None:
            return own
        found = self._value(self.points, self.rough, best, off)
        if not self.off and self.is_coarse:
            return found
        if best not in self._fine:
            self._fine[best] = self.with_room(_around(self.points, self.points[best]))
        points, rough = self._fine[best]
        off = self._off_at(points, usual)
        fine = self._best_of(points, rough, most_s, limits, off)
        if fine is not None:
            found = max(found, self._value(points, rough, fine, off))
        return found if found.throughput_qps > own.throughput_qps * (1 + NOTHING) else own

    def is_kept(self, point: Point, limits: Limits) -> bool:
        """Whether a replayed point keeps the limits, also by a longest replay."""
        figures = self.replayed[point].figures
        return figures is not None and limits.are_kept(
            figures, 1.0 if point in self.sure else self.longer)

    def best_replayed(self, is_kept: Callable[[Point], bool]) -> Expected:
        """The feasible replayed point with the highest throughput."""
        best = Expected(0.0, None, True)
        for point, one in self.replayed.items():
            qps = self.copies * one.throughput_qps
            if qps > (1 + ROUNDING) * best.throughput_qps and is_kept(point):
                best = Expected(qps, point, True)
        return best

    def _value(self, points: IntArray, rough: RoughFigures, row: int, off: FloatArray) -> Expected:
        qps = float(rough.throughput_qps[row] * np.exp(off[row, 0]))
        qps *= 1 if self.off else 1 + OPTIMISM
        point: Point = tuple(points[row].tolist())
        return Expected() if point in self.replayed else Expected(self.copies * qps, point)

    def _best_of(self, points: IntArray, rough: RoughFigures, most_s: float, limits: Limits,
                 logarithms: FloatArray) -> int | None:
        if not len(points):
            return None
        off = np.exp(logarithms)
        is_slow = ((rough.latency_s * off[:, 1] > most_s) | (rough.ttft_s > limits.ttft_s)
                   | (rough.latency_s - rough.ttft_s > self._after * limits.tpot_s))
        for point in self.replayed:
            is_slow |= (points == point).all(axis=1)
        qps = np.where(is_slow, 0.0, rough.throughput_qps * off[:, 0])
        best = int(np.argmax(qps >= (1 - ROUNDING) * qps.max()))  # of equals the first
        return best if qps[best] > 0 else None

    def _off_at(self, points: IntArray, usual: Correction) -> FloatArray:
        """[points, 2] logarithms of (throughput, latency) / the formula's at these points."""
        if not self.off:
            return np.tile(usual, (len(points), 1))
        where = np.log1p(np.array(list(self.off), float))
        apart = np.abs(np.log1p(points.astype(float))[:, None] - where).sum(axis=2)
        weights = np.exp(-apart / NEAR)
        known = weights @ np.array(list(self.off.values())) + PRIOR * np.array(usual)
        return np.asarray(known / (weights.sum(axis=1) + PRIOR)[:, None])

    def note(self, point: Point, found: Replayed) -> None:
        """Records a replay of a point and the correction of the formula there."""
        self.replayed[point], self.num_noted = found, self.num_noted + 1
        rough, figures = found.estimate.figures, found.figures
        if figures is None or figures.throughput_qps <= 0:
            self.off[point] = Correction(-5.0, 0.0)
            return
        latency = figures.latency_s / rough.latency_s if figures.latency_s > 0 else 1.0
        self.off[point] = Correction(math.log(figures.throughput_qps / rough.throughput_qps),
                              math.log(latency))


def _around(grid: IntArray, point: IntArray) -> IntArray:
    """[points, variables] values between a point of the grid and its neighbours."""
    own: list[list[int]] = []
    for column, value in zip(grid.T, point.tolist(), strict=True):
        others = np.unique(column)
        if len(others) < 2 or value == 0:
            own.append([value])
            continue
        at = int(np.searchsorted(others, value))
        low, high = others[max(at - 1, 0)], others[min(at + 1, len(others) - 1)]
        low = max(int(low), 1)
        between = {round(value * (high / value) ** share) if share > 0 else
                   round(value * (value / low) ** share) for share in FINE}
        own.append(sorted({value, *between}))
    return np.stack(np.meshgrid(*own, indexing="ij"), axis=-1).reshape(-1, len(own))


def without_replays(cell: Cell) -> Cell:
    """A copy of the cell without its replays; the formula's figures are shared."""
    own = Cell(cell.problem, cell.formula, cell.plan, cell.is_chunked, cell.room,
               cell.further and without_replays(cell.further), _fine=cell._fine)
    if "_grid" in cell.__dict__:
        own.__dict__["_grid"] = cell._grid
    return own


def mean_corrections(cells: list[Cell]) -> Mapping[CellKind, Correction]:
    """{kind of cells: mean correction of its replayed points}."""
    found: dict[CellKind, list[Correction]] = {}
    for cell in cells:
        if seen := [one for one in cell.off.values() if one.throughput > -1]:
            found.setdefault(cell.alike, []).extend(seen)
    return {alike: Correction(*np.mean(own, axis=0).tolist()) for alike, own in found.items()}


def chunk_column(name: str) -> int | None:
    """Index of the variable `encode_chunk` among the policy's; None if it has none."""
    names = policy(name).variable_names
    return names.index(CHUNK) if CHUNK in names else None
