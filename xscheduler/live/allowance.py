"""Share of the remaining requests that may still exceed the latency limit.

A limit on a share of all requests (95 % within ten seconds) allows a number of requests of the
whole job to exceed it. Late requests have used up some of them. The rest of the job is planned for
the share that is left, so that the whole job keeps its limit. If more requests were late than the
whole job may have, the limit is lost. The rest is then planned for the original share, since a
tighter one would cost throughput and save nothing.

A limit on a request of one length ("sequence") and a run without a limit have no allowance."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from xgpt.core.constraint import Constraint
from xscheduler.live.observations import LEAST_QUERIES

OFF, BACK = 0.8, 1.5  # chosen: the rest is re-planned if share left / share planned is outside
LEAST = 0.2  # chosen: least share planned for, as a share of the limit's own (1 % of 5 %)


class LatencyCounts(NamedTuple):
    """Counts of the requests from `first` on: done with an answer, of these over the limit, and
    failed (xrunner.files.launcher_link)."""

    first: int
    done: int
    over: int
    failed: int = 0


class Allowance:
    """Counts how many requests of one run exceed its latency limit, and says when to re-plan."""

    def __init__(self, constraint: Constraint, num_queries: int) -> None:
        """num_queries: requests of the whole job, even if this run only resumes it."""
        bound = constraint.latency
        self._limit_share = 1 - bound.quantile if (
            bound.kind == "queries" and math.isfinite(bound.limit_s)) else None
        self._num_queries, self._planned = num_queries, self._limit_share
        self._next = LEAST_QUERIES  # requests done at the next check
        self._was_lost = False

    def share(self, counts: LatencyCounts | None) -> float | None:
        """Share of the remaining requests that may exceed the limit, at most the limit's own share;
        None without an allowance."""
        if self._limit_share is None or counts is None:
            return self._limit_share
        if self._is_lost(counts):
            return self._limit_share
        total, left = self._counts(counts)
        allowed = (self._limit_share * total - counts.over) / max(left, 1)
        return min(max(allowed, LEAST * self._limit_share), self._limit_share)

    def evidence(self, counts: LatencyCounts | None) -> AllowanceEvidence | None:
        """The evidence for re-planning; None while about the planned share is left."""
        share = self.share(counts)
        if share is None or counts is None or self._planned is None or counts.done < self._next:
            return None
        _, left = self._counts(counts)
        is_lost = self._is_lost(counts)
        if (OFF * self._planned <= share <= BACK * self._planned or (
                share < self._planned and self._may_come_back(counts, left))) and not (
                is_lost and not self._was_lost):  # reported once
            return None
        return AllowanceEvidence(counts=counts, left=left, share=share, planned=self._planned,
                                 is_lost=is_lost)

    def accept(self, counts: LatencyCounts | None) -> None:
        """Records that the rest is now planned for the share that `counts` leaves."""
        self._planned = self.share(counts)
        if counts is not None:
            self._next = counts.done + LEAST_QUERIES
            self._was_lost = self._limit_share is not None and self._is_lost(counts)

    def constrained(self, constraint: Constraint, counts: LatencyCounts | None) -> Constraint:
        """The constraint for the remaining requests."""
        share = self.share(counts)
        return constraint if share is None or share == self._limit_share else (
            constraint.with_latency(quantile=1 - share))

    def _is_lost(self, counts: LatencyCounts) -> bool:
        """Whether more requests exceeded the limit than the whole job may have."""
        assert self._limit_share is not None
        total, _ = self._counts(counts)
        return counts.over > self._limit_share * total + 1e-6

    def _counts(self, counts: LatencyCounts) -> tuple[int, int]:
        """(requests of the run with an answer now or later, those of them that are not done)."""
        total = self._num_queries - counts.first - counts.failed
        return total, total - counts.done

    def _may_come_back(self, counts: LatencyCounts, left: int) -> bool:
        """Whether chance may make up for the excess of late requests so far: it is at most one
        standard deviation of the late requests among those left."""
        assert self._limit_share is not None
        return counts.over - self._limit_share * counts.done <= math.sqrt(self._limit_share * left)


@dataclass(frozen=True, slots=True, kw_only=True)
class AllowanceEvidence:
    """The share of the remaining requests that may exceed the limit differs from the plan. left:
    the remaining requests. is_lost: more requests exceeded it than the whole job may have."""

    counts: LatencyCounts
    left: int
    share: float
    planned: float
    is_lost: bool = False

    is_observing = False  # not about lengths

    @property
    def done(self) -> int:
        return self.counts.done

    def record(self) -> dict[str, Any]:
        return {"cause": "bound", "after_queries": self.counts.done, "queries_left": self.left,
                "over": self.counts.over, "share_left": {"planned": self.planned,
                                                         "observed": self.share}}

    @property
    def sentence(self) -> str:
        late = f"{self.counts.over} of {self.counts.done} requests exceeded the latency limit"
        if self.is_lost:
            return (f"{late}: the job as a whole cannot keep it any more, and the rest is planned "
                    "like a job of its own")
        return f"{late}: {self.share:.1%} of the remaining ones may (planned: {self.planned:.1%})"
