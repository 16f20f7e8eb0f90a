"""What planning takes step by step, by csrc/planning*.cpp: walks (continuous.paged_walk) twenty
times as quick as by arrays, rounds of a pipeline (continuous.in_flight) some ten times, when a
replay's steps end (replay.stage_line), what uneven batches cost (waa.unevenness), timelines of
phases (xsimulator.pipeline), what steps take at least (continuous.native_least), RRA's points and
bounds (rra.native), what its groups are dealt (rra.dealt), WAA's bounds (waa.native), and replays
(replay.native_replay). Out of an installed wheel's library, or compiled for itself, which takes a
second or two once. Where neither can be had, or `XGPT_NATIVE` is `off`, Python serves, and finds
the same."""

import contextlib
import ctypes
import os
from collections.abc import Callable, Sequence
from functools import cache
from threading import Lock
from weakref import finalize

import numpy as np

from xgpt.core.lengths import FloatArray, IntArray
from xrunner.ops.build import (
    LIBRARY,
    PLANNING,
    VARIABLE,
    BuildError,
    cache_folder,
    cached_library,
    extra_flags,
    source_folder,
)
from xsimulator.addresses import address_of

_SUMS = 8  # of a configuration
# as in csrc/step_times.h and csrc/planning_replays.cpp
FETCH = ctypes.CFUNCTYPE(ctypes.c_void_p, *[ctypes.c_int64] * 2)
TELL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)


