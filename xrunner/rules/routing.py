"""Routing of requests to replicas, and its order.

Requests are divided among replicas beforehand, in the order in which they are run. A replica gets
its share a few requests at a time (`Window`): enough for its batching rule to decide as if it saw
the whole share. The rest can still go to another replica. A replica that runs dry takes from the
largest share left. Once all requests are given out, those waiting at a slow replica are recalled
and given to a quicker one (`recalls`). A replica returns only requests that it has not begun.

All decisions follow from the calls and their order, without a clock. So the replay and the runner
make the same ones."""

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
from xgpt.core.prefixes import Prefixes
from xgpt.core.schedule import Estimate
from xrunner.rules.batch_sizer import sizer_of
from xrunner.rules.order import Forest, in_windows

LEAST_WAITING = 2**13  # chosen: more than any rule looks at; smaller jobs are given out at once
_DIVIDED = 0.25  # chosen: share of a replica's tokens above which a prefix's requests are divided
_WAITING_SHARE = 4  # chosen: at most this share of max_active joins in one step


class Load(NamedTuple):
    """A replica's requests: waiting for their prefill, and active."""

    waiting: int
    active: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Number of requests that a replica is kept supplied with. `waiting`: those waiting for
    prefill. `present`: those waiting and active together. `batch`: requests it begins at a time,
    about. `at_work`: mean active requests (0: unknown)."""

    waiting: int
    present: int = 0
    batch: int = 1
    at_work: float = 0.0

    def missing(self, load: Load) -> int:
        """Number of requests to give to a replica with this load."""
        return max(self.waiting - load.waiting, self.present - sum(load), 0)

    def can_begin(self, load: Load) -> bool:
        """Whether a replica with this load would begin one more request at once."""
        return sum(load) < max(self.present - self.waiting, 1)


def window_of(estimate: Estimate) -> Window:
    """The window of a replica that executes `estimate`. It holds twice what the rule may look at,
    since a report of what has begun and the supply that follows take time."""
    return replace(_window_of(estimate), at_work=estimate.figures.decode_batch)


def _window_of(estimate: Estimate) -> Window:
    controls, groups = estimate.controls, estimate.deployment.num_groups
    if isinstance(controls, RraControls):
        return rra_window(controls.encode_batch, groups, controls.even)
    if isinstance(controls, WaaControls):
        most = sizer_of(controls.even).most(controls.encode_batch)
        # requests left to the decode pool come on top
        left = math.ceil(controls.stock_tokens / max(controls.even.mean_input_tokens, 1.0))
        return Window(waiting=estimate.deployment.encoding.num_groups * most + left,
                      batch=controls.encode_batch)
    if isinstance(controls, StaticControls):
        # the next batch is requested while the one before is decoded; sorted ones choose from many
        return Window(waiting=controls.encode_batch if controls.batches is None else LEAST_WAITING,
                      batch=controls.encode_batch)
    if isinstance(controls, ContinuousControls):
        waiting = max(math.ceil(controls.max_active / _WAITING_SHARE), 2 * groups)
        return Window(waiting=waiting, present=controls.max_active + waiting)
    most = max(math.ceil(estimate.most_in_system), 1)
    return Window(waiting=most, present=2 * most)


def rra_window(encode_batch: int, num_groups: int, even: EvenBatches) -> Window:
    """RRA's window: two rounds at their largest, and one batch more. With fewer requests waiting
    the rule would take them for the job's last ones."""
    most = num_groups * sizer_of(even).most(math.ceil(encode_batch / num_groups))
    return Window(waiting=2 * most + encode_batch, batch=encode_batch)


# chosen: a replica's pace is averaged over its active requests, and at least so many batches; paces
# above this share of the quickest count as equal, since requests begin in bursts
_LEAST_BATCHES, _EVEN = 6, 0.75


AWAY = Load(2**30, 0)  # of a replica that takes no requests


class Recall(NamedTuple):
    """Requests to recall from `replica`: one for each replica in `takers`."""

    replica: int
    takers: tuple[int, ...]


class Paces:
    """How quickly each replica begins requests, relative to the others."""

    def __init__(self, windows: Sequence[Window], speeds: Sequence[float] = ()) -> None:
        """`speeds`: planned requests/s of each replica, () if they are alike."""
        self._memory = sum(max(_LEAST_BATCHES * window.batch, window.at_work)
                           for window in windows)
        planned = speeds or [1.0] * len(windows)
        self._usual = [self._memory * speed / sum(planned) for speed in planned]
        self._begun = list(self._usual)
        self.has_begun = [False] * len(windows)

    def note_begun(self, replica: int, count: int) -> None:
        """Records that the replica has begun `count` more requests."""
        fading = math.exp(-count / self._memory)
        self._begun = [begun * fading for begun in self._begun]
        self._begun[replica] += self._memory * (1 - fading)
        self.has_begun[replica] = True

    def times(self) -> list[float]:
        """For each replica, the requests that all replicas begin while it begins one."""
        shares = [begun / usual for begun, usual in zip(self._begun, self._usual, strict=True)]
        even = _EVEN * max(shares)
        return [self._memory / (usual * (max(shares) if share >= even else max(share, 1e-9)))
                for usual, share in zip(self._usual, shares, strict=True)]


