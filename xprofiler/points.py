"""Points to measure: a skeleton that spans the sizes of a job. And the noise of measured points:
which have repeats that disagree too much to plan by. Torch-free.

Sizes are kept off the powers of two: kernels tile by them and are up to a tenth quicker there than
at the sizes between, which a run meets. Input lengths lie on both sides of every tile."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal, NamedTuple

from xgpt.core.model import ModelSpec
from xprofiler.profile import DISTURBED_LIMIT, NOISE_LIMIT, Profile, Sample
from xprofiler.timing import Operator

DECODE_ROWS_UP_TO = 66  # rows of LAYER_REST that are timed in decode steps; more, in encode steps
STEP_CONTEXT = 130  # context of a decode step that is measured for its rows alone
MEAN_INPUT = 70  # tokens of an average query in an encode step measured for its rows alone
_TOGETHER = 4  # queries of one length encoded together, against one alone
# Attention of a whole input works in tiles, and its time jumps from one multiple to the next, on
# CPUs by a sixth to a quarter. There torch's kernel takes tiles of 32 tokens, of 64 from 192 tokens
# on and of 256 from 768 on; on GPUs tiles have 64 and 128.
_SMALL_TILE, _LARGE_TILE, _CHANGES, _TILED_UP_TO = 32, 64, (192, 768), 1024
_QUICK_BATCHES, _QUICK_LENGTHS = (1, 9, 33), (5, 20, 64, 192)  # chosen; and always the largest
_MANY_QUERIES = 260  # in a decode step: a quick profile then has a batch between them and 33
_QUICK_ROWS = 260  # least rows of a quick profile's encode steps: decode steps show fewer


class Kind(Enum):
    """Kind of step that is executed to measure a point, and the meaning of its x and y."""

    DECODE = "decode"  # x = queries, y = the longest context
    # an encode step of few layers, for its attention alone: x = tokens of each query, y = queries
    ENCODE = "encode"
    REST = "rest"  # an encode step of ordinary queries with x tokens in all, for its rows alone
    COMPACTION = "compaction"  # x = cache rows moved, y = tokens in each
    # encoder-decoder models
    ENCODER = "encoder"  # an encoder step: x = tokens of each query, y = queries
    CROSS = "cross"  # a decoder step: x = queries, y = encoder tokens each


# The table that a kind of point is stored in, at the point's own (x, y).
OWN_TABLE = {
    Kind.DECODE: Operator.DECODE_ATTENTION, Kind.ENCODE: Operator.ENCODE_ATTENTION,
    Kind.REST: Operator.LAYER_REST, Kind.COMPACTION: Operator.KV_COMPACTION,
    Kind.ENCODER: Operator.ENCODE_ATTENTION, Kind.CROSS: Operator.CROSS_ATTENTION,
}


class Point(NamedTuple):
    """A step to measure: its kind and sizes."""

    kind: Kind
    x: int
    y: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Largest sizes a profile has to cover (it answers up to four times as much)."""

    input_tokens: int = 520
    context_tokens: int = 520
    queries: int = 130
    tokens: int = 2080  # in one encode step
    moves_rows: bool = True  # whether the KV cache is compacted when requests end

    def within(self, model: ModelSpec) -> Needs:
        """Needs cut to the positions that `model` has."""
        most = model.max_positions
        if most is None:
            return self
        return replace(self, input_tokens=min(self.input_tokens, most),
                       context_tokens=max(min(self.context_tokens, most - 1), 2))


def skeleton(model: ModelSpec, needs: Needs) -> list[Point]:
    """The points that a complete profile of `model` needs."""
    needs = needs.within(model)
    batches = _ladder((1, 3, 9, 33, 130), needs.queries)
    contexts = _ladder((17, 130, 520), needs.context_tokens)
    lengths = _tiled_lengths(needs.input_tokens)
    decode = Kind.CROSS if model.is_encoder_decoder else Kind.DECODE
    encode = Kind.ENCODER if model.is_encoder_decoder else Kind.ENCODE
    points = [Point(decode, n, context) for n in batches for context in contexts]
    points += [Point(encode, length, 1) for length in lengths]
    # time per request in a batch, against its time alone, rises slowly to one
    points += [Point(encode, length, _TOGETHER) for length in lengths
               if length in (5, 20, 64, 192, lengths[-1]) and length * _TOGETHER <= needs.tokens]
    if needs.moves_rows:
        points += [Point(Kind.COMPACTION, rows, tokens) for rows in (1, 5)
                   for tokens in sorted({contexts[0], contexts[-1]})]
    if not model.is_encoder_decoder:
        points += [Point(Kind.REST, rows) for rows in _ladder((75, 260, 700, 2080), needs.tokens)]
    return points


