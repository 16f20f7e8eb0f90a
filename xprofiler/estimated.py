"""Times of a model of which nothing was measured here, from what is known of the machine.

What each operator costs once, for each query, for an element that it moves and for an operation
(xprofiler.shape) is taken from a profile of another model, or of another layout of the cores, on
the same machine; where there is none, from the machine's peaks and from how near layers came to
theirs. The model's own shape says the rest. It is for jobs that are shorter than measuring is; what
their steps take is added to it, as to any other profile."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from typing import NamedTuple

import numpy as np

from xgpt.core.layout import Layout
from xgpt.core.lengths import FloatArray
from xgpt.core.model import ModelSpec
from xgpt.core.units import DTYPE_BYTES
from xprofiler.completion import LEAST_S
from xprofiler.points import Kind, Needs, Point, quick_points
from xprofiler.profile import (
    DISTURBED_LIMIT,
    ESTIMATED,
    ESTIMATED_LIKE,
    STEP_OVERHEAD,
    Peaks,
    Profile,
    ProfileMetadata,
    Sample,
    TableKey,
)
from xprofiler.shape import SHAPED, Measured, costs_of, features, places
from xprofiler.timing import Operator
from xprofiler.work import work

# By peaks alone: what share of them operators reach, what they take once, and attention over a
# cache for each query. Roughly what SmolLM2-135M, OPT-125M and T5-small in bfloat16 and float32 had
# on one core of an EPYC that others shared.
_PRODUCTS_SHARE, _ATTENTION_SHARE, _BANDWIDTH_SHARE = 0.6, 0.3, 0.7
_ONCE_S, _EACH_S, _OVERHEAD_S = 150e-6, 2e-6, 500e-6
_LITTLE_ONCE_S = 15e-6  # of what is one call
_THREAD_BYTES_PER_S = 1e10
_ATTENTION = frozenset({Operator.ENCODE_ATTENTION, Operator.DECODE_ATTENTION,
                        Operator.CROSS_ATTENTION})
# whose costs serve where another model had no such operator
_LIKE = {Operator.ENCODER_REST: Operator.LAYER_REST, Operator.CROSS_KV: Operator.LAYER_REST,
         Operator.CROSS_ATTENTION: Operator.DECODE_ATTENTION}
_FURTHER = (Operator.EMBED, Operator.KV_COMPACTION)  # tables besides those that have a shape
_TIMED = (*(SHAPED - {Operator.DECODE_REST}), *_FURTHER)  # of cores, which capture no steps
# Of a profile, what must be the same for its costs to be of the same machine and code.
# Drawing a token takes several times as long as taking the likeliest.
_SAME = ("device", "dtype", "weight_dtype", "kernels", "libraries", "sampling", "is_padded",
         "nodes")


class Known(NamedTuple):
    """What the machine is known to take. `costs`: by operator and tensor-parallel degree, of each
    of its features; `messages`: tables of links; `origin`: of a profile by it."""

    costs: Mapping[tuple[Operator, int], FloatArray]
    overhead_s: float
    messages: Mapping[TableKey, tuple[Sample, ...]]
    origin: str


def tells_of(profile: Profile, wanted: ProfileMetadata) -> bool:
    """Whether a profile of another model, or of another layout, tells anything of `wanted`: not
    where nothing of its layers was measured yet, where it is of another machine, other code or
    another sampling, or of ranks whose messages it does not know."""
    own = profile.metadata
    is_measured = profile.model is not None and own.origin == "measured" and any(
        profile.table(Operator.LAYER_REST.value, degree) for degree in profile.tp_degrees)
    ours, theirs = asdict(own), asdict(wanted)
    return is_measured and own.sharing == 1 and all(
        ours[key] == theirs[key] for key in _SAME) and (
        wanted.ranks == 1 or _is_same_layout(own, wanted))


def known_by(profile: Profile, wanted: ProfileMetadata) -> Known | None:
    """What a profile of another model, or of another layout, tells of `wanted`; None where that
    is nothing."""
    if not tells_of(profile, wanted):
        return None
    own, is_same_layout = profile.metadata, _is_same_layout(profile.metadata, wanted)
    # a rank's share of the cores and of the memory's bandwidth, with all ranks at work
    share = own.threads_per_rank / wanted.threads_per_rank
    usual, costs = known_by_peaks(_peaks_of(profile), own).costs, {}
    for key, points in profile.tables.items():
        operator = _OPERATORS.get(key.name)
        if operator is None or key.link or not points:
            continue
        costs[operator, key.tp_degree] = _fitted(
            profile, operator, key.tp_degree, points, usual[operator, 1]) * (
            np.r_[1.0, np.full(len(_none(operator)) - 1, share)])
    overhead = profile.table(STEP_OVERHEAD)
    origin = f"{ESTIMATED_LIKE} {own.model}" if is_same_layout else (
        f"{ESTIMATED} from {own.model} on {Layout(own.ranks, own.threads_per_rank).words}")
    return Known(costs, overhead[0].median_s if overhead else _OVERHEAD_S,
                 {key: points for key, points in profile.tables.items() if key.link}, origin)


def peaks_tell_of(wanted: ProfileMetadata) -> bool:
    """Whether known_by_peaks is of `wanted`: of a single rank that multiplies in its own dtype and
    takes the likeliest token."""
    return (wanted.ranks == 1 and wanted.sampling == "greedy"
            and wanted.weight_dtype == wanted.dtype)


def known_by_peaks(peaks: Peaks, metadata: ProfileMetadata, *, missing: float = 0.0) -> Known:
    """What the machine's peaks tell of a single rank. `missing`: share of it that others had while
    they were measured, which is said where it is more than little."""
    while_others = (f" (measured while others had {missing:.0%} of it)"
                    if missing > DISTURBED_LIMIT else "")
    byte_s = DTYPE_BYTES[metadata.dtype] / (_BANDWIDTH_SHARE * peaks.bandwidth_bytes_per_s)
    costs = {}
    for operator in _TIMED:
        reached = _ATTENTION_SHARE if operator in _ATTENTION else _PRODUCTS_SHARE
        each = [_EACH_S] if len(_none(operator)) == 4 else []
        is_little = operator in _ATTENTION or operator in _FURTHER
        once_s = _LITTLE_ONCE_S if is_little else _ONCE_S
        costs[operator, 1] = np.array(
            [once_s, *each, byte_s, 1 / (reached * peaks.flops_per_s)])
    return Known(costs, _OVERHEAD_S, {}, f"{ESTIMATED} from this machine's peaks{while_others}")


def estimated(known: Known, model: ModelSpec, metadata: ProfileMetadata, needs: Needs, own: Needs,
              degrees: Iterable[int]) -> Profile | None:
    """A profile of the model for sizes up to the larger of `needs` and `own`, by what is known;
    None where that says nothing of a degree."""
    points = [*quick_points(model, needs, needs), *quick_points(model, needs, own)]
    tables: dict[TableKey, tuple[Sample, ...]] = dict(known.messages)
    tables[TableKey(STEP_OVERHEAD)] = (Sample(x=0, samples_s=(known.overhead_s,)),)
    for degree in degrees:
        for operator in _TIMED:
            where = sorted(_places(points, operator), key=lambda place: place[::-1])
            if not where:
                continue
            costs = known.costs.get((operator, degree))
            if costs is None:
                costs = known.costs.get((_LIKE.get(operator, operator), degree))
            if costs is None:
                return None
            x, y = np.array(where, float).T
            seconds = np.maximum(features(model, operator, degree, x, y) @ costs, LEAST_S)
            tables[TableKey(operator.value, degree)] = tuple(
                Sample(x=a, y=b, samples_s=(s,))
                for (a, b), s in zip(where, seconds.tolist(), strict=True))
    return Profile(metadata=replace(metadata, origin=known.origin), tables=tables,
                   model=model)


_OPERATORS = {operator.value: operator for operator in _TIMED}


def _is_same_layout(one: ProfileMetadata, other: ProfileMetadata) -> bool:
    return (one.ranks, one.threads_per_rank) == (other.ranks, other.threads_per_rank)


def _fitted(profile: Profile, operator: Operator, degree: int,
            points: Iterable[Sample], usual: FloatArray) -> FloatArray:
    assert profile.model is not None
    x, y, seconds = np.array([(p.x, p.y, p.median_s) for p in points], float).T
    return costs_of(profile.model, operator, degree, Measured(x, y, seconds), usual)


def _peaks_of(profile: Profile) -> Peaks:
    """Roughly: what a rank's layers came to at their largest size, and a thread's bandwidth."""
    assert profile.model is not None
    degree, points = next((degree, points) for degree in profile.tp_degrees if (
        points := profile.table(Operator.LAYER_REST.value, degree)))
    largest = max(points, key=lambda point: point.x)
    done = work(profile.model, Operator.LAYER_REST, largest.x, tp_degree=degree, item_bytes=1)
    return Peaks(flops_per_s=float(done.flops) / max(largest.median_s, LEAST_S) / _PRODUCTS_SHARE,
                 bandwidth_bytes_per_s=_THREAD_BYTES_PER_S * profile.metadata.threads_per_rank,
                 source="its layers")


def _none(operator: Operator) -> FloatArray:
    """One value for each feature of the operator."""
    return np.zeros(4 if operator in (Operator.DECODE_ATTENTION, Operator.CROSS_ATTENTION) else 3)


def _places(points: Iterable[Point], operator: Operator) -> set[tuple[float, float]]:
    """Where a profile of these points has times of the operator."""
    points = list(points)
    if operator is Operator.KV_COMPACTION:
        return {(p.x, p.y) for p in points if p.kind is Kind.COMPACTION}
    if operator is Operator.EMBED:
        return {(p.x if p.kind in (Kind.DECODE, Kind.CROSS) else p.x * max(p.y, 1), 0)
                for p in points if p.kind is not Kind.COMPACTION}
    return places(points, operator)