def recalls(windows: Sequence[Window], paces: Paces, loads: Sequence[Load],
            coming: Sequence[int], asked: Sequence[bool], again: float = 0.0) -> list[Recall]:
    """Recalls to make once every request is given out. `again`: as of Units.

    `coming`: requests on their way to each replica from others. `asked`: True for a replica whose
    answer is awaited, or that has nothing to return.

    Time is counted without a clock: in requests that all replicas begin meanwhile, recent ones
    weighing most. Let T be a replica's time for a batch. A request in its j-th waiting batch is
    expected to begin after j - 1/2 such times; one that newly arrives after j, or after j - 1 if
    the replica is idle. By Little's law a request is active for as long as its replica takes to
    begin as many requests as are active. Requests move to where they end sooner; between equally
    quick replicas only to an empty one."""
    replicas = range(len(windows))
    lines = [load.waiting + more for load, more in zip(loads, coming, strict=True)]
    free = [window.can_begin(load) and not more
            for window, load, more in zip(windows, loads, coming, strict=True)]
    # a replica that just got its first requests begins them as soon as they arrive
    is_late = [not window.can_begin(Load(0, load.active))
               for window, load in zip(windows, loads, strict=True)]
    each = paces.times()
    times = [time * window.batch for time, window in zip(each, windows, strict=True)]
    lives = [time * window.at_work for time, window in zip(each, windows, strict=True)]
    takers: dict[int, list[int]] = {}

    def would_end(replica: int) -> float:
        """Time at which one more request would end there."""
        batches = math.ceil((lines[replica] + 1 + again) / windows[replica].batch)
        return (batches - free[replica]) * times[replica] + lives[replica]

    def is_to_end(replica: int) -> float:
        """Time at which the last request waiting there ends."""
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
    """Expected tokens of input and output, [queries]. The output counts as `mean_output`, or as
    `most_outputs` where that is less or exact. `mean_output`: 0 if unknown."""
    outputs = np.minimum(most_outputs, mean_output) if mean_output > 0 else most_outputs
    if are_exact is not None:
        outputs = np.where(are_exact, most_outputs, outputs)
    return np.asarray(inputs + outputs, float)


class Units(NamedTuple):
    """Requests that are dealt together. `of`: [requests] number of each one's unit, by their first
    requests. `tokens`: [units]. `again`: tokens that a request encodes once more if it leaves its
    unit, as a multiple of its own tokens; a mean."""

    of: IntArray
    tokens: FloatArray
    again: float


def units_of(tokens: FloatArray, prefixes: Prefixes | None, replicas: int,
             routing: str) -> Units | None:
    """Units of requests that share a prefix; None: each request is dealt alone. A prefix of more
    than _DIVIDED of a replica's share is divided: every replica encodes it. `tokens`: of each
    request, shared ones among them."""
    if prefixes is None or routing == ROUND_ROBIN or replicas == 1:
        return None
    prefixes = in_windows(prefixes, len(tokens))  # without those that no request has
    forest, own, count = Forest(prefixes), tokens - prefixes.shared, len(prefixes.ends)
    below = forest.below(own, prefixes.own_tokens)
    parts = np.arange(len(below))
    is_divided = (parts < count) & (below > _DIVIDED * below[forest.is_top].sum() / replicas)
    tops = forest.above(np.where(is_divided, -1, parts),
                        lambda above, part: part if above < 0 else above)[count:]
    _, firsts, of = np.unique(tops, return_index=True, return_inverse=True)
    order = np.argsort(firsts)
    above = np.array(forest.parents, int)[tops]
    again = prefixes.shared - np.where(above >= 0, np.append(prefixes.ends, 0)[above], 0)
    return Units(np.argsort(order)[of], below[tops[firsts[order]]],
                 float(again.sum() / max(own.sum(), 1.0)))


def replica_shares(tokens: Sequence[float] | FloatArray, replicas: int, routing: str = LEAST_TOKENS,
         speeds: Sequence[float] = (), units: Units | None = None) -> list[list[int]]:
    """The share of each replica, as indices into `tokens`. `tokens`: of each request, in run order.
    `routing`: in turn, or each request to the replica with the fewest tokens so far. `speeds`:
    relative to each other (() if alike); twice the speed gets twice the tokens. `units`: requests
    that stay together."""
    assert routing in ROUTINGS, f"{routing = }"
    if units is not None:
        of_units = replica_shares(units.tokens, replicas, routing, speeds)
        owners = np.empty(len(units.tokens), int)
        for replica, own_units in enumerate(of_units):
            owners[own_units] = replica
        return [np.flatnonzero(owners[units.of] == replica).tolist() for replica in range(replicas)]
    is_equal = len(set(speeds)) < 2
    if routing == ROUND_ROBIN and is_equal:
        return [list(range(first, len(tokens), replicas)) for first in range(replicas)]
    counted = np.ones(len(tokens)) if routing == ROUND_ROBIN else tokens
    own_speeds = [1.0] * replicas if is_equal else [speed / max(speeds) for speed in speeds]
    shares: list[list[int]] = [[] for _ in range(replicas)]
    loads = [(0.0, replica) for replica in range(replicas)]  # a heap of (tokens, replica)
    for place, own in enumerate(counted):
        load, replica = loads[0]
        shares[replica].append(place)
        heapq.heapreplace(loads, (load + float(own) / own_speeds[replica], replica))
    return shares


