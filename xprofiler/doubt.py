"""Levels of doubt: how far computed times may be from a run, by what of it was measured.

A cell is an engine version, GPU, model shape, dtype of the weights and tensor-parallel degree of
which whole runs were published and constants fitted to. A prediction is of a measured cell, of a
neighbour (one of these differs), or far from all; of an unknown engine nothing was measured. The
errors of each level are those of published runs that were left out of the fit in whole groups
(benchmarks/published/left_out.py)."""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, NamedTuple

import numpy as np

from xgpt.core import catalog
from xgpt.core.lengths import ndtri
from xgpt.core.model import ModelSpec

LevelName = Literal["same cell", "neighbour", "far", "unknown engine"]
LEVELS: tuple[LevelName, ...] = ("same cell", "neighbour", "far", "unknown engine")
_FAR = 2  # differences


class Shape(NamedTuple):
    """Sizes that a model's step times depend on. `experts`: of each layer, 0 without."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    inner: int
    experts: int


class Cell(NamedTuple):
    """Conditions of a measured run. `weights`: their dtype where it is narrower than the model's,
    as fp8, else ""."""

    engine: str
    gpu: str
    shape: Shape
    weights: str
    tp_degree: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubt:
    """Doubt about computed times. `why`: sentence part that says what was, or was not, measured.
    `typical`: mean error of the level's left-out runs, a share. `quantiles`: (probability,
    logarithm of measured over computed latency that is not exceeded with it), ascending.
    `is_of_others`: no run of this kind is among the level's."""

    level: LevelName
    why: str
    typical: float
    quantiles: tuple[tuple[float, float], ...]
    is_of_others: bool = False

    def factor(self, confidence: float) -> float:
        """Safety factor, at least 1: a run's latency stays below the computed one times this with
        probability `confidence`. 1 at 0.5 and below. Logarithms are linear in the normal
        distribution's quantile between and beyond the level's own."""
        if confidence <= 0.5:
            return 1.0
        chances, logs = zip(*self.quantiles, strict=True)
        at = ndtri(chances)
        x = float(ndtri(confidence))
        if x > at[-1]:
            return math.exp(max(logs[-1] * x / float(at[-1]), 0.0))
        return math.exp(max(float(np.interp(x, at, logs)), 0.0))

    @property
    def words(self) -> str:
        """Level, its reason and the typical error, as "neighbour: this shape was not measured;
        typical error 7 %"."""
        others = " of others" * self.is_of_others
        return f"{self.level}: {self.why}; typical error{others} {self.typical:.0%}"


def shape_of(model: ModelSpec) -> Shape:
    """The sizes of a model."""
    experts = model.decoder.experts
    return Shape(model.num_layers, model.hidden_size, model.num_heads, model.kv_heads,
                 model.intermediate_size if experts is None else experts.inner,
                 0 if experts is None else experts.count)


def measured_cells() -> tuple[Cell, ...]:
    """Cells of the published runs that constants were fitted to, from the catalog."""
    return tuple(Cell(row["engine"], row["gpu"], Shape(*row["shape"]), row["weights"], degree)
                 for row in catalog.accuracy()["cells"] for degree in row["tp_degrees"])


@cache
def doubt_of(cell: Cell, unseen: str = "", own: tuple[Cell, ...] = ()) -> Doubt:
    """The doubt about computed times of a cell. `unseen`: what no run that was compared had, such
    as pipeline stages. `own`: cells that a user has measured."""
    measured = (*own, *measured_cells())
    found = _nearest(cell, measured)
    level = _level_of(found)
    if found is None:
        return _level(level, f"no run of {cell.engine} was compared")
    if unseen:
        return replace(_level("far", f"no run with {unseen} was compared"), is_of_others=True)
    if not found:
        whose = "your runs" if cell in own else "runs"
        return _level(level, f"{whose} of this model, device and degree were compared")
    *first, last = dict.fromkeys(found)
    what = f"{', '.join(first)} and {last} were" if first else f"{last} was"
    return _level(level, f"{what} not measured")


def level_between(cell: Cell, measured: Iterable[Cell]) -> LevelName:
    """The level of a cell's predictions where these cells were measured."""
    return _level_of(_nearest(cell, measured))


def _level_of(found: tuple[str, ...] | None) -> LevelName:
    return "unknown engine" if found is None else LEVELS[min(len(found), _FAR)]


def _nearest(cell: Cell, measured: Iterable[Cell]) -> tuple[str, ...] | None:
    """Differences of the cell from the nearest measured one of its engine, in words; () if it is
    one of them, None if there is none."""
    own = _family(cell.engine)
    return min((_differences(cell, one) for one in measured
                if _family(one.engine) == own), key=len, default=None)


def _differences(cell: Cell, other: Cell) -> tuple[str, ...]:
    """Differences, in words. Another mixture of experts counts twice; shape and dtype of the
    weights are one."""
    found = list[str]()
    if cell.engine != other.engine:
        found.append("this version of the engine")
    if cell.gpu != other.gpu:
        found.append("this device")
    if cell.shape != other.shape:
        found += ["this mixture of experts"] * _FAR if cell.shape.experts else ["this shape"]
    elif cell.weights != other.weights:
        found.append("this dtype of the weights")
    if cell.tp_degree != other.tp_degree:
        found.append(f"degree {cell.tp_degree}")
    return tuple(found)


@cache
def _family(engine: str) -> str:
    """The release of the engine that others of its rows take their constants from. A release with
    constants of its own is another engine: vLLM 0.2 says nothing of 0.14."""
    name = re.sub(r"-[0-9.]+$", "", engine)
    known = engine in catalog.names("engine")
    return name if not known or catalog.engine(engine).like == name else engine


def _level(name: LevelName, why: str) -> Doubt:
    row = catalog.accuracy()["levels"][name]
    return Doubt(level=name, why=why, typical=row["mean"],
                 quantiles=tuple((chance, log) for chance, log in row["quantiles"]))
