"""Both kinds of RRA's configurations examined as one space: those that encode between two phases,
and those that encode in chunks beside decoding."""

from collections.abc import Sequence

from xscheduler.branch_and_bound import Box, NodeResult
from xscheduler.spaces.rra_chunks import ChunkExaminer, ChunkPoints
from xscheduler.spaces.rra_examiner import RraExaminer


class FamilyExaminer:
    """The roots that encode between phases come first. What one kind has found spares the other a
    look at what is no better."""

    def __init__(self, between: RraExaminer | None, chunks: ChunkPoints, latency_bound_s: float, *,
                 gap: float, floor_qps: float) -> None:
        """`between` None: the job fixes a chunk."""
        self._between = between
        self._count = len(between.roots) if between else 0
        self._chunks = ChunkExaminer(chunks, latency_bound_s, gap=gap, first_root=self._count)
        self._best_qps = floor_qps
        seen = [one for one in (between and between.known(), self._chunks.known()) if one]
        self.known = min(seen, key=lambda one: one.rank, default=None)
        if self.known is not None:
            self._best_qps = max(floor_qps, self.known.objective)
        self.roots: list[Box] = [*(between.roots if between else []), *self._chunks.roots]
        self.plan_of_root = [*(between.plan_of_root if between else []),
                             *self._chunks.plan_of_root]

    def examine(self, boxes: Sequence[Box]) -> list[NodeResult]:
        results: dict[int, NodeResult] = {}
        for is_chunked in (False, True):
            places = [k for k, box in enumerate(boxes) if (box.root >= self._count) == is_chunked]
            if places:
                results.update(zip(places, self._examine(
                    [boxes[k] for k in places], is_chunked), strict=True))
        return [results[k] for k in range(len(boxes))]

    def raise_floor(self, floor_qps: float) -> None:
        self._best_qps = max(self._best_qps, floor_qps)

    def split(self, box: Box) -> list[Box]:
        if box.root >= self._count or self._between is None:
            return self._chunks.split(box)
        return self._between.split(box)

    def _examine(self, boxes: Sequence[Box], is_chunked: bool) -> list[NodeResult]:
        own: ChunkExaminer | RraExaminer = self._chunks
        if not is_chunked:
            assert self._between is not None, f"{boxes = }"
            own = self._between
        own.best_qps = max(own.best_qps, self._best_qps)
        found = own.examine(boxes)
        self._best_qps = max(self._best_qps, own.best_qps)
        return found
