"""What the queries that are done have left of a bound.

A bound on a share of all queries (95 % within ten seconds) allows the others to be over it: so
many of the whole job. What has gone wrong so far has used some of that up: queries that were at
work when steps became slower, times that were off. The rest of the job is planned for the share
that is left, so that the job as a whole keeps what was promised, and not its rest alone. Where
more are over it than may be of the whole job the bound is lost, and the rest is planned for its own
share: more would cost throughput, and save nothing.

A bound on the query of a certain length ("sequence") allows for none, and a run without a bound has
nothing to keep: there is no allowance."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from xgpt.core.constraint import Constraint

ENOUGH = 50  # chosen: queries done between two looks: few tell little of a share
OFF = 0.8  # chosen: of the share that is planned for: where less is left, the rest is planned anew
BACK = 1.5  # chosen: and where so many times as much is left again, too
LEAST = 0.2  # chosen: of the bound's own share: what is planned for at least, of 5 % one


class Kept(NamedTuple):
    """Of the queries from `first` on: how many are done with an answer, how many of these took
    longer than the bound, and how many failed (xrunner.files.launcher_link)."""

    first: int
    done: int
    over: int
    failed: int = 0


class Allowance:
    """Follows how many queries of one run are over its bound on latency."""

    def __init__(self, constraint: Constraint, num_queries: int) -> None:
        """`num_queries`: of the whole job, of which a run that goes on does the rest."""
        bound = constraint.latency
        self._own = 1 - bound.quantile if (
            bound.kind == "queries" and math.isfinite(bound.limit_s)) else None
        self._num_queries, self._planned = num_queries, self._own
        self._next = ENOUGH  # queries done, for the next look
        self._was_lost = False

    def share(self, kept: Kept | None) -> float | None:
        """The share of the queries left that may be over the bound: no more than the bound's own;
        None where there is no allowance."""
        if self._own is None or kept is None:
            return self._own
        if self._is_lost(kept):
            return self._own
        total, left = self._counts(kept)
        return min(max((self._own * total - kept.over) / max(left, 1), LEAST * self._own),
                   self._own)

    def look(self, kept: Kept | None) -> KeptLook | None:
        """What there is to decide on; None while about as much is left as is planned for."""
        share = self.share(kept)
        if share is None or kept is None or self._planned is None or kept.done < self._next:
            return None
        _, left = self._counts(kept)
        is_lost = self._is_lost(kept)
        if (OFF * self._planned <= share <= BACK * self._planned or (
                share < self._planned and self._may_come_back(kept, left))) and not (
                is_lost and not self._was_lost):  # which is said once
            return None
        return KeptLook(kept=kept, left=left, share=share, planned=self._planned, is_lost=is_lost)

    def take(self, kept: Kept | None) -> None:
        """The rest is planned for what these have left of it, from now on."""
        self._planned = self.share(kept)
        if kept is not None:
            self._next = kept.done + ENOUGH
            self._was_lost = self._own is not None and self._is_lost(kept)

    def constrained(self, constraint: Constraint, kept: Kept | None) -> Constraint:
        """The constraint of the queries left."""
        share = self.share(kept)
        return constraint if share is None or share == self._own else (
            constraint.with_latency(quantile=1 - share))

    def _is_lost(self, kept: Kept) -> bool:
        """Whether more are over the bound than may be of the whole job."""
        assert self._own is not None, "who looks"
        total, _ = self._counts(kept)
        return kept.over > self._own * total + 1e-6

    def _counts(self, kept: Kept) -> tuple[int, int]:
        """Queries of the run that have or will have an answer, and those of them that are left."""
        total = self._num_queries - kept.first - kept.failed
        return total, total - kept.done

    def _may_come_back(self, kept: Kept, left: int) -> bool:
        """Whether what is over the bound so far is no more above its share than as many of those
        left may, by chance, stay below theirs."""
        assert self._own is not None, "who looks"
        return kept.over - self._own * kept.done <= math.sqrt(self._own * left)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptLook:
    """More queries than planned are over the bound, or again fewer: `share` is what may be over it
    of those left, `planned` what was planned with. is_lost: more are over it than may be of the
    whole job."""

    kept: Kept
    left: int
    share: float
    planned: float
    is_lost: bool = False

    is_observing = False  # lengths are not what this is about

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
