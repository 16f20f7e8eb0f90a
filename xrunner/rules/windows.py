"""What a replica is kept supplied with, by the schedule it executes."""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from xgpt.core.controls import (
    ContinuousControls,
    EvenBatches,
    RraControls,
    StaticControls,
    WaaControls,
)
from xgpt.core.schedule import Estimate
from xrunner.rules.batch_sizer import sizer_of

LEAST_WAITING = 2**13  # far more than a rule looks at: a job with fewer is there from the beginning
_WAITING_SHARE = 4  # of what is active under continuous batching, this part may join in a step


class Load(NamedTuple):
    """What a replica has: queries that wait for their encoding, and queries at work."""

    waiting: int
    active: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What a replica is kept supplied with: so many queries `waiting` for their encoding, and so
    many `present`, those at work included. It begins them in batches of about `batch`, and has
    about `at_work` at work (0: unknown)."""

    waiting: int
    present: int = 0
    batch: int = 1
    at_work: float = 0.0

    def missing(self, load: Load) -> int:
        """Queries to be given to a replica that has these."""
        return max(self.waiting - load.waiting, self.present - sum(load), 0)

    def can_begin(self, load: Load) -> bool:
        """Whether a replica that has these would begin one more at once: it has nothing to do or,
        where queries join one by one, room."""
        return sum(load) < max(self.present - self.waiting, 1)


def window_of(estimate: Estimate) -> Window:
    """The window of a replica that executes `estimate`: twice what its rule may look at at once,
    since more comes only after word of what has begun has gone to and fro."""
    return replace(_window_of(estimate), at_work=estimate.figures.decode_batch)


def _window_of(estimate: Estimate) -> Window:
    controls, groups = estimate.controls, estimate.deployment.num_groups
    if isinstance(controls, RraControls):
        return rra_window(controls.encode_batch, groups, controls.even)
    if isinstance(controls, WaaControls):
        most = sizer_of(controls.even).most(controls.encode_batch)
        # what is left to the decode pool is given out besides
        left = math.ceil(controls.stock_tokens / max(controls.even.mean_input_tokens, 1.0))
        return Window(waiting=estimate.deployment.encoding.num_groups * most + left,
                      batch=controls.encode_batch)
    if isinstance(controls, StaticControls):
        # word comes while the batch before is decoded
        return Window(waiting=controls.encode_batch, batch=controls.encode_batch)
    if isinstance(controls, ContinuousControls):
        waiting = max(math.ceil(controls.max_active / _WAITING_SHARE), 2 * groups)
        return Window(waiting=waiting, present=controls.max_active + waiting)
    most = max(math.ceil(estimate.most_in_system), 1)
    return Window(waiting=most, present=2 * most)


def rra_window(encode_batch: int, num_groups: int, even: EvenBatches) -> Window:
    """RRA's: two rounds at their largest, and a batch behind them, for a rule with less than that
    waiting takes its queries for the job's last."""
    most = num_groups * sizer_of(even).most(math.ceil(encode_batch / num_groups))
    return Window(waiting=2 * most + encode_batch, batch=encode_batch)