def quick_points(model: ModelSpec, needs: Needs, own: Needs) -> list[Point]:
    """The few skeleton points that a quick profile measures. `own`: the job's own sizes; of each
    size the skeleton's values are kept up to the first that is at least as large."""
    points, own = skeleton(model, needs), own.within(model)
    decode = [p for p in points if p.kind in (Kind.DECODE, Kind.CROSS)]
    batches = _reaching({p.x for p in decode}, own.queries)
    contexts = _reaching({p.y for p in decode}, own.context_tokens)
    lengths = _reaching({p.x for p in points if p.kind in (Kind.ENCODE, Kind.ENCODER)},
                        own.input_tokens)
    rows = _reaching({p.x for p in points if p.kind is Kind.REST}, own.tokens)
    kept = {
        Kind.DECODE: ({*_QUICK_BATCHES, *batches[-2 if batches[-1] > _MANY_QUERIES else -1:]}
                      & {*batches}, {contexts[0], contexts[-1]}),
        Kind.ENCODE: ({*_QUICK_LENGTHS, lengths[-1]} & {*lengths}, {1, _TOGETHER}),
        Kind.REST: ({n for n in rows if n >= _QUICK_ROWS} or {*rows}, {0}),
        Kind.COMPACTION: ({p.x for p in points}, {p.y for p in points})}
    kept[Kind.CROSS], kept[Kind.ENCODER] = kept[Kind.DECODE], kept[Kind.ENCODE]
    return [p for p in points if p.x in kept[p.kind][0] and p.y in kept[p.kind][1]]


def missing_points(profile: Profile, degree: int, points: Iterable[Point]) -> list[Point]:
    """The `points` that `profile` lacks at this tensor-parallel degree."""
    places = {kind: {(p.x, p.y) for p in profile.table(operator.value, degree)}
              for kind, operator in OWN_TABLE.items()}
    return [point for point in points if (point.x, point.y) not in places[point.kind]]


def missing_skeleton(profile: Profile, degree: int, needs: Needs) -> list[Point]:
    """The skeleton points that `profile` lacks; its model must be known."""
    assert profile.model is not None, "a measured profile knows its model"
    return missing_points(profile, degree, skeleton(profile.model, needs))


def sizes_in(profile: Profile, degree: int) -> Needs | None:
    """The largest sizes that `profile` measured; None for an imported profile, and where a table
    is missing."""
    rows = profile.table(Operator.LAYER_REST.value, degree)
    encode = profile.table(Operator.ENCODE_ATTENTION.value, degree)
    decode = profile.table(Operator.DECODE_ATTENTION.value, degree)
    is_ours = profile.metadata.origin.startswith("measured")
    if profile.model is None or not is_ours or not (rows and encode and decode):
        return None
    return Needs(
        input_tokens=int(max(p.x for p in encode)),
        context_tokens=int(max(p.y for p in decode)), queries=int(max(p.x for p in decode)),
        tokens=int(max(*(p.x for p in rows), *(p.x * p.y for p in encode))),
        moves_rows=bool(profile.table(Operator.KV_COMPACTION.value, degree)))


def skipped_points(profile: Profile, degree: int) -> list[Point]:
    """The skeleton points below the profile's largest sizes that it lacks, as a quick profile
    does; none for an imported profile."""
    own = sizes_in(profile, degree)
    if own is None:
        return []
    return points_inside(missing_skeleton(profile, degree, own), own)


