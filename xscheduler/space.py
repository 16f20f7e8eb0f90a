"""What is searched: cells, each a number of copies of the model on so many devices, a policy and a
tensor plan; and the points of a cell, with what a rough formula says of them.

A replay of a point tells by which factor the formula is off there; at others it is taken to be off
by as much as at the points nearest to them that were replayed, or as the policy was elsewhere."""

from __future__ import annotations

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
from xsimulator.replay.steady import SteadyFigures
from xsimulator.rough.figures import Formula, Rough

Point = tuple[int, ...]
CHUNK = "encode_chunk"
NEAR = 0.2  # chosen: of a logarithm, how far a replay tells what the formula is off by
PRIOR = 1e-3  # chosen: weight of what it is off by elsewhere, beside 1 of a replay at the point
TRUST = 0.05  # chosen: the same where a formula is taken to be right but beside its replays
OPTIMISM = 0.08  # chosen: by so much may a cell be better than is expected of it before a replay
LATENCY_OFF = 0.2  # chosen: by so much shorter may a latency be
PACE_OFF = 0.5  # chosen: by so much shorter may the time a token be
NOTHING = 0.003  # chosen: what is expected to bring no more is not replayed
CAUTION = 0.002  # chosen: of the latency bound, for each replay that broke it
ROUNDING = 1e-9  # chosen: what the last digits of times change is no difference
FINE = (-0.75, -0.5, -0.25, 0.0, 0.25, 0.5, 0.75)  # chosen: of a step of the grid, around a point


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a configuration has to keep, in seconds, each divided by its margin already."""

    latency_s: float = math.inf
    ttft_s: float = math.inf
    tpot_s: float = math.inf

    def are_kept(self, figures: SteadyFigures, longer: float = 1.0) -> bool:
        """Whether a replay kept them, its latency taken so many times as long; a length that no
        query had breaks none."""
        return not (longer * figures.latency_s > self.latency_s or figures.ttft_s > self.ttft_s
                    or figures.tpot_s > self.tpot_s)


class Off(NamedTuple):
    """Natural logarithms of what a replay showed over what the formula said."""

    throughput: float = 0.0
    latency: float = 0.0


class Alike(NamedTuple):
    """Cells of one policy and one number of stages, with chunks or without."""

    policy: str
    is_chunked: bool | None
    stages: int


class Expected(NamedTuple):
    """Queries/s of all copies at a point (None: there is none), and whether a replay says so."""

    throughput_qps: float = 0.0
    point: Point | None = None
    is_replayed: bool = False


@dataclass(eq=False)
class Cell:
    """The points of one policy by one tensor plan. `problem`: that of one of its copies.
    `is_chunked`: those alone that encode inputs in chunks beside decoding, or that do not; None:
    all."""

    problem: Problem
    formula: Formula
    plan: tuple[int, int]
    is_chunked: bool | None = None
    replayed: dict[Point, Replayed] = field(default_factory=dict)
    off: dict[Point, Off] = field(default_factory=dict)
    is_coarse: bool = True  # the points between those of the grid were not looked at
    num_points: int = 0  # that the formula was asked for
    _fine: dict[int, tuple[IntArray, Rough]] = field(default_factory=dict)  # around grid points
    num_noted: int = 0
    misses: int = 0  # replays that came out too slow where they were expected to be in time
    sure: set[Point] = field(default_factory=set)  # replayed with most queries
    longer: float = 1.0  # times as long the latency then was than by fewer queries, at most

    @property
    def policy(self) -> str:
        return self.formula.policy

    @property
    def copies(self) -> int:
        return self.problem.copies

    @property
    def alike(self) -> Alike:
        """Of which a formula is off by about as much: the longer a pipeline, the more it leaves
        out."""
        degree, gpus = self.plan
        stages = self.problem.cluster.num_devices - gpus + gpus // degree
        return Alike(self.policy, self.is_chunked, stages)

    @cached_property
    def _after(self) -> float:
        """Tokens after the first of the latency bound's query, times what their time is off by."""
        outputs = self.problem.lengths.outputs.quantile(self.problem.constraint.quantile)
        return (1 + PACE_OFF) * max(outputs - 1, 1)

    @cached_property
    def points(self) -> IntArray:
        """[points, variables] all over the cell, those that have room."""
        return self._grid[0]

    @cached_property
    def rough(self) -> Rough:
        """The formula's figures of `points`."""
        return self._grid[1]

    @cached_property
    def _grid(self) -> tuple[IntArray, Rough]:
        points = self.formula.points(self.plan)
        if self.is_chunked is not None:
            points = points[(points[:, chunk_column(self.policy)] > 0) == self.is_chunked]
        return self.with_room(points)

    def with_room(self, points: IntArray) -> tuple[IntArray, Rough]:
        """Those of some points that have room, and are timed, with their rough figures."""
        self.num_points += len(points)
        if not len(points):
            return points, Rough(**dict.fromkeys(Rough.__slots__, np.empty(0)))
        rough = self.formula.rough(self.plan, points)
        most = self.problem.num_queries or math.inf
        fits: BoolArray = ((rough.memory_bytes <= capacity_bytes(self.problem.cluster.device))
                           & (rough.throughput_qps > 0) & (rough.present <= most + 0.5))
        return points[fits], Rough(**{name: getattr(rough, name)[fits]
                                      for name in Rough.__slots__})

    def expected(self, limits: Limits, usual: Off, own: Expected,
                 weight: float = PRIOR) -> Expected:
        """The best that keeps the limits, for all that is known, of all copies. usual: what the
        formula is off by where nothing of this cell was replayed, and its weight beside 1 of a
        replay at the point. own: the best that was replayed."""
        most_s = limits.latency_s if self.off else limits.latency_s * (1 + LATENCY_OFF)
        # what came out too slow where it was expected to be in time, is not tried as closely again
        most_s *= (1 - CAUTION * self.misses) / self.longer
        off = self._off_at(self.points, usual, weight)
        best = self._best_of(self.points, self.rough, most_s, limits, off)
        if best is None:
            return own
        found = self._value(self.points, self.rough, best, off)
        if not self.off and self.is_coarse:
            return found
        if best not in self._fine:
            self._fine[best] = self.with_room(_around(self.points, self.points[best]))
        points, rough = self._fine[best]
        off = self._off_at(points, usual, weight)
        fine = self._best_of(points, rough, most_s, limits, off)
        if fine is not None:
            found = max(found, self._value(points, rough, fine, off))
        return found if found.throughput_qps > own.throughput_qps * (1 + NOTHING) else own

    def is_kept(self, point: Point, limits: Limits) -> bool:
        """Whether a point that was replayed keeps these, were it replayed with most queries."""
        figures = self.replayed[point].figures
        return figures is not None and limits.are_kept(
            figures, 1.0 if point in self.sure else self.longer)

    def best_replayed(self, is_kept: Callable[[Point], bool]) -> Expected:
        """The best of the points that were replayed, of all copies, and keep their limits."""
        best = Expected(0.0, None, True)
        for point, one in self.replayed.items():
            qps = self.copies * one.throughput_qps
            if qps > (1 + ROUNDING) * best.throughput_qps and is_kept(point):
                best = Expected(qps, point, True)
        return best

    def _value(self, points: IntArray, rough: Rough, row: int, off: FloatArray) -> Expected:
        qps = float(rough.throughput_qps[row] * np.exp(off[row, 0])) * (1 if self.off else 1 + OPTIMISM)
        point: Point = tuple(points[row].tolist())
        return Expected() if point in self.replayed else Expected(self.copies * qps, point)

    def _best_of(self, points: IntArray, rough: Rough, most_s: float, limits: Limits,
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

    def _off_at(self, points: IntArray, usual: Off, weight: float) -> FloatArray:
        """[points, 2] logarithms of (throughput, latency) over the formula's."""
        if not self.off:
            return np.tile(usual, (len(points), 1))
        where = np.log1p(np.array(list(self.off), float))
        apart = np.abs(np.log1p(points.astype(float))[:, None] - where).sum(axis=2)
        weights = np.exp(-apart / NEAR)
        known = weights @ np.array(list(self.off.values())) + weight * np.array(usual)
        return np.asarray(known / (weights.sum(axis=1) + weight)[:, None])

    def note(self, point: Point, found: Replayed) -> None:
        """Keeps what a replay showed, and what the formula is off by."""
        self.replayed[point], self.num_noted = found, self.num_noted + 1
        rough, figures = found.estimate.figures, found.figures
        if figures is None or figures.throughput_qps <= 0:
            self.off[point] = Off(-5.0, 0.0)
            return
        latency = figures.latency_s / rough.latency_s if figures.latency_s > 0 else 1.0
        self.off[point] = Off(math.log(figures.throughput_qps / rough.throughput_qps),
                              math.log(latency))


def _around(grid: IntArray, point: IntArray) -> IntArray:
    """Points between one of the grid and its neighbours, along each variable and pairs."""
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


def fresh(cell: Cell) -> Cell:
    """The same cell, nothing replayed, with what its formula said."""
    own = Cell(cell.problem, cell.formula, cell.plan, cell.is_chunked, _fine=cell._fine)
    if "_grid" in cell.__dict__:
        own.__dict__["_grid"] = cell._grid
    return own


def usual_off(cells: list[Cell]) -> Mapping[Alike, Off]:
    """What the formulas of cells alike were off by in the mean."""
    found: dict[Alike, list[Off]] = {}
    for cell in cells:
        if seen := [one for one in cell.off.values() if one.throughput > -1]:
            found.setdefault(cell.alike, []).extend(seen)
    return {alike: Off(*np.mean(own, axis=0).tolist()) for alike, own in found.items()}


def chunk_column(name: str) -> int | None:
    """Which of a policy's variables is the size of chunks; None where it has none."""
    names = policy(name).variable_names
    return names.index(CHUNK) if CHUNK in names else None