class Router:
    """Gives requests out to replicas, and recalls those that another would begin sooner."""

    def __init__(self, tokens: Sequence[float] | FloatArray, *, windows: Sequence[Window],
                 routing: str = LEAST_TOKENS, speeds: Sequence[float] = (),
                 prefixes: Prefixes | None = None) -> None:
        """`tokens`: known or expected, of each request in run order. `windows`: of each replica.
        `speeds`: planned requests/s of each replica, () if they are alike. `prefixes`: that the
        requests share, in run order."""
        assert len(windows) >= 1, f"{windows = }"
        self.windows = list(windows)  # may change while the job runs
        self._is_fixed = routing == FIXED
        self._units = units_of(np.asarray(tokens), prefixes, len(windows), routing)
        self._again = 0.0 if self._units is None else self._units.again
        self._shares = list(map(deque, replica_shares(
            tokens, len(windows), routing, speeds, self._units)))
        self._supplied = [False] * len(windows)  # replicas supplied once: others may take from them
        self._paces = Paces(windows, speeds)
        self._takers: dict[int, tuple[int, ...]] = {}  # recalled from -> for whom
        self._has_none = [False] * len(windows)  # nothing to return, until it gets more
        self.away: set[int] = set()  # replicas that can execute nothing now
        self.arrived_s: dict[int, float] = {}  # of requests that arrive over time, until they end

    @property
    def is_empty(self) -> bool:
        """Whether all requests are given out; recalled ones may still come back."""
        return not any(self._shares)

    @property
    def is_done(self) -> bool:
        """Whether all requests are given out, and no recall is unanswered."""
        return self.is_empty and not self._takers

    def num_left(self, replica: int) -> int:
        """Number of requests of the replica's share that are not given out."""
        return len(self._shares[replica])

    def top_up(self, replica: int, load: Load) -> list[int]:
        """Indices of the requests to give to a replica with this load now. They come from its own
        share, else from those of others. Call it before the first step and whenever requests have
        begun or ended."""
        least = self._is_fixed * LEAST_WAITING - load.waiting  # fixed: shares come at once
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
        """Records that the replica has begun `count` more requests."""
        self._paces.note_begun(replica, count)

    def recalls(self, loads: Sequence[Load]) -> list[Recall]:
        """Recalls to make now, given each replica's load. Call it when all have been topped up.
        Each replica answers by `take_back`."""
        if self._is_fixed or not self.is_empty:
            return []
        coming = [sum(own.count(replica) for own in self._takers.values())
                  for replica in range(len(loads))]
        asked = [replica in self._takers or none or replica in self.away
                 for replica, none in enumerate(self._has_none)]
        loads = [AWAY if replica in self.away else load for replica, load in enumerate(loads)]
        found = recalls(self.windows, self._paces, loads, coming, asked, self._again)
        self._takers |= dict(found)
        return found

    def take_back(self, replica: int, places: Sequence[int]) -> None:
        """Takes the requests that a replica returns on a recall, and assigns them to its takers.
        `places`: indices of the last ones waiting there, in order; none if all have begun."""
        takers = self._takers.pop(replica)
        self._has_none[replica] = len(places) < len(takers)
        for place, taker in zip(places, takers, strict=False):
            self._shares[taker].append(place)

    def give_back(self, replica: int, places: Sequence[int], others: Sequence[int]) -> None:
        """Assigns all requests of a replica that goes away to `others`, in turn and before their
        own. `places`: indices of those that it has, in order."""
        self.away.add(replica)
        self._takers = {giver: tuple(others[0] if taker == replica else taker for taker in takers)
                        for giver, takers in self._takers.items()}
        self._shares[replica], left = deque(), [*places, *self._shares[replica]]
        for turn, place in enumerate(reversed(left)):
            self._shares[others[turn % len(others)]].appendleft(place)

    def _take_over(self, replica: int, waiting: int, most: int) -> list[int]:
        """Takes requests of the largest share, so that both replicas have equally many waiting. The
        owner keeps its window's worth. Shares of replicas that were never supplied are not touched:
        the first to be supplied could take what another is to begin with. Units are taken from the
        end of the share: the owner goes on with the prefixes that it has."""
        owner = max((other for other, supplied in enumerate(self._supplied) if supplied),
                    key=self.num_left)
        left = self._shares[owner]
        even = math.ceil((self.windows[owner].waiting + len(left) - waiting - self._again) / 2)
        count = min(most, even, len(left))
        if self._units is not None:
            return [left.pop() for _ in range(count)][::-1]
        return [left.popleft() for _ in range(count)]
