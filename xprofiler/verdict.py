"""How far a profile's numbers can be trusted, in words a person understands; and which of its
points have repeats that disagree by so much that nothing is to be planned by them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from xprofiler.points import OWN_TABLE, Kind, Point
from xprofiler.profile import DISTURBED_LIMIT, NOISE_LIMIT, Profile, Sample
from xprofiler.timing import Operator

SPREAD_LIMIT = 0.10  # a point whose quartiles lie further apart is called noisy
# What makes up a step. Messages scatter by nature (waiting ranks sleep between looks), embedding
# and compaction are microseconds beside the rest.
_JUDGED = frozenset(op.value for op in Operator) - {
    Operator.EMBED.value, Operator.KV_COMPACTION.value}
MOST_TRIES = 3  # sessions that measure a point anew; then the best of them stays
_NAMED = 3  # points that a sentence names
_SHORT_S = 5e-4  # of a layer: shorter ones scatter by what the system does between them
_WORDS = {Kind.DECODE: "decoding {0} queries of up to {1} tokens",
          Kind.CROSS: "decoding {0} queries over {1} input tokens",
          Kind.ENCODE: "encoding {1} x {0} tokens", Kind.ENCODER: "encoding {1} x {0} tokens",
          Kind.REST: "encoding {0} tokens in all"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The grade of a profile, and the counts behind it."""

    grade: Literal["good", "usable", "noisy"]
    points: int
    unknown: int  # points of a sample or two: nothing is known of their noise
    noisy: int  # quartiles further apart than SPREAD_LIMIT of the median

    @property
    def sentence(self) -> str:
        """All of it in words."""
        if not self.points:
            return "nothing measured yet"
        doubts = (
            (self.unknown, "of {} the spread is unknown, they have a sample or two"),
            (self.grade == "noisy", "is something else running here?"))
        return "; ".join([self.brief, *(words.format(count) for count, words in doubts if count)])

    @property
    def brief(self) -> str:
        """The grade alone, for where nobody is about to measure again."""
        if not self.points:
            return "nothing measured yet"
        good = self.points - self.noisy - self.unknown
        return f"{self.grade}: {good} of {self.points} points within {SPREAD_LIMIT:.0%}"


def judge(profile: Profile) -> Judgement:
    """Counts what is doubtful in `profile`, among the operators that make up a step."""
    points = [p for key, table in profile.tables.items() if key.name in _JUDGED for p in table]
    noisy = sum(p.spread > SPREAD_LIMIT for p in points)
    unknown = sum(len(p.samples_s) < 3 for p in points)
    share = noisy / len(points) if points else 1.0
    grade: Literal["good", "usable", "noisy"] = (
        "noisy" if share > 0.20 else
        "usable" if share > 0.05 or unknown * 2 >= len(points) else "good")
    return Judgement(grade=grade, points=len(points), unknown=unknown, noisy=noisy)


class NoisyPoint(NamedTuple):
    """`apart`: the distance of its repeats' quartiles, as a share of the step's median."""

    point: Point
    apart: float

    @property
    def words(self) -> str:
        return f"{_WORDS[self.point.kind].format(self.point.x, self.point.y)} ({self.apart:.0%})"


def noisy(profile: Profile, degree: int, points: Iterable[Point]) -> list[NoisyPoint]:
    """Those of the points that `profile` has with repeats further apart than NOISE_LIMIT of the
    step's time, the worst first: what is long counts, beside the rest of a step and by the
    clock."""
    rest = profile.table(Operator.LAYER_REST.value, degree)
    found = []
    for point in points:
        own = _own(profile, degree, point)
        if own is None or point.kind is Kind.COMPACTION:
            continue
        layer_s, apart = (own.median_s, own.spread) if point.kind is Kind.REST else (
            _layer(point, own, rest))
        if apart > NOISE_LIMIT and layer_s >= _SHORT_S:
            found.append(NoisyPoint(point, apart))
    return sorted(found, key=lambda one: -one.apart)


def disturbed(profile: Profile, degree: int, points: Iterable[Point]) -> list[NoisyPoint]:
    """Those of the points that `profile` has from times when more of the machine was missing than
    DISTURBED_LIMIT, the worst first; `apart` is that share."""
    found = [NoisyPoint(point, own.missing) for point in points
             if point.kind is not Kind.COMPACTION and (own := _own(profile, degree, point)) is not (
                 None) and own.is_disturbed]
    return sorted(found, key=lambda one: -one.apart)


def worth_again(profile: Profile, degree: int, points: Iterable[Point]) -> set[Point]:
    """Those that are noisy or disturbed, and were not measured anew so often that a machine which
    is never quiet is to be lived with."""
    every = list(points)
    bad = {one.point for found in (noisy, disturbed) for one in found(profile, degree, every)}
    return {point for point in bad if (own := _own(profile, degree, point)) is not None
            and own.tries < MOST_TRIES}


def disturbed_words(found: Sequence[NoisyPoint]) -> str | None:
    """What was disturbed, in a sentence; None where nothing was."""
    if not found:
        return None
    count = f"{len(found)} {'sizes were' if len(found) > 1 else 'size was'}"
    return (f"{count} measured while others had more than {DISTURBED_LIMIT:.0%} of the "
            f"machine: {_named(found)}; the next runs measure them "
            f"again if they find the machine quieter, each up to {MOST_TRIES} times in all, and "
            "keep the best")


def _named(found: Sequence[NoisyPoint]) -> str:
    more = f", and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return ", ".join(one.words for one in found[:_NAMED]) + more


def _own(profile: Profile, degree: int, point: Point) -> Sample | None:
    return next((one for one in profile.table(OWN_TABLE[point.kind].value, degree)
                 if (one.x, one.y) == (point.x, point.y)), None)


def noise_words(found: Sequence[NoisyPoint]) -> str | None:
    """What is noisy, in a sentence; None where nothing is."""
    if not found:
        return None
    count = f"{len(found)} {'sizes' if len(found) > 1 else 'size'}"
    return (f"{count} could not be timed well: repeats of the same step lie "
            f"further apart than {NOISE_LIMIT:.0%}: {_named(found)}")


def _layer(point: Point, own: Sample, rest: Sequence[Sample]) -> tuple[float, float]:
    """(seconds, how far apart) of attention and the rest of a layer together. Encode attention is
    by the query."""
    is_encode = point.kind in (Kind.ENCODE, Kind.ENCODER)
    rows, times = (point.x * point.y, point.y) if is_encode else (point.x, 1)
    whole_s = times * own.median_s
    if rest:
        near = min(rest, key=lambda one: abs(math.log(max(one.x, 1) / rows)))
        whole_s += near.median_s * (rows / near.x if rows > near.x > 0 else 1.0)
    return whole_s, times * own.median_s * own.spread / whole_s if whole_s > 0 else 0.0
