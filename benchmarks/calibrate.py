"""A roofline fit to a few measured points: least squares on the logarithms of predicted/measured,
with a loss that grows linearly beyond `OUTLIER`, since single kernels lie a quarter off the trend
of their neighbours and few points cannot outvote one.

What is fit depends on the points. Each kind of point frees the constants it can tell apart, and
needs at least as many points as it frees; all others stay as they are. A weak pull towards the
uncalibrated values (`PULL`, in natural logarithms) decides what the points leave open.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from xgpt.core.cluster import Link
from xgpt.core.errors import InputError, Mistake
from xprofiler.constants import LinkConstants, RooflineConstants
from xprofiler.links import link_kind
from xprofiler.roofline import Roofline
from xprofiler.timing import Operator

PULL = 0.05  # a factor e away from the uncalibrated value costs as much as a residual of 5 %
OUTLIER = 0.1  # residual (natural logarithm) from which on the loss is linear
REACH = 20.0  # a constant may change by this factor, a share never beyond 1

_FREED_BY_GEMM = ("gemm_flops_share", "gemm_half_rows", "gemm_bytes_share", "gemm_launch_s")
_FREED_BY_COPY = ("elementwise_bytes_share", "elementwise_launch_s")
_FREED_BY_ENCODE = ("encode_attention_flops_share", "encode_attention_launch_s")
_FREED_BY_DECODE = ("decode_attention_bytes_share", "decode_attention_launch_s")
_FREED_BY_OPERATOR = {
    Operator.LAYER_REST: _FREED_BY_GEMM, Operator.ENCODER_REST: _FREED_BY_GEMM,
    Operator.CROSS_KV: _FREED_BY_GEMM, Operator.HEAD: _FREED_BY_GEMM,
    Operator.EMBED: _FREED_BY_COPY, Operator.KV_COMPACTION: _FREED_BY_COPY,
    Operator.ENCODE_ATTENTION: _FREED_BY_ENCODE, Operator.DECODE_ATTENTION: _FREED_BY_DECODE,
    Operator.CROSS_ATTENTION: _FREED_BY_DECODE}
_FREED_BY_LINK = ("launch_s", "large_launch_s")  # and the share at each degree measured


class Gemm(NamedTuple):
    """One rank's matrix product [rows, k] x [k, n]."""

    n: float
    k: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationPoint:
    """One measurement. An operator at (x, y) on each rank of a group; or a product of x rows; or
    an all-reduce of x bytes over a link, by ranks that start together (as nccl-tests do)."""

    timed: Operator | Gemm | Link
    x: float
    y: float = 0.0
    tp_degree: int = 1
    measured_s: float

    def predicted_s(self, roofline: Roofline) -> float:
        """The roofline's seconds at this point."""
        if isinstance(self.timed, Gemm):
            return float(roofline.kernels.gemm_s(self.x, *self.timed))
        if isinstance(self.timed, Link):
            return float(roofline.links.collective_s(self.x, self.tp_degree, self.timed))
        return float(roofline.operator_s(self.timed, self.x, self.y, tp_degree=self.tp_degree))

    def __str__(self) -> str:
        if isinstance(self.timed, Gemm):
            return f"gemm [{self.x:g}, {self.timed.k:g}] x [{self.timed.k:g}, {self.timed.n:g}]"
        if isinstance(self.timed, Link):
            return f"all-reduce of {self.x:g} bytes, degree {self.tp_degree}, {self.timed.name}"
        return f"{self.timed.value} at ({self.x:g}, {self.y:g}), degree {self.tp_degree}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """A point beside what the calibrated roofline says of it."""

    point: CalibrationPoint
    predicted_s: float

    @property
    def ratio(self) -> float:
        """predicted / measured."""
        return self.predicted_s / self.point.measured_s

    def __str__(self) -> str:
        return (f"{self.point}: predicted {self.predicted_s:.4g} s, measured "
                f"{self.point.measured_s:.4g} s, ratio {self.ratio:.3f}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Constants for `Roofline(model, device, dtype, constants)`, and how well they fit."""

    constants: RooflineConstants
    residuals: tuple[Residual, ...]

    def __str__(self) -> str:
        return "\n".join(str(residual) for residual in self.residuals)


class _Freed(NamedTuple):
    """One number to fit: what it is called, its value now, and how to put another in its place."""

    name: str
    value: float
    is_share: bool
    put: Callable[[RooflineConstants, float], RooflineConstants]


