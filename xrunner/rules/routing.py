"""Which replica of a deployment takes which query, and in which order.

A job's queries are shared out beforehand, in the order in which they are taken up. A replica is
given its share a few queries at a time (`Window`): enough that its batching rule decides as if it
saw the whole of it, and no more, for what has not been given out can still go to another. One whose
share has run dry takes over from the replica with the most queries left. Once all are given out,
those that wait in a replica that is behind are called back, and given to who begins them sooner
(`recalls`): a replica gives back what it has not begun, and nobody else decides that.

All of it follows from the calls and their order, without a clock: the replay and the runner, told
of the same events, give every query to the same replica."""

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from xgpt.core.controls import (
    FIXED,
    LEAST_TOKENS,
    ROUND_ROBIN,
    ROUTINGS,
    ContinuousControls,
    EvenBatches,
    RraControls,
    StaticControls,
    WaaControls,
)
from xgpt.core.lengths import BoolArray, FloatArray, IntArray
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


# A replica's pace is told over as many queries as it has at work, and no fewer than so many
# batches; paces are the same to it from this share of the quickest on, for begins come in bursts.
_LEAST_BATCHES, _EVEN = 6, 0.75


class Recall(NamedTuple):
    """Queries wanted back from the replica, one for each of these others."""

    replica: int
    takers: tuple[int, ...]


class Paces:
    """How quickly each replica begins queries, beside the others."""

    def __init__(self, windows: Sequence[Window], speeds: Sequence[float] = ()) -> None:
        """`speeds`: as planned; () where all are alike."""
        self._memory = sum(max(_LEAST_BATCHES * window.batch, window.at_work)
                           for window in windows)
        planned = speeds or [1.0] * len(windows)
        self._usual = [self._memory * speed / sum(planned) for speed in planned]
        self._begun = list(self._usual)
        self.has_begun = [False] * len(windows)

    def note_begun(self, replica: int, count: int) -> None:
        """So many of the replica's queries have begun."""
        fading = math.exp(-count / self._memory)
        self._begun = [begun * fading for begun in self._begun]
        self._begun[replica] += self._memory * (1 - fading)
        self.has_begun[replica] = True

    def times(self) -> list[float]:
        """Of each replica: queries that all begin while it begins one."""
        shares = [begun / usual for begun, usual in zip(self._begun, self._usual, strict=True)]
        even = _EVEN * max(shares)
        return [self._memory / (usual * (max(shares) if share >= even else max(share, 1e-9)))
                for usual, share in zip(self._usual, shares, strict=True)]


