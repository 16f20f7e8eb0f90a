"""How a schedule was come by, and what that is worth."""

from enum import StrEnum


class Status(StrEnum):
    """How the search for a schedule ended; the value is what is shown, and what files hold."""

    OPTIMAL = "optimal"
    WITHIN_GAP = "within gap"  # of the optimum, which may be this or not
    LIMIT = "stopped at its limit"
    INFEASIBLE = "infeasible"
    GRID = "best of a grid and its neighbours"  # nothing is proved: a baseline
    JOB = "quickest for this job"  # of few queries, though others are quicker in steady state
    BEGINNING = "quickest at the caps"  # does not keep its bound, until lengths are observed
    GIVEN = "given"  # every control variable is the job's own
    BEST_SEEN = "best seen"  # of the batches of another engine
