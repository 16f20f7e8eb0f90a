"""The share of the remaining queries that may still miss the latency limit.

A limit on a share of all queries (95 % within ten seconds) allows a number of queries of the whole
job to miss it. Queries that were late so far have used up some of them. The rest of the job is
planned for the share that is left, so that the whole job keeps its limit. If more queries were late
than the whole job may have, the limit is lost; the rest is then planned for the original share,
since more would cost throughput and save nothing.

A limit on a query of one length ("sequence") and a run without a limit have no allowance."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from xgpt.core.constraint import Constraint
from xscheduler.live.observations import LEAST_QUERIES

OFF, BACK = 0.8, 1.5  # chosen: the rest is re-planned if share left / share planned is outside
LEAST = 0.2  # chosen: least share planned for, as a share of the limit's own (1 % of 5 %)


class LatencyCounts(NamedTuple):
    """Counts of the queries from `first` on: done with an answer, of these over the limit, and
    failed (xrunner.files.launcher_link)."""

    first: int
    done: int
    over: int
    failed: int = 0


class Allowance:
    """Follows how many queries of one run miss its latency limit."""

    def __init__(self, constraint: Constraint, num_queries: int) -> None:
        """num_queries: of the whole job, also if this run only resumes it."""
        bound = constraint.latency
        self._own = 1 - bound.quantile if (
            bound.kind == "queries" and math.isfinite(bound.limit_s)) else None
        self._num_queries, self._planned = num_queries, self._own
        self._next = LEAST_QUERIES  # queries done at the next check
        self._was_lost = False

    def share(self, kept: LatencyCounts | None) -> float | None:
        """The share of the remaining queries that may miss the limit, at most the limit's own; None
        without an allowance."""
        if self._own is None or kept is None:
            return self._own
        if self._is_lost(kept):
            return self._own
        total, left = self._counts(kept)
        return min(max((self._own * total - kept.over) / max(left, 1), LEAST * self._own),
                   self._own)

    def look(self, kept: LatencyCounts | None) -> AllowanceEvidence | None:
        """The evidence for re-planning; None while about the planned share is left."""
        share = self.share(kept)
        if share is None or kept is None or self._planned is None or kept.done < self._next:
            return None
        _, left = self._counts(kept)
        is_lost = self._is_lost(kept)
        if (OFF * self._planned <= share <= BACK * self._planned or (
                share < self._planned and self._may_come_back(kept, left))) and not (
                is_lost and not self._was_lost):  # reported once
            return None
        return AllowanceEvidence(kept=kept, left=left, share=share, planned=self._planned,
                                 is_lost=is_lost)

    def take(self, kept: LatencyCounts | None) -> None:
        """Records that the rest is now planned for the share that `kept` leaves."""
        self._planned = self.share(kept)
        if kept is not None:
            self._next = kept.done + LEAST_QUERIES
            self._was_lost = self._own is not None and self._is_lost(kept)

    def constrained(self, constraint: Constraint, kept: LatencyCounts | None) -> Constraint:
        """The constraint for the remaining queries."""
        share = self.share(kept)
        return constraint if share is None or share == self._own else (
            constraint.with_latency(quantile=1 - share))

    def _is_lost(self, kept: LatencyCounts) -> bool:
        """Whether more queries missed the limit than the whole job may have."""
        assert self._own is not None, "who looks"
        total, _ = self._counts(kept)
        return kept.over > self._own * total + 1e-6

    def _counts(self, kept: LatencyCounts) -> tuple[int, int]:
        """(queries of the run with an answer now or later, those of them that are left)."""
        total = self._num_queries - kept.first - kept.failed
        return total, total - kept.done

    def _may_come_back(self, kept: LatencyCounts, left: int) -> bool:
        """Whether the excess of late queries so far may be made up for by chance: it is at most one
        standard deviation of the late queries among those left."""
        assert self._own is not None, "who looks"
        return kept.over - self._own * kept.done <= math.sqrt(self._own * left)


@dataclass(frozen=True, slots=True, kw_only=True)
class AllowanceEvidence:
    """The share of the remaining queries that may miss the limit differs from the planned share.
    is_lost: more queries missed it than the whole job may have."""

    kept: LatencyCounts
    left: int
    share: float
    planned: float
    is_lost: bool = False

    is_observing = False  # not about lengths

    @property
    def done(self) -> int:
        return self.kept.done

    def record(self) -> dict[str, Any]:
        return {"cause": "bound", "after_queries": self.kept.done, "queries_left": self.left,
                "over": self.kept.over, "share_left": {"planned": self.planned,
                                                       "observed": self.share}}

    @property
    def sentence(self) -> str:
        what = f"{self.kept.over} of {self.kept.done} queries took longer than the bound"
        if self.is_lost:
            return (f"{what}, more than may of the whole job: it is lost, and the rest is planned "
                    f"for as if it were a job of its own")
        return f"{what}: {self.share:.1%} of those left may ({self.planned:.1%} were planned for)"