def recalls(windows: Sequence[Window], paces: Paces, loads: Sequence[Load],
            coming: Sequence[int], asked: Sequence[bool]) -> list[Recall]:
    """What is to be called back, nothing being left to be given out. `coming`: queries on their way
    to each replica from others; `asked`: whose answer is awaited, or who has none to give back.

    How long a replica takes for a batch is measured without a clock, in queries that all replicas
    together begin meanwhile; those begun last count most. A query in the j-th batch of those that
    wait in a replica at work is expected to begin after j - 1/2 such times; one that comes to a
    replica that has just begun others, after j, and after j - 1 to one that could begin at once.
    By Little's law a query is at work as long as its replica takes to begin as many as it has at
    work. Queries move to where they end sooner: from a replica that is behind to those that are
    not, and between equal ones only to one that is dry."""
    replicas = range(len(windows))
    lines = [load.waiting + more for load, more in zip(loads, coming, strict=True)]
    free = [window.can_begin(load) and not more
            for window, load, more in zip(windows, loads, coming, strict=True)]
    # who was given its first queries begins them as soon as it hears of them
    is_late = [not window.can_begin(Load(0, load.active))
               for window, load in zip(windows, loads, strict=True)]
    each = paces.times()
    times = [time * window.batch for time, window in zip(each, windows, strict=True)]
    lives = [time * window.at_work for time, window in zip(each, windows, strict=True)]
    takers: dict[int, list[int]] = {}

    def would_end(replica: int) -> float:
        """When one query more would end there."""
        batches = math.ceil((lines[replica] + 1) / windows[replica].batch)
        return (batches - free[replica]) * times[replica] + lives[replica]

    def is_to_end(replica: int) -> float:
        """When the last that waits there is to end."""
        batches = math.ceil(lines[replica] / windows[replica].batch)
        return (batches - (0.5 if is_late[replica] else 1.0)) * times[replica] + lives[replica]

    while True:
        givers = [replica for replica in replicas if not asked[replica] and paces.has_begun[replica]
                  and len(takers.get(replica, ())) < loads[replica].waiting]
        giver = max(givers, key=is_to_end, default=None)
        low = [replica for replica in replicas if giver is not None and (
            not loads[replica].waiting or each[replica] < each[giver] and (
                loads[replica].waiting <= windows[replica].waiting // 2))]
        if giver is None or not low:
            break
        taker = min(low, key=would_end)
        if would_end(taker) >= is_to_end(giver):
            break
        takers.setdefault(giver, []).append(taker)
        lines[giver] -= 1
        lines[taker] += 1
    return [Recall(replica, tuple(own)) for replica, own in sorted(takers.items())]


def expected_tokens(inputs: IntArray, most_outputs: IntArray, mean_output: float,
                    are_exact: BoolArray | None = None) -> FloatArray:
    """[queries] tokens of input and of the output that is to be expected: `mean_output`, or the
    most that is allowed where that is less or is known to be the output (`are_exact`)."""
    outputs = np.minimum(most_outputs, mean_output) if mean_output > 0 else most_outputs
    if are_exact is not None:
        outputs = np.where(are_exact, most_outputs, outputs)
    return np.asarray(inputs + outputs, float)


def deal(tokens: Sequence[float] | FloatArray, replicas: int, routing: str = LEAST_TOKENS,
         speeds: Sequence[float] = ()) -> list[list[int]]:
    """The share of each replica, as places in `tokens` (of each query, in the order in which they
    are taken up): in turn, or each query to the replica with the fewest tokens so far, the first
    one of several, so that all end together. `speeds`: of each replica, where they are not all
    alike; a replica that is twice as quick is given twice as much."""
    assert routing in ROUTINGS, f"{routing = }"
    is_equal = len(set(speeds)) < 2
    if routing == ROUND_ROBIN and is_equal:
        return [list(range(first, len(tokens), replicas)) for first in range(replicas)]
    counted = np.ones(len(tokens)) if routing == ROUND_ROBIN else tokens
    own_speeds = [1.0] * replicas if is_equal else [speed / max(speeds) for speed in speeds]
    shares: list[list[int]] = [[] for _ in range(replicas)]
    loads = [(0.0, replica) for replica in range(replicas)]  # a heap
    for place, own in enumerate(counted):
        load, replica = loads[0]
        shares[replica].append(place)
        heapq.heapreplace(loads, (load + float(own) / own_speeds[replica], replica))
    return shares


class Router:
    """The queries that are not given out yet, by the replica whose share they are, and how quickly
    each replica begins its own."""

    def __init__(self, tokens: Sequence[float] | FloatArray, *, windows: Sequence[Window],
                 routing: str = LEAST_TOKENS, speeds: Sequence[float] = ()) -> None:
        """`tokens`: of each query, known or expected, in the order in which they are taken up;
        `windows`: of each replica; `speeds`: queries that each is planned to answer in a second,
        () where all are alike."""
        assert len(windows) >= 1, f"{windows = }"
        self.windows = list(windows)  # may be changed while the job runs
        self._is_fixed = routing == FIXED
        self._shares = [deque(share) for share in deal(tokens, len(windows), routing, speeds)]
        self._supplied = [False] * len(windows)  # who has had a portion: others take from these
        self._paces = Paces(windows, speeds)
        self._takers: dict[int, tuple[int, ...]] = {}  # by whom they were called back from
        self._has_none = [False] * len(windows)  # to give back, until it is given more

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left to be given out; what was called back may come."""
        return not any(self._shares)

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to be given out, and none that was called back is to come."""
        return self.is_empty and not self._takers

    def num_left(self, replica: int) -> int:
        """Queries of the replica's share that are not given out."""
        return len(self._shares[replica])

    def top_up(self, replica: int, load: Load) -> list[int]:
        """The queries, by their places, that are given to a replica that has these: of its own
        share, else of those of others. To be called before the first step, and
        whenever queries have begun or ended."""
        least = self._is_fixed * LEAST_WAITING - load.waiting  # who runs dry takes other steps
        missing, own = max(self.windows[replica].missing(load), least), self._shares[replica]
        given = [own.popleft() for _ in range(min(missing, len(own)))]
        self._supplied[replica] = True
        while len(given) < missing and not self.is_empty and not self._is_fixed:
            taken = self._take_over(replica, load.waiting + len(given), missing - len(given))
            if not taken:
                break
            given += taken
        if given:
            self._has_none[replica] = False
        return given

    def note_begun(self, replica: int, count: int) -> None:
        """So many of the replica's queries have begun."""
        self._paces.note_begun(replica, count)

    def recalls(self, loads: Sequence[Load]) -> list[Recall]:
        """What is to be called back now, by what each replica has; each answers by `take_back`.
        To be called when all have been topped up."""
        if self._is_fixed or not self.is_empty:
            return []
        coming = [sum(own.count(replica) for own in self._takers.values())
                  for replica in range(len(loads))]
        asked = [replica in self._takers or none for replica, none in enumerate(self._has_none)]
        found = recalls(self.windows, self._paces, loads, coming, asked)
        self._takers |= dict(found)
        return found

    def take_back(self, replica: int, places: Sequence[int]) -> None:
        """The replica has given these back, which it had not begun: the last that waited there, in
        their order, none where all have begun meanwhile. They are others' to be given out."""
        takers = self._takers.pop(replica)
        self._has_none[replica] = len(places) < len(takers)
        for place, taker in zip(places, takers, strict=False):
            self._shares[taker].append(place)

    def _take_over(self, replica: int, waiting: int, most: int) -> list[int]:
        """The next queries of the longest share, as many as leave both replicas with equally many
        that wait: whose share it is has its window's worth of them besides, once it has been
        supplied. Before that nothing is taken from it, or the first to be supplied, with a window
        as large as its share, would take what another is to begin with."""
        owner = max((other for other, supplied in enumerate(self._supplied) if supplied),
                    key=self.num_left)
        left = self._shares[owner]
        even = math.ceil((self.windows[owner].waiting + len(left) - waiting) / 2)
        return [left.popleft() for _ in range(min(most, even, len(left)))]