def calibrate(roofline: Roofline, points: Sequence[CalibrationPoint]) -> Calibration:
    """Fit `roofline`'s constants to `points`.

    Raises InputError, with every mistake, for sizes or times that are not positive and finite,
    and for too few points of a kind."""
    _check(points)
    start = roofline.constants
    freed = _freed(start, points)
    logs = np.log([f.value for f in freed])
    ceiling = np.array([math.log(1.0 / f.value) if f.is_share else math.log(REACH) for f in freed])
    measured = np.log([p.measured_s for p in points])

    def constants_at(change: NDArray[np.float64]) -> RooflineConstants:
        found = start
        for one, value in zip(freed, np.exp(logs + change), strict=True):
            found = one.put(found, float(value))
        return found

    def misses(change: NDArray[np.float64]) -> NDArray[np.float64]:
        changed = roofline.with_constants(constants_at(change))
        predicted = np.log([p.predicted_s(changed) for p in points])
        return np.concatenate([predicted - measured, PULL * change])

    fit = least_squares(misses, np.minimum(0.0, ceiling - 1e-9),
                        bounds=(-math.log(REACH), np.maximum(ceiling, 1e-6)),
                        loss="soft_l1", f_scale=OUTLIER)
    constants = constants_at(fit.x)
    changed = roofline.with_constants(constants)
    return Calibration(constants=constants, residuals=tuple(
        Residual(point=p, predicted_s=p.predicted_s(changed)) for p in points))


def _check(points: Sequence[CalibrationPoint]) -> None:
    mistakes = []
    for index, point in enumerate(points):
        for key in ("x", "measured_s", "tp_degree"):
            value = getattr(point, key)
            if not (math.isfinite(value) and value > 0):
                mistakes.append(_mistake(f"point {index}: {key}", value, "positive and finite"))
        if not (math.isfinite(point.y) and point.y >= 0):
            mistakes.append(_mistake(f"point {index}: y", point.y, "finite, 0 or more"))
        if isinstance(point.timed, Link) and point.tp_degree == 1:
            mistakes.append(_mistake(f"point {index}: tp_degree", 1, "2 or more: an all-reduce"))
    for kind, (num_points, num_freed) in _counts(points).items():
        if num_points < num_freed:
            mistakes.append(_mistake(f"points of {kind}", num_points,
                                     f"at least {num_freed}: as many constants are fit to them"))
    if not points:
        mistakes.append(_mistake("points", 0, "at least one kind of measurement"))
    if mistakes:
        raise InputError(mistakes)


def _mistake(key: str, value: object, allowed: str) -> Mistake:
    return Mistake(file="calibration", line=None, key=key, value=value, allowed=allowed)


def _counts(points: Sequence[CalibrationPoint]) -> dict[str, tuple[int, int]]:
    """Kind of point -> (how many there are, how many constants they free)."""
    names: dict[str, set[str]] = {}
    num_points: dict[str, int] = {}
    for point in points:
        kind, freed = _frees(point)
        names.setdefault(kind, set()).update(freed)
        num_points[kind] = num_points.get(kind, 0) + 1
    return {kind: (num_points[kind], len(names[kind])) for kind in names}


def _frees(point: CalibrationPoint) -> tuple[str, tuple[str, ...]]:
    """(kind of point, names of the constants it frees)."""
    if isinstance(point.timed, Link):
        return f"link {link_kind(point.timed)}", (*_FREED_BY_LINK, f"share {point.tp_degree}")
    names = (_FREED_BY_GEMM if isinstance(point.timed, Gemm)
             else _FREED_BY_OPERATOR[point.timed])
    return names[0].rsplit("_", 2)[0], names


def _freed(constants: RooflineConstants, points: Sequence[CalibrationPoint]) -> list[_Freed]:
    named: dict[str, _Freed] = {}
    for point in points:
        if isinstance(point.timed, Link):
            kind = link_kind(point.timed)
            degrees = {p.tp_degree for p in points
                       if isinstance(p.timed, Link) and link_kind(p.timed) == kind}
            named |= {f.name: f for f in _freed_of_link(constants, kind, sorted(degrees))}
        else:
            named |= {name: _field(constants, name) for name in _frees(point)[1]}
    return [f for f in named.values() if f.value > 0]  # what costs nothing here stays free


def _field(constants: RooflineConstants, name: str) -> _Freed:
    return _Freed(name, getattr(constants, name), name.endswith("_share"),
                  lambda c, value: replace(c, **{name: value}))  # type: ignore[arg-type]


def _freed_of_link(constants: RooflineConstants, kind: str,
                   degrees: Sequence[int]) -> list[_Freed]:
    link: LinkConstants = getattr(constants, kind)
    known, shares = zip(*link.all_reduce_shares, strict=True)

    def fixed(name: str) -> _Freed:
        return _Freed(f"{kind}.{name}", getattr(link, name), False, lambda c, value: replace(
            c, **{kind: replace(getattr(c, kind), **{name: value})}))

    def share(degree: int) -> _Freed:
        value = float(np.interp(np.log2(degree), np.log2(known), shares))
        return _Freed(f"{kind}.share {degree}", value, True,
                      lambda c, value: _with_share(c, kind, degree, value, degrees))

    return [*map(fixed, _FREED_BY_LINK), *map(share, degrees)]


def _with_share(constants: RooflineConstants, kind: str, degree: int, value: float,
                degrees: Sequence[int]) -> RooflineConstants:
    """Only degrees that were measured keep a share; between and beyond them it is interpolated."""
    link: LinkConstants = getattr(constants, kind)
    kept = {d: s for d, s in link.all_reduce_shares if d in degrees} | {degree: value}
    return replace(constants, **{kind: replace(  # type: ignore[arg-type]
        link, all_reduce_shares=tuple(sorted(kept.items())))})
