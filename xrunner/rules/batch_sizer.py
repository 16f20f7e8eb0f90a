"""Sizes of batches: of an encode batch (paper section 5.2), of the decode steps that a GPU
captures, and of the windows within which the order of queries is random.

Inputs that are sorted or grouped make neighbouring batches unlike. Results are written in the
input's order, so the order is random within windows only, not over the whole job."""

import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from xgpt.core.controls import Adjustment, EvenBatches

# Small enough that uneven batches no longer hold up a pipeline, large enough that most batches of
# ordinary size are left as they are.
ADJUSTMENT = 0.1
# Of fewer, one more or less is too coarse: short inputs would bring more, long ones hardly fewer.
LEAST_ADJUSTED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizer:
    """Keeps a batch's input tokens near what such a batch has in the mean: where they leave that by
    more than a share `adjustment`, as many queries are taken as come nearest to it, never more than
    twice the plan. Nearest, and not next below: the mean over batches must stay what was planned.
    0, or a batch of few: the number is kept, whatever the tokens.

    A decode batch that has left its mean is led back within the same band: by more queries only as
    far as the latency was charged for, and by no fewer than that, since batches cut short at one
    side alone would bring the mean down."""

    mean_input: float
    adjustment: float = 0.0

    def most(self, batch: int) -> int:
        """Queries of the largest batch."""
        is_adjusted = self.adjustment > 0 and batch >= LEAST_ADJUSTED
        return 2 * batch if is_adjusted else batch

    def lean(self, away: float, mean: float) -> int:
        """Queries more (fewer, where negative) that the next batch should take where the decode
        batch is `away` from what it should be, and `mean` is its mean: none below the threshold."""
        return 0 if abs(away) <= self.adjustment * mean else -round(away)

    def count(self, inputs: Sequence[int], batch: int, lean: int = 0) -> int:
        """How many of `inputs` (tokens, in order, the first `most` at least if there are as many)
        are taken where `batch` is the plan. `lean`: as many more (fewer) as are wanted, as far as
        the tokens stay within the share of their mean."""
        count = self._nearest(inputs, batch)
        is_led = lean != 0 and self.most(batch) > batch and len(inputs) >= batch
        return self._led(inputs, batch, count, lean) if is_led else count

    def _led(self, inputs: Sequence[int], batch: int, count: int, lean: int) -> int:
        target, tokens = batch * self.mean_input, sum(inputs[:count])
        allowed = self.adjustment * target
        if lean > 0:
            for length in inputs[count:min(count + lean, self.most(batch))]:
                tokens += length
                if tokens > target + allowed:
                    break
                count += 1
            return count
        for length in reversed(inputs[max(count + lean, 1):count]):
            tokens -= length
            if tokens < target - allowed:
                break
            count -= 1
        return count

    def _nearest(self, inputs: Sequence[int], batch: int) -> int:
        planned = min(batch, len(inputs))
        if self.adjustment <= 0 or batch < LEAST_ADJUSTED or planned < batch:
            return planned
        target, tokens = batch * self.mean_input, sum(inputs[:batch])
        if abs(tokens - target) <= self.adjustment * target:
            return batch
        best, tokens = (target, 0), 0  # (distance, queries)
        for taken, length in enumerate(inputs[:self.most(batch)], start=1):
            tokens += length
            best = min(best, (abs(tokens - target), taken))
            if tokens >= target:
                break
        return max(best[1], 1)


def share_of(asked: Adjustment) -> float:
    """The share that a job asks for, or the usual one."""
    return ADJUSTMENT if asked.share is None else asked.share


def sizer_of(even: EvenBatches) -> BatchSizer:
    """The sizer of a schedule's encode batches."""
    return BatchSizer(mean_input=even.mean_input_tokens, adjustment=even.adjustment)


_POWERS = 8  # up to here sizes are powers of two
_FINE, _COARSE = 8, 16  # from one size to the next, up to and beyond _FINE_UNTIL
_FINE_UNTIL = 128
MOST_CAPTURED = 512


def bucket_of(queries: int) -> int | None:
    """The least captured size that holds so many queries; None where there is none."""
    assert queries >= 1, f"{queries = }"
    if queries > MOST_CAPTURED:
        return None
    if queries <= _POWERS:
        return 1 << (queries - 1).bit_length()
    step = _FINE if queries <= _FINE_UNTIL else _COARSE
    return -(-queries // step) * step


WINDOW_BATCHES = 16  # encode batches in a window of the usual size
LEAST_WINDOW = 64


def window_of(asked: bool | int, encode_batch: int) -> int:
    """Queries of a window: as many as are asked for, or (True) the usual; 1 for none."""
    if isinstance(asked, bool):
        return max(WINDOW_BATCHES * encode_batch, LEAST_WINDOW) if asked else 1
    return max(asked, 1)


def in_run_order(count: int, window: int, seed: int, *, first: int = 0,
                 without: Collection[int] = frozenset()) -> Iterator[int]:
    """Yields places in the input, of those from `first` on and not `without` (the others are
    answered), in the order in which they are taken up. No place leaves its window; a window's are
    in memory at once."""
    places = (place for place in range(first, count) if place not in without)
    source = random.Random(seed)
    if window <= 1:
        yield from places
        return
    while part := list(islice(places, window)):
        source.shuffle(part)
        yield from part
