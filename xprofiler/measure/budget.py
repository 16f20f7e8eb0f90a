"""How long points take, and how long all of them may."""

import math
from collections.abc import Callable, Mapping

from xgpt.core.model import ModelSpec
from xprofiler.coarse import START_S, JobWork, at_best, expected_s
from xprofiler.points import OWN_TABLE, Kind, Point
from xprofiler.profile import Profile
from xprofiler.profile_timing import ProfileTiming

LEAST_LAYERS, _MOST_LAYERS = 2, 6  # of a quick profile's steps
_QUICK_ROWS = 4200  # rows times layers of an encode step that is taken for its rows


class Budget:
    """What a session of measuring may take, its start included: a share of the job's time."""

    def __init__(self, share: float, job: Mapping[str, int], model: ModelSpec) -> None:
        """`share`: infinite where there is no such limit. `job`: fields of a JobWork."""
        self._share, self._job, self._model = share, job, model
        self._seconds = math.inf if math.isinf(share) else math.nan

    def seconds(self, known: Callable[[], Profile], ranks: int, degree: int) -> float:
        """Of measuring, without the start. `known`: what was measured when it is first asked for.
        Nothing where others were at work beside most of that: a job would look long, and be worth
        much measuring of what tells of them."""
        if math.isnan(self._seconds):
            profile = known()
            self._seconds = 0.0 if _is_disturbed(profile) else self._share * expected_s(
                ProfileTiming(at_best(profile)), self._model, JobWork(**self._job), ranks=ranks,
                degree=degree) - START_S
        return self._seconds


def _is_disturbed(profile: Profile) -> bool:
    names = {operator.value for operator in OWN_TABLE.values()}
    points = [p for key, table in profile.tables.items() if key.name in names for p in table]
    return 2 * sum(p.is_disturbed for p in points) > len(points)


def rows_layers(rows: int) -> int:
    """Layers of a quick profile's step that is taken for its rows."""
    return min(max(_QUICK_ROWS // rows, LEAST_LAYERS), _MOST_LAYERS)


def effort(point: Point) -> float:
    """How long a point takes against others, roughly: a point that is quick counts 1."""
    match point.kind:
        case Kind.REST:
            return 1 + point.x / 110
        case Kind.ENCODE | Kind.ENCODER:
            return 1 + point.x * point.y / 700
        case _:
            return 1 + point.x * (point.y + 130) / 20_000


def quick_effort(point: Point) -> float:
    """The same of a quick profile, whose points take as many steps each."""
    match point.kind:
        case Kind.REST:
            return 1 + point.x * rows_layers(point.x) / 870
        case Kind.ENCODE:
            return 0.45 + point.x * point.y / 330
        case Kind.COMPACTION:
            return 0.4
        case _:
            return 1 + point.x / 44 + point.x * point.y / 21_000
