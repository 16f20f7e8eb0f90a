"""Batch sizes: encode batches (paper section 5.2) and captured decode steps."""

from collections.abc import Sequence
from dataclasses import dataclass

from xgpt.core.controls import Adjustment, EvenBatches

# chosen: small enough that uneven batches do not hold up a pipeline, and large enough that most
# batches of ordinary size are left alone
ADJUSTMENT = 0.1
# chosen: in smaller batches one request more or less is too coarse a correction
LEAST_ADJUSTED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizer:
    """Keeps the input tokens of each encode batch near their planned mean.

    A batch whose tokens differ from the mean by more than the share `adjustment` gets the number of
    requests whose tokens are nearest to it, at most twice the plan. Nearest, not next below: the
    mean over batches must stay as planned. With adjustment 0, or few requests, the number is kept.

    A decode batch that has left its mean is corrected within the same band, up and down: cutting on
    one side alone would lower the mean."""

    mean_input: float
    adjustment: float = 0.0

    def most(self, batch: int) -> int:
        """Number of requests in the largest batch, for a planned number of `batch`."""
        is_adjusted = self.adjustment > 0 and batch >= LEAST_ADJUSTED
        return 2 * batch if is_adjusted else batch

    def correction(self, away: float, mean: float) -> int:
        """Number of requests to add to the next batch (negative: to leave out); 0 within the
        threshold. `away`: active requests beyond their mean. `mean`: that mean."""
        return 0 if abs(away) <= self.adjustment * mean else -round(away)

    def count(self, inputs: Sequence[int], batch: int, correction: int = 0) -> int:
        """Number of requests to take from the front of `inputs`. `inputs`: input tokens of the
        waiting requests in order, `most(batch)` of them if there are as many. `batch`: the planned
        number. `correction`: requests to add, as far as tokens stay within the band."""
        count = self._nearest(inputs, batch)
        is_led = correction != 0 and self.most(batch) > batch and len(inputs) >= batch
        return self._led(inputs, batch, count, correction) if is_led else count

    def _led(self, inputs: Sequence[int], batch: int, count: int, correction: int) -> int:
        target, tokens = batch * self.mean_input, sum(inputs[:count])
        allowed = self.adjustment * target
        if correction > 0:
            for length in inputs[count:min(count + correction, self.most(batch))]:
                tokens += length
                if tokens > target + allowed:
                    break
                count += 1
            return count
        for length in reversed(inputs[max(count + correction, 1):count]):
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


def adjustment_share(asked: Adjustment) -> float:
    """The job's adjustment share, or the default."""
    return ADJUSTMENT if asked.share is None else asked.share


def sizer_of(even: EvenBatches) -> BatchSizer:
    """The sizer of a schedule's encode batches."""
    return BatchSizer(mean_input=even.mean_input_tokens, adjustment=even.adjustment)


_POWERS = 8  # chosen, as the following: sizes up to this one are powers of two
_FINE, _COARSE = 8, 16  # distance between sizes up to _FINE_UNTIL and beyond
_FINE_UNTIL = 128
MOST_CAPTURED = 512


def bucket_of(queries: int) -> int | None:
    """Smallest captured size that holds `queries` requests; None if there is none."""
    assert queries >= 1, f"{queries = }"
    if queries > MOST_CAPTURED:
        return None
    if queries <= _POWERS:
        return 1 << (queries - 1).bit_length()
    step = _FINE if queries <= _FINE_UNTIL else _COARSE
    return -(-queries // step) * step
