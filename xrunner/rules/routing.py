"""Which replica of a deployment takes which query, and in which order.

A job's queries are shared out beforehand, in the order in which they are taken up. A replica is
given its share a few queries at a time (`Window`): enough that its batching rule decides as if it
saw the whole of it, and no more, for what has not been given out can still go to another. One whose
share has run dry takes over from the replica with the most queries left.

All of it follows from the calls and their order, without a clock: the replay and the runner, told
of the same events, give every query to the same replica."""

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from xgpt.core.controls import (
    ContinuousControls,
    EvenBatches,
    RraControls,
    StaticControls,
    WaaControls,
)
from xgpt.core.job import LEAST_TOKENS, ROUND_ROBIN, ROUTINGS
from xgpt.core.lengths import BoolArray, FloatArray, IntArray
from xgpt.core.schedule import Estimate
from xrunner.rules.batch_sizer import sizer_of

_WAITING_SHARE = 4  # of what is active under continuous batching, this part may join in a step


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What a replica is kept supplied with: so many queries `waiting` for their encoding, and so
    many `present`, those at work included."""

    waiting: int
    present: int = 0

    def missing(self, waiting: int, active: int) -> int:
        """Queries to be given to a replica that has these."""
        return max(self.waiting - waiting, self.present - waiting - active, 0)


def window_of(estimate: Estimate) -> Window:
    """The window of a replica that executes `estimate`: twice what its rule may look at at once,
    since more comes only after word of what has begun has gone to and fro."""
    controls, groups = estimate.controls, estimate.deployment.num_groups
    if isinstance(controls, RraControls):
        return rra_window(controls.encode_batch, groups, controls.even)
    if isinstance(controls, WaaControls):
        most = sizer_of(controls.even).most(controls.encode_batch)
        # what is left to the decode pool is given out besides
        left = math.ceil(controls.stock_tokens / max(controls.even.mean_input_tokens, 1.0))
        return Window(waiting=estimate.deployment.encoding.num_groups * most + left)
    if isinstance(controls, StaticControls):
        return Window(waiting=controls.encode_batch)  # word comes while the batch before is decoded
    if isinstance(controls, ContinuousControls):
        waiting = max(math.ceil(controls.max_active / _WAITING_SHARE), 2 * groups)
        return Window(waiting=waiting, present=controls.max_active + waiting)
    most = max(math.ceil(estimate.most_in_system), 1)
    return Window(waiting=most, present=2 * most)


def rra_window(encode_batch: int, num_groups: int, even: EvenBatches) -> Window:
    """RRA's: two rounds at their largest, and a batch behind them, for a rule with less than that
    waiting takes its queries for the job's last."""
    most = num_groups * sizer_of(even).most(math.ceil(encode_batch / num_groups))
    return Window(waiting=2 * most + encode_batch)


def expected_tokens(inputs: IntArray, most_outputs: IntArray, mean_output: float,
                    are_exact: BoolArray | None = None) -> FloatArray:
    """[queries] tokens of input and of the output that is to be expected: `mean_output`, or the
    most that is allowed where that is less or is known to be the output (`are_exact`)."""
    outputs = np.minimum(most_outputs, mean_output) if mean_output > 0 else most_outputs
    if are_exact is not None:
        outputs = np.where(are_exact, most_outputs, outputs)
    return np.asarray(inputs + outputs, float)


def deal(tokens: Sequence[float] | FloatArray, replicas: int,
         routing: str = LEAST_TOKENS) -> list[list[int]]:
    """The share of each replica, as places in `tokens` (of each query, in the order in which they
    are taken up): in turn, or each query to the replica with the fewest tokens so far, the first
    one of several, so that all end together."""
    assert routing in ROUTINGS, f"{routing = }"
    if routing == ROUND_ROBIN:
        return [list(range(first, len(tokens), replicas)) for first in range(replicas)]
    shares: list[list[int]] = [[] for _ in range(replicas)]
    loads = [(0.0, replica) for replica in range(replicas)]  # a heap
    for place, own in enumerate(tokens):
        load, replica = loads[0]
        shares[replica].append(place)
        heapq.heapreplace(loads, (load + float(own), replica))
    return shares


class Router:
    """The queries that are not given out yet, by the replica whose share they are."""

    def __init__(self, tokens: Sequence[float] | FloatArray, *, replicas: int, window: Window,
                 routing: str = LEAST_TOKENS) -> None:
        """`tokens`: of each query, known or expected, in the order in which they are taken up."""
        assert replicas >= 1, f"{replicas = }"
        self.window = window  # may be changed while the job runs
        self._shares = [deque(share) for share in deal(tokens, replicas, routing)]
        self._supplied = [False] * replicas  # who has had a portion: others take from these alone

    @property
    def is_empty(self) -> bool:
        """Whether no replica will be given anything any more."""
        return not any(self._shares)

    def num_left(self, replica: int) -> int:
        """Queries of the replica's share that are not given out."""
        return len(self._shares[replica])

    def top_up(self, replica: int, *, waiting: int, active: int) -> list[int]:
        """The queries, by their places, that are given to a replica with so many waiting and at
        work: of its own share, else of those of others. To be called before the first step, and
        whenever queries have begun or ended."""
        missing, own = self.window.missing(waiting, active), self._shares[replica]
        given = [own.popleft() for _ in range(min(missing, len(own)))]
        self._supplied[replica] = True
        while len(given) < missing and not self.is_empty:
            taken = self._take_over(waiting + len(given), missing - len(given))
            if not taken:
                break
            given += taken
        return given

    def _take_over(self, waiting: int, most: int) -> list[int]:
        """The next queries of the longest share, as many as leave both replicas with equally many
        that wait: whose share it is has its window's worth of them besides, once it has been
        supplied. Before that nothing is taken from it, or the first to be supplied, with a window
        as large as its share, would take what another is to begin with."""
        left = max((share for share, supplied in zip(self._shares, self._supplied, strict=True)
                    if supplied), key=len)
        even = math.ceil((self.window.waiting + len(left) - waiting) / 2)
        return [left.popleft() for _ in range(min(most, even, len(left)))]