class Native:
    """A library that has them."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Raises AttributeError where it has none."""
        address, number = ctypes.c_void_p, ctypes.c_int64
        self.library = library
        self._timeline = library.xgpt_timeline
        self._timeline.restype = None
        self._timeline.argtypes = [*[address] * 4, *[number] * 4, *[address] * 3]
        self._walks, self._rounds = library.xgpt_walks, library.xgpt_rounds
        self._walks.restype = self._rounds.restype = None
        self._walks.argtypes = [address, address, address, ctypes.c_int, address, number, number,
                                number, number, address, address, address]
        self._rounds.argtypes = [address] * 8
        self.lines = library.xgpt_lines  # by addresses: it is called too often for more
        self.lines.restype = number
        self.lines.argtypes = [address, address, number, number, address, number, ctypes.c_double,
                               number, number, address]
        # likewise, as in csrc/planning_replays.cpp (replay.native_replay); one replay at a time,
        # since each may find further blocks of a clock that others use, too
        self.replaying = Lock()
        self.clock, self.replayed, self.busy, self.tell, self.forget, self.forget_clock = (
            library.xgpt_clock, library.xgpt_replayed, library.xgpt_busy, library.xgpt_tell,
            library.xgpt_forget, library.xgpt_forget_clock)
        self.clock.restype = self.replayed.restype = address
        self.busy.restype = self.tell.restype = None
        self.forget.restype = self.forget_clock.restype = None
        self.clock.argtypes = [FETCH, *[address] * 2]
        self.replayed.argtypes = [number, *[address] * 2]
        self.busy.argtypes = [address, *[ctypes.c_double] * 2, address]
        self.tell.argtypes, self.forget.argtypes = [address, TELL], [address]
        self.forget_clock.argtypes = [address]
        self.dealt = library.xgpt_dealt  # likewise (rra.dealt)
        self.dealt.restype, self.dealt.argtypes = number, [address] * 7
        self._in_line = library.xgpt_in_line
        self._between = library.xgpt_between
        self._in_line.restype = self._between.restype = None
        self._between.argtypes = [*[address] * 6, *[number] * 5, address, address]
        self._in_line.argtypes = [*[address] * 3, *[number] * 3, *[address] * 4]

    def walks(self, streams: Sequence[tuple[FloatArray, FloatArray]], facts: FloatArray,
                 configs: FloatArray, *, is_chunked: bool, groups: int, count: int,
                 warm_up: int) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Arguments and results as in csrc/planning.cpp: (sums [8, configs], tokens, queries
        [configs, steps of all groups])."""
        size = configs.shape[1]
        means = np.zeros((_SUMS, size))
        tokens, joined = (np.empty((size, (count - warm_up) * groups)) for _ in range(2))
        pointers = (ctypes.c_void_p * (2 * len(streams)))(*(
            address_of(one) for stream in streams for one in stream))
        sizes = np.array([len(values) for values, _ in streams], np.int64)
        facts, configs = np.ascontiguousarray(facts), np.ascontiguousarray(configs)
        self._walks(pointers, address_of(sizes), address_of(facts), int(is_chunked),
                    address_of(configs), size, groups, count, warm_up, address_of(means),
                    address_of(tokens), address_of(joined))
        return means, tokens, joined

    def rounds(self, table: FloatArray, places: FloatArray, of_places: IntArray, share: FloatArray,
               kind_of: IntArray, *, warm_up: int,
               alternates: bool) -> tuple[FloatArray, FloatArray]:
        """Arguments and results as in csrc/planning_rounds.cpp: ([3, configs], [configs, sizes +
        1])."""
        rows, kinds, configs = table.shape
        numbers = np.array([rows - 2, places.shape[1], warm_up, len(kind_of), kinds, configs,
                            int(alternates)], np.int64)
        given = [np.ascontiguousarray(table), np.ascontiguousarray(places),
                 np.ascontiguousarray(of_places, np.int64), np.ascontiguousarray(share, float),
                 np.ascontiguousarray(kind_of, np.int64), numbers]
        sums, counts = np.empty((3, configs)), np.zeros((configs, rows - 1))
        self._rounds(*(address_of(own) for own in given), address_of(sums), address_of(counts))
        return sums, counts

    def in_line(self, waits: IntArray, turn_of: IntArray, durations_s: FloatArray,
                begin_s: float) -> tuple[FloatArray, FloatArray]:
        """Arguments and results as of replay.stage_line's `_in_line`."""
        (steps, stages), turns = durations_s.shape, len(waits)
        free_s = np.array([begin_s] + [-np.inf] * (stages - 1))
        ready_s, turns_s, ends = np.full(turns, np.inf), np.empty(turns), np.empty((steps, stages))
        waits, turn_of, durations_s = (np.ascontiguousarray(waits), np.ascontiguousarray(turn_of),
                                       np.ascontiguousarray(durations_s))
        self._in_line(address_of(waits), address_of(turn_of), address_of(durations_s), turns, steps,
                      stages, address_of(free_s), address_of(ready_s), address_of(turns_s),
                      address_of(ends))
        return turns_s, ends

    def between_s(self, shares: FloatArray, limits: IntArray, steps: FloatArray, rises: FloatArray,
                  handover: FloatArray, begin: int) -> FloatArray:
        """Arguments as in csrc/planning.cpp, [rows, stages] and [rows] of pools with every kind of
        batch: [rows] seconds."""
        rows, most = steps.shape
        batch, depth = np.arange(rows) % len(shares), int(limits.max())
        shares, steps, rises, handover = map(np.ascontiguousarray, (shares, steps, rises, handover))
        limits = np.ascontiguousarray(limits, np.int64)
        room, between = np.empty(2 * most + 2 + depth), np.empty(rows)
        self._between(address_of(shares), address_of(batch), address_of(limits), address_of(steps),
                      address_of(rises), address_of(handover), rows, most, shares.shape[1], begin,
                      depth, address_of(room), address_of(between))
        return between

    def timeline(self, work: Sequence[Sequence[FloatArray]], kind_of: Sequence[int],
                 blocks: IntArray, widths: FloatArray | IntArray | None,
                 ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Arguments as in csrc/planning_rra.cpp, `work` by kind of stage: (period_s, encoded_s
        [configs], finish_s [rows, configs])."""
        held = [np.ascontiguousarray(one, float) for kind in work for one in kind]
        rows, configs = held[2].shape
        pointers = np.array([address_of(one) for one in held])
        kinds, blocks = np.array(kind_of, np.int64), np.ascontiguousarray(blocks, np.int64)
        if widths is not None:
            widths = np.ascontiguousarray(widths, float)
        period, encoded, finish = np.empty(configs), np.empty(configs), np.empty((rows, configs))
        self._timeline(address_of(pointers), address_of(kinds), address_of(blocks),
                       None if widths is None else address_of(widths), len(work), len(kinds),
                       configs, rows, address_of(period), address_of(encoded), address_of(finish))
        return period, encoded, finish


@cache
def native() -> Native | None:
    """None where arrays have to serve."""
    if os.environ.get(VARIABLE, "").strip() == "off":
        return None
    packaged = source_folder() / LIBRARY
    if packaged.is_file() and not extra_flags():
        with contextlib.suppress(OSError, AttributeError):
            return Native(ctypes.CDLL(str(packaged)))
    # a folder or a compiler's words that cannot be made out are no reason to plan nothing
    with contextlib.suppress(BuildError, OSError, AttributeError, RuntimeError, ValueError):
        return Native(ctypes.CDLL(str(cached_library(cache_folder(), PLANNING))))
    return None


class Blocks:
    """A table of numbers whose rows are found in blocks of `size`, when one of them is asked for
    first. `find`: numbers of a block's rows -> [size, columns]. `block`: the rows from its number
    times `size` on; `row`: one as a list, which stays the table's."""

    def __init__(self, size: int, find: Callable[[IntArray], FloatArray]) -> None:
        self._size = size
        self.block: Callable[[int], FloatArray] = cache(lambda number: np.ascontiguousarray(
            find(np.arange(number * size, (number + 1) * size)), float))
        self.row: Callable[[int], list[float]] = cache(lambda row: self.array(row).tolist())

    def array(self, row: int) -> FloatArray:
        return np.asarray(self.block(row // self._size)[row % self._size])


class Fetched:
    """Tables whose blocks csrc asks for by `function`, where one of them is needed first."""

    def __init__(self, tables: Sequence[Blocks]) -> None:
        failures: list[BaseException] = []

        def fetch(table: int, block: int) -> int:
            try:
                return address_of(tables[table].block(block))
            except BaseException as error:  # none finds its way through csrc
                failures.append(error)
                return 0

        self.function, self._failures = FETCH(fetch), failures

    def raise_failure(self) -> None:
        """Raises what kept csrc from a block, where anything did."""
        if self._failures:
            raise self._failures.pop()


class NativeClock:
    """A clock as csrc/step_times.h has it, at `address` for as long as this object lives."""

    def __init__(self, tables: Sequence[Blocks], numbers: IntArray, figures: FloatArray) -> None:
        library = native()
        assert library is not None
        self.fetched, self._read = Fetched(tables), (numbers, figures)
        self.address: int = library.clock(self.fetched.function, address_of(numbers),
                                          address_of(figures))
        finalize(self, library.forget_clock, self.address)
