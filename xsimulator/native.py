"""The library of the native replays (csrc/replay/replay.cpp, xsimulator.replay.native_replay). It
comes with an installed wheel, or is compiled once, in a second or two. Without it, or with
`XGPT_NATIVE=off`, Python replays give the same results."""

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
    REPLAYS,
    VARIABLE,
    BuildError,
    cache_folder,
    cached_library,
    extra_flags,
    source_folder,
)
from xsimulator.addresses import address_of

# as in csrc/replay/step_times.h and csrc/replay/replay.cpp
FETCH = ctypes.CFUNCTYPE(ctypes.c_void_p, *[ctypes.c_int64] * 2)
TELL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)


class Native:
    """A loaded library with the native replays."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Raises AttributeError if the library lacks them."""
        address, number = ctypes.c_void_p, ctypes.c_int64
        self.library = library
        # one replay at a time, since each may add blocks to a clock that others share
        self.replaying = Lock()
        self.clock, self.replayed, self.busy, self.tell, self.forget, self.forget_clock = (
            library.xgpt_clock, library.xgpt_replayed, library.xgpt_busy, library.xgpt_tell,
            library.xgpt_forget, library.xgpt_forget_clock)
        self.clock.restype = self.replayed.restype = address
        self.busy.restype = self.tell.restype = None
        self.forget.restype = self.forget_clock.restype = None
        self.clock.argtypes = [FETCH, *[address] * 2]
        self.replayed.argtypes = [number, *[address] * 5]
        self.busy.argtypes = [address, *[ctypes.c_double] * 2, address]
        self.tell.argtypes, self.forget.argtypes = [address, TELL], [address]
        self.forget_clock.argtypes = [address]


@cache
def native() -> Native | None:
    """The library; None if there is none, or it is switched off."""
    if os.environ.get(VARIABLE, "").strip() == "off":
        return None
    packaged = source_folder() / LIBRARY
    if packaged.is_file() and not extra_flags():
        with contextlib.suppress(OSError, AttributeError):
            return Native(ctypes.CDLL(str(packaged)))
    # planning goes on without the library, whatever keeps it from being compiled
    with contextlib.suppress(BuildError, OSError, AttributeError, RuntimeError, ValueError):
        return Native(ctypes.CDLL(str(cached_library(cache_folder(), REPLAYS))))
    return None


class Blocks:
    """A table whose rows are computed in blocks of `size` on first use. `find` takes the row
    numbers of a block and returns [size, columns]. `block(number)` returns the rows from number x
    size on. `row(number)` returns one row as a list, which must not be changed."""

    def __init__(self, size: int, find: Callable[[IntArray], FloatArray]) -> None:
        self._size = size
        self.block: Callable[[int], FloatArray] = cache(lambda number: np.ascontiguousarray(
            find(np.arange(number * size, (number + 1) * size)), float))
        self.row: Callable[[int], list[float]] = cache(lambda row: self.array(row).tolist())

    def array(self, row: int) -> FloatArray:
        """One row as an array [columns]."""
        return np.asarray(self.block(row // self._size)[row % self._size])


class NativeTables:
    """Tables whose blocks csrc asks for through `function` on first use."""

    def __init__(self, tables: Sequence[Blocks]) -> None:
        failures: list[BaseException] = []

        def fetch(table: int, block: int) -> int:
            try:
                return address_of(tables[table].block(block))
            except BaseException as error:  # no exception passes through csrc
                failures.append(error)
                return 0

        self.function, self._failures = FETCH(fetch), failures

    def raise_failure(self) -> None:
        """Raises the exception of a block that could not be computed, if there was one."""
        if self._failures:
            raise self._failures.pop()


class NativeClock:
    """A clock of csrc/replay/step_times.h, at `address` while this object lives."""

    def __init__(self, tables: Sequence[Blocks], numbers: IntArray, figures: FloatArray) -> None:
        library = native()
        assert library is not None
        self.fetched, self._read = NativeTables(tables), (numbers, figures)
        self.address: int = library.clock(self.fetched.function, address_of(numbers),
                                          address_of(figures))
        finalize(self, library.forget_clock, self.address)