def points_inside(points: Iterable[Point], own: Needs) -> list[Point]:
    """The `points` whose x lies below the profile's largest sizes `own`. Points at those sizes are
    in the profile, whether or not a larger skeleton has them."""
    return [point for point in points
            if point.x < (own.tokens if point.kind is Kind.REST else own.input_tokens)
            or point.kind not in (Kind.REST, Kind.ENCODE, Kind.ENCODER)]


def _tiled_lengths(top: int) -> list[int]:
    """Input lengths up to `top`: at and after every multiple of a tile up to _TILED_UP_TO, then
    each half as long again."""
    tiles = [*range(_SMALL_TILE, _CHANGES[0], _SMALL_TILE),
             *range(_CHANGES[0], _TILED_UP_TO + 1, _LARGE_TILE)]
    lengths = {5, 9, 14, 20, *tiles, *(t + 1 for t in tiles), *(c - 1 for c in _CHANGES), top}
    longest = _TILED_UP_TO
    while (longest := longest * 3 // 2) < top:
        lengths.add(longest + 1)
    return sorted(length for length in lengths if length <= top)


def _reaching(sizes: Iterable[int], most: int) -> list[int]:
    """`sizes` in ascending order, up to the first that is at least `most`."""
    ascending = sorted(sizes)
    return ascending[:1 + sum(size < most for size in ascending)]


def _ladder(steps: tuple[int, ...], top: int) -> list[int]:
    """`steps` below `top`, then each three times the one before, and last `top` itself."""
    ladder = [s for s in steps if s < top]
    while ladder and top > 4 * ladder[-1]:
        ladder.append(ladder[-1] * 3)
    if len(ladder) > 1 and top < 1.2 * ladder[-1]:
        ladder.pop()
    return [*ladder, top]


SPREAD_LIMIT = 0.10  # a point whose quartiles lie further apart is called noisy
# The operators that make up a step. Messages scatter by nature (waiting ranks sleep between looks),
# embedding and compaction are microseconds beside the rest.
_JUDGED = frozenset(op.value for op in Operator) - {
    Operator.EMBED.value, Operator.KV_COMPACTION.value}
MOST_TRIES = 3  # chosen: sessions that measure a point again; then the best of them stays
_NAMED = 3  # points that a sentence names
_SHORT_S = 5e-4  # chosen: shorter layers scatter by what the system does between them
_WORDS = {Kind.DECODE: "decoding {0} requests of up to {1} tokens",
          Kind.CROSS: "decoding {0} requests over {1} input tokens",
          Kind.ENCODE: "encoding {1} x {0} tokens", Kind.ENCODER: "encoding {1} x {0} tokens",
          Kind.REST: "encoding {0} tokens in all"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """Grade of a profile, and the counts of points behind it."""

    grade: Literal["good", "usable", "noisy"]
    points: int
    unknown: int  # points of a sample or two: nothing is known of their noise
    noisy: int  # quartiles further apart than SPREAD_LIMIT of the median

    @property
    def sentence(self) -> str:
        """The grade with its counts and doubts, as one line."""
        if not self.points:
            return "nothing measured yet"
        doubts = (
            (self.unknown, "{} have too few samples to tell their spread"),
            (self.grade == "noisy", "is something else running here?"))
        return "; ".join([self.brief, *(words.format(count) for count, words in doubts if count)])

    @property
    def brief(self) -> str:
        """The grade and how many points agree with it."""
        if not self.points:
            return "nothing measured yet"
        good = self.points - self.noisy - self.unknown
        return f"{self.grade}: {good} of {self.points} points within {SPREAD_LIMIT:.0%}"


def judge(profile: Profile) -> Judgement:
    """The Judgement of `profile`, from the operators that make up a step."""
    points = [p for key, table in profile.tables.items() if key.name in _JUDGED for p in table]
    noisy = sum(p.spread > SPREAD_LIMIT for p in points)
    unknown = sum(len(p.samples_s) < 3 for p in points)
    share = noisy / len(points) if points else 1.0
    grade: Literal["good", "usable", "noisy"] = (
        "noisy" if share > 0.20 else
        "usable" if share > 0.05 or unknown * 2 >= len(points) else "good")
    return Judgement(grade=grade, points=len(points), unknown=unknown, noisy=noisy)


class NoisyPoint(NamedTuple):
    """A point to doubt. `apart`: distance between the quartiles of its repeats as a share of the
    step's median; of a disturbed point, share of the machine that others used."""

    point: Point
    apart: float

    @property
    def words(self) -> str:
        """The point's sizes and `apart`, as in "encoding 700 tokens in all (59%)"."""
        return f"{_WORDS[self.point.kind].format(self.point.x, self.point.y)} ({self.apart:.0%})"


def noisy_points(profile: Profile, degree: int, points: Iterable[Point]) -> list[NoisyPoint]:
    """The `points` whose repeats lie further apart than NOISE_LIMIT of a layer's time, the worst
    first. Layers shorter than half a millisecond are not judged."""
    rest = profile.table(Operator.LAYER_REST.value, degree)
    found = []
    for point, own in _timed(profile, degree, points):
        layer_s, apart = (own.median_s, own.spread) if point.kind is Kind.REST else (
            _layer(point, own, rest))
        if apart > NOISE_LIMIT and layer_s >= _SHORT_S:
            found.append(NoisyPoint(point, apart))
    return sorted(found, key=lambda one: -one.apart)


def disturbed_points(profile: Profile, degree: int, points: Iterable[Point]) -> list[NoisyPoint]:
    """The `points` measured while other programs used more of the machine than DISTURBED_LIMIT,
    the worst first; `apart` is their share of it."""
    found = [NoisyPoint(point, own.missing) for point, own in _timed(profile, degree, points)
             if own.is_disturbed]
    return sorted(found, key=lambda one: -one.apart)


def points_to_repeat(profile: Profile, degree: int, points: Iterable[Point]) -> set[Point]:
    """The noisy or disturbed `points` that fewer than MOST_TRIES sessions have measured."""
    every = list(points)
    bad = {one.point for find in (noisy_points, disturbed_points)
           for one in find(profile, degree, every)}
    return {point for point, own in _timed(profile, degree, bad) if own.tries < MOST_TRIES}


def disturbed_words(found: Sequence[NoisyPoint]) -> str | None:
    """A sentence about disturbed points and how they are repeated; None where `found` is empty."""
    if not found:
        return None
    count = f"{len(found)} {'sizes were' if len(found) > 1 else 'size was'}"
    return (f"{count} measured while other programs used more than {DISTURBED_LIMIT:.0%} of the "
            f"machine: {_named(found)}; later runs repeat them when the machine is quieter, up to "
            f"{MOST_TRIES} times, and keep the best")


def _named(found: Sequence[NoisyPoint]) -> str:
    more = f", and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return ", ".join(one.words for one in found[:_NAMED]) + more


def _timed(profile: Profile, degree: int,
           points: Iterable[Point]) -> Iterator[tuple[Point, Sample]]:
    """Yields the `points` that the profile has, without compactions, each with its samples."""
    for point in points:
        for one in profile.table(OWN_TABLE[point.kind].value, degree):
            if (one.x, one.y) == (point.x, point.y) and point.kind is not Kind.COMPACTION:
                yield point, one


def noise_words(found: Sequence[NoisyPoint]) -> str | None:
    """A sentence about noisy points; None where `found` is empty."""
    if not found:
        return None
    count = f"{len(found)} {'sizes' if len(found) > 1 else 'size'}"
    return (f"{count} could not be timed well: repeats of the same step lie "
            f"further apart than {NOISE_LIMIT:.0%}: {_named(found)}")


def _layer(point: Point, own: Sample, rest: Sequence[Sample]) -> tuple[float, float]:
    """(seconds of a layer with its attention, distance between the quartiles of its attention as
    a share of that). The seconds of encode attention are per request."""
    is_encode = point.kind in (Kind.ENCODE, Kind.ENCODER)
    rows, times = (point.x * point.y, point.y) if is_encode else (point.x, 1)
    whole_s = times * own.median_s
    if rest:
        near = min(rest, key=lambda one: abs(math.log(max(one.x, 1) / rows)))
        whole_s += near.median_s * (rows / near.x if rows > near.x > 0 else 1.0)
    return whole_s, times * own.median_s * own.spread / whole_s if whole_s > 0 else 0.0
