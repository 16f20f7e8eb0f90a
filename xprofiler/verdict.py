"""How far a profile's numbers can be trusted, in words a person understands."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Literal

from xprofiler.interpolation import Grid
from xprofiler.profile import Profile, Sample
from xprofiler.profile_timing import errors_along
from xprofiler.timing import Operator

SPREAD_LIMIT = 0.10  # a point whose quartiles lie further apart is called noisy
ERROR_LIMIT = 0.05  # an interval whose middle may be off by more is called coarse
_OUTLIER_DEVIATIONS = 6.0  # of the median absolute deviation
_TOO_SHORT_S = 2e-6  # ten times what reading the clock costs around each layer
# What makes up a step. Messages scatter by nature (waiting ranks sleep between looks), embedding
# and compaction are microseconds beside the rest.
_JUDGED = frozenset(op.value for op in Operator) - {
    Operator.EMBED.value, Operator.KV_COMPACTION.value}


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The grade of a profile, and the counts behind it."""

    grade: Literal["good", "usable", "noisy"]
    points: int
    unknown: int  # points of a sample or two: nothing is known of their noise
    noisy: int  # quartiles further apart than SPREAD_LIMIT of the median
    outliers: int  # single samples far from their point's median (they do not move it)
    too_short: int  # points whose time is close to the clock's own cost
    moved: int  # points below one of less work: both are used as their mean
    coarse: int  # intervals whose middle may be off by more than ERROR_LIMIT

    @property
    def sentence(self) -> str:
        """All of it in words."""
        if not self.points:
            return "nothing measured yet"
        doubts = (
            (self.unknown, "of {} the spread is unknown, they have a sample or two"),
            (self.outliers, "{} single samples far off, ignored by the medians"),
            (self.too_short, "{} points so short that the clock shows"),
            (self.moved, "{} points out of order with their neighbours, used as their mean"),
            (self.coarse, "{} places where the curve bends between points"),
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
    judged = {key: table for key, table in profile.tables.items() if key.name in _JUDGED}
    points = [p for table in judged.values() for p in table]
    noisy = sum(p.spread > SPREAD_LIMIT for p in points)
    outliers = sum(_outliers(p) for p in points)
    main = [table for key, table in judged.items()
            if key.name in (Operator.LAYER_REST.value, Operator.DECODE_REST.value,
                            Operator.DECODE_ATTENTION.value)]
    too_short = sum(p.median_s < _TOO_SHORT_S for table in main for p in table)
    moved = sum(Grid([p.x for p in table], [p.y for p in table],
                     [p.median_s for p in table]).moved for table in main)
    coarse = sum(int((errors / 4 > ERROR_LIMIT).sum()) for key, table in judged.items()
                 for errors in errors_along(key, table, 0))
    unknown = sum(len(p.samples_s) < 3 for p in points)
    share = noisy / len(points) if points else 1.0
    grade: Literal["good", "usable", "noisy"] = (
        "noisy" if share > 0.20 else
        "usable" if share > 0.05 or unknown * 2 >= len(points) else "good")
    return Judgement(grade=grade, points=len(points), unknown=unknown, noisy=noisy,
                     outliers=outliers, too_short=too_short, moved=moved, coarse=coarse)


def _outliers(point: Sample) -> int:
    if len(point.samples_s) < 5:
        return 0
    centre = point.median_s
    deviation = statistics.median(abs(s - centre) for s in point.samples_s)
    limit = max(_OUTLIER_DEVIATIONS * deviation, SPREAD_LIMIT * centre)
    return sum(abs(s - centre) > limit for s in point.samples_s)
