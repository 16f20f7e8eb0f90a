"""Boxes of WAA's space (xscheduler.spaces.waa): encode_batch, decode_micro_batches, and the place
of a chunk's size; and points in them."""

from collections.abc import Sequence

import numpy as np

from xgpt.core.lengths import IntArray
from xgpt.core.policies import searched_policies
from xgpt.core.problem import Problem
from xscheduler.branch_and_bound import Box
from xscheduler.spaces.tensor_plans import batch_range, between, equal_parts, even_parts
from xsimulator.policies.waa.bounds import WaaBounds
from xsimulator.policies.waa.config import WaaBoxes
from xsimulator.policies.waa.plans import WaaPlans

ROOT_PARTS = (8, 4, 1)  # of a root: encode_batch, decode_micro_batches, chunk sizes
CHUNK_ROOT_PARTS = (1, 4, 3)  # of a root with chunks
FEW_POINTS = 6  # that are evaluated one by one
GROUPS_PER_STAGE = 2  # at most
# Whose chunks are bounded where both ways of dividing devices are searched, and whose are not.
CHUNKED, SECOND = "waa-m", "waa-c"
# Tokens of a chunk. Between two of them encode_batch says what decodes.
CHUNKS = (8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 1024, 2048)

Ranges = tuple[tuple[int, int], tuple[int, int]]  # of encode_batch, decode_micro_batches


class WorkLeft:
    """What all searches under a latency bound, those of which something is claimed and the others,
    may still spend: as much as that one which may spend most. What one has spent, those that begin
    from its boxes need not spend again."""

    def __init__(self) -> None:
        self._granted: dict[float, dict[bool, float]] = {}  # by bound, is_claimed
        self._spent: dict[float, float] = {}

    def grant(self, latency_bound_s: float, *, is_claimed: bool, work: float) -> None:
        """So much may be spent by searches of that kind."""
        self._granted.setdefault(latency_bound_s, {})[is_claimed] = work

    def left(self, latency_bound_s: float) -> float:
        return (max(self._granted[latency_bound_s].values())
                - self._spent.get(latency_bound_s, 0.0))

    def spend(self, latency_bound_s: float, work: float) -> None:
        """So much was."""
        self._spent[latency_bound_s] = self._spent.get(latency_bound_s, 0.0) + work


def points_of(box: Box, chunks: Sequence[int]) -> list[tuple[int, int, int]]:
    """All points of a small box, else its corners, with a chunk of middle size."""
    (least, fewest, first), (most, highest, last) = box.lower, box.upper
    if box.num_points <= FEW_POINTS:
        return [(batch, groups, chunks[size]) for batch in range(least, most + 1)
                for groups in range(fewest, highest + 1) for size in range(first, last + 1)]
    return list(dict.fromkeys((batch, groups, chunks[(first + last) // 2])
                              for batch in (most, least) for groups in (fewest, highest)))


def grid(box: Box, parts: tuple[int, int, int]) -> list[Box]:
    """The box cut along its sides: in even ratios, the sizes of chunks in even numbers."""
    sides = [even_parts(low, up, count) for low, up, count in zip(
        box.lower[:2], box.upper[:2], parts[:2], strict=True)]
    sides.append(equal_parts(box.lower[2], box.upper[2], parts[2]))
    return [Box(root=box.root, lower=(b1, g1, c1), upper=(b2, g2, c2))
            for b1, b2 in sides[0] for g1, g2 in sides[1] for c1, c2 in sides[2]]


def roots_of(ranges: Sequence[Ranges], last_chunk: int) -> tuple[list[Box], list[int]]:
    """Roots over the ranges of tensor plans, without chunks and, where `last_chunk` is not 0, with
    the sizes from the first to that place; and the tensor plan of each."""
    roots, plan_of_root = list[Box](), list[int]()
    for plan, ((least, largest), (fewest, highest)) in enumerate(ranges):
        for first, end in ((0, 0), (1, last_chunk)) if last_chunk else ((0, 0),):
            whole = Box(root=0, lower=(least, fewest, first), upper=(largest, highest, end))
            for part in grid(whole, CHUNK_ROOT_PARTS if first else ROOT_PARTS):
                roots.append(Box(root=len(roots), lower=part.lower, upper=part.upper))
                plan_of_root.append(plan)
    return roots, plan_of_root


def corners_of(boxes: Sequence[Box], rows: IntArray, chunks: Sequence[int]) -> WaaBoxes:
    """The ranges of some of the boxes."""
    corners = np.array([(*boxes[row].lower, *boxes[row].upper) for row in rows.tolist()], np.int64)
    sizes = np.array(chunks, np.int64)
    return WaaBoxes(least=corners[:, 0], fewest=corners[:, 1], most=corners[:, 3],
                    highest=corners[:, 4], chunk=sizes[corners[:, 2]],
                    largest_chunk=sizes[corners[:, 5]])


def group_range(problem: Problem, split: WaaPlans) -> tuple[int, int]:
    """Fewest and most decode_micro_batches to consider."""
    if problem.fixed.decode_micro_batches is not None:
        return problem.fixed.decode_micro_batches, problem.fixed.decode_micro_batches
    most_stages = sum(int(decode[0]) for _, decode in split.stage_counts)
    return 1, max(GROUPS_PER_STAGE * most_stages, 1)


def largest_batch(bounds: WaaBounds, split: WaaPlans, largest: int) -> int:
    """No larger encode_batch up to `largest` can fit; 0 if none can. WAA-C and WAA-M share it."""
    kept, key = bounds.waa.times.kept, (largest_batch, split, largest)
    if key not in kept:
        kept[key] = _largest_batch(bounds, split, largest)
    return int(kept[key])


def _largest_batch(bounds: WaaBounds, split: WaaPlans, largest: int) -> int:
    low, high = 0, largest + 1
    while high - low > 1:
        tried = np.array(between(low + 1, high - 1, 16), np.int64)
        fits = bounds.least_bytes(split, tried) <= bounds.waa.capacity_bytes
        low = int(max(tried[fits], default=low))
        high = int(min(tried[~fits], default=high))
    return low


def ranges_of(problem: Problem, bounds: WaaBounds, split: WaaPlans) -> Ranges:
    """Least and largest encode_batch and decode_micro_batches under a tensor plan."""
    least, largest = batch_range(problem.fixed, problem.num_queries)
    return (least, max(largest_batch(bounds, split, largest), least)), group_range(problem, split)


def chunks_of(name: str, problem: Problem) -> tuple[int, ...]:
    """Sizes of chunks whose boxes are looked at, 0 (none) among them. How devices are divided
    matters less where those that decode encode, too: where both ways are searched, chunks are by
    memory, and by computation climbed to alone (`takes_climbed`)."""
    asked, among = problem.fixed.encode_chunk, problem.fixed.policies or searched_policies()
    if asked is not None or problem.model.is_encoder_decoder:
        return (asked or 0,)
    return (0,) if name != CHUNKED and CHUNKED in among else (0, *CHUNKS)


def takes_climbed(name: str, problem: Problem) -> bool:
    """Whether a policy has chunks that are no box's."""
    return (name == SECOND and CHUNKED in (problem.fixed.policies or searched_policies())
            and problem.fixed.encode_chunk is None and not problem.model.is_encoder_decoder)
