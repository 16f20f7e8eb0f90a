"""The few points with which a job starts, and how many more it is worth.

Measuring is to take a share of the job's own time. So the points without which nothing can be said
come first: of each kind of step the smallest, a middle and the largest sizes, between which tables
follow the roofline's shape (xprofiler.shape). They tell how long the job takes, roughly, and so how
many of the others there is time for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from xgpt.core.model import ModelSpec
from xprofiler.points import Kind, Needs, Point, inside, lacking, quick_points, sizes_in
from xprofiler.profile import Profile
from xprofiler.timing import Operator, TimingSource

START_S = 1.5  # of ranks that measure, which import torch
_TOGETHER = 4  # inputs of one step, where a query's share of attention is taken
# Of what is left, the first: sizes between those of decode steps, then of rows, then of inputs.
_WORTH = (Kind.DECODE, Kind.CROSS, Kind.REST, Kind.ENCODE, Kind.ENCODER, Kind.COMPACTION)


def coarse_points(model: ModelSpec, needs: Needs, own: Needs) -> list[Point]:
    """Those of the quick profile's points without which there are no times. `own`: the sizes of the
    job itself."""
    points = quick_points(model, needs, own)
    kept: set[Point] = set()
    for kind in {point.kind for point in points}:
        mine = [point for point in points if point.kind is kind]
        xs, ys = sorted({p.x for p in mine}), sorted({p.y for p in mine})
        first, middle, last = xs[0], xs[len(xs) // 2], xs[-1]
        match kind:
            case Kind.DECODE | Kind.CROSS:
                places = {(first, ys[0]), (middle, ys[-1]), (last, ys[0]), (last, ys[-1])}
            case Kind.ENCODE | Kind.ENCODER:
                # short ones alone take a fixed time, which others share; not of each length
                # several are encoded together
                several = min((p.x for p in mine if p.y == ys[-1]), key=lambda x: abs(x - middle))
                places = {(xs[min(1, len(xs) - 1)], ys[0]), (last, ys[0]), (several, ys[-1])}
                if kind is Kind.ENCODER:  # no other steps tell of so many rows
                    largest = max(mine, key=lambda point: point.x * point.y)
                    places.add((largest.x, largest.y))
            case Kind.REST:
                places = {(last, ys[0])}
            case Kind.COMPACTION:
                places = {(first, ys[0]), (last, ys[-1])}
        kept |= {point for point in mine if (point.x, point.y) in places}
    return [point for point in points if point in kept]


def by_worth(points: Iterable[Point]) -> list[Point]:
    """The points by what they tell of a job, the most first: the large ones of each kind."""
    return sorted(points, key=lambda p: (_WORTH.index(p.kind), -p.y, -p.x))


def told_of(profile: Profile, degree: int) -> list[Point]:
    """The points of a quick profile up to the sizes that this has itself, those included that it
    lacks; none of others' profiles."""
    own = sizes_in(profile, degree)
    if profile.model is None or own is None:
        return []
    return [point for point in inside(quick_points(profile.model, own, own), own)
            if point.kind is not Kind.COMPACTION]


def left_to_shape(profile: Profile, degree: int) -> list[Point]:
    """Those of them that it lacks: there its tables follow the roofline's shape."""
    return lacking(profile, degree, told_of(profile, degree))


def coarse_words(profile: Profile) -> str:
    """That few sizes were measured, in a sentence; empty of a profile that has what a quick one
    has."""
    degrees = profile.tp_degrees
    left = sum(len(left_to_shape(profile, degree)) for degree in degrees)
    count = sum(_count(profile, degree) for degree in degrees)
    return "" if not left else (
        f"coarse: {count} of the {count + left} sizes that tell most of a job were measured, "
        "between them times follow the roofline's shape")


def _count(profile: Profile, degree: int) -> int:
    """Sizes that were measured: decode steps, inputs, and rows of neither."""
    decode, encode, rest = (profile.table(operator.value, degree) for operator in (
        Operator.DECODE_ATTENTION, Operator.ENCODE_ATTENTION, Operator.LAYER_REST))
    rows = {p.x for p in rest} - {p.x for p in decode}
    return len(decode) + len(encode) + len(rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobWork:
    """What a job has to do in all: `queries`, and their tokens together."""

    queries: int
    input_tokens: int
    output_tokens: int


def at_best(profile: Profile) -> Profile:
    """The profile of each point's quickest sample: what others disturbed would make a job look
    long, and so worth much measuring beside them."""
    return replace(profile, tables={key: tuple(
        replace(p, samples_s=(min(p.samples_s),)) for p in points)
        for key, points in profile.tables.items()})


def expected_s(timing: TimingSource, model: ModelSpec, job: JobWork, *, ranks: int,
               degree: int) -> float:
    """About how long the job takes, from a few points: its queries divided among copies of the
    model, inputs in steps as large, and queries decoded as many together, as were measured. For a
    budget, not for a plan."""
    copies = max(ranks / degree, 1.0)
    queries, layers = job.queries / copies, model.num_layers
    mean_input = job.input_tokens / job.queries
    context = mean_input + job.output_tokens / job.queries / 2

    def takes_s(operator: Operator, x: float, y: float = 0.0) -> float:
        reach = timing.reach(operator, degree)
        seconds = timing.operator_s(operator, min(x, reach.x), min(y, reach.y), tp_degree=degree)
        return float(np.asarray(seconds))

    rest, encoders = Operator.LAYER_REST, layers
    if model.is_encoder_decoder:
        rest, encoders = Operator.ENCODER_REST, model.num_encoder_layers
    inputs = job.input_tokens / copies
    rows = min(inputs, timing.reach(rest, degree).x)
    encode_s = encoders * (inputs / rows * takes_s(rest, rows)
                           + queries * takes_s(Operator.ENCODE_ATTENTION, mean_input, _TOGETHER))
    batch = max(min(queries, timing.reach(Operator.DECODE_ATTENTION, degree).x), 1.0)
    steps = job.output_tokens / copies / batch
    layer_s = takes_s(Operator.LAYER_REST, batch) + takes_s(
        Operator.DECODE_ATTENTION, batch, context)
    if model.is_encoder_decoder:
        layer_s += takes_s(Operator.CROSS_ATTENTION, batch, mean_input)
    decode_s = steps * (layers * layer_s + takes_s(Operator.HEAD, batch)
                        + timing.facts.step_overhead_s)
    return encode_s + decode_s
