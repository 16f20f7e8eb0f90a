"""Whether a profile has what a job needs, and what it takes to measure one."""

from collections.abc import Sequence

from xprofiler.coarse import START_S
from xprofiler.points import OWN_TABLE, Kind, Needs, Point, lacking
from xprofiler.profile import Profile

REACH = 2.0  # see `lacks`


def lacks(profile: Profile, degree: int, points: Sequence[Point], own: Needs, *,
          is_coarse: bool = False) -> bool:
    """Whether a job of these points needs more than the profile has. Of one that runs have added
    to, sizes up to REACH times the largest are as good as measured: it says how far its lines go
    on, and the next run adds what it sees there. `is_coarse`: few points are enough, so that what
    lies between those there is needs no other."""
    missed = lacking(profile, degree, points)
    if not profile.learned and not is_coarse:
        return bool(missed)
    reach = REACH if profile.learned else 1.0
    # the job's own sizes count, and not the points beyond them
    most = {Kind.DECODE: (own.queries, own.context_tokens), Kind.REST: (own.tokens, 0),
            Kind.CROSS: (own.queries, own.input_tokens), Kind.COMPACTION: (0, own.context_tokens)}
    for point in missed:
        table = profile.table(OWN_TABLE[point.kind].value, degree)
        x, y = most.get(point.kind, (own.input_tokens, 0))
        if not table or min(point.x, x) > reach * max(one.x for one in table) or (
                min(point.y, y) > reach * max(max(one.y for one in table), 1)):
            return True
    return False


def quick_cost_s(profile: Profile, degrees: Sequence[int], points: Sequence[Point]) -> float:
    """About what it takes to measure these points of each degree on other ranks than those of
    `profile`: as long for each as its own took."""
    measured = sum(len(profile.table(table.value, degree)) for table in set(OWN_TABLE.values())
                   for degree in degrees)
    return START_S + profile.spent_s * len(points) * len(degrees) / max(measured, 1)
