"""The native replays (csrc/replay/replay.cpp, xsimulator.replay.native_replay): out of an installed
wheel's library, or compiled for themselves, which takes a second or two once. Where neither can be
had, or `XGPT_NATIVE` is `off`, Python replays, and finds the same."""

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
    """A library that has them."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Raises AttributeError where it has none."""
        address, number = ctypes.c_void_p, ctypes.c_int64
        self.library = library
        # by addresses, as in csrc/replay/replay.cpp; one replay at a time, since each may find
        # further blocks of a clock that others use, too
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
        return Native(ctypes.CDLL(str(cached_library(cache_folder(), REPLAYS))))
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
    """A clock as csrc/replay/step_times.h has it, at `address` for as long as this object lives."""

    def __init__(self, tables: Sequence[Blocks], numbers: IntArray, figures: FloatArray) -> None:
        library = native()
        assert library is not None
        self.fetched, self._read = Fetched(tables), (numbers, figures)
        self.address: int = library.clock(self.fetched.function, address_of(numbers),
                                          address_of(figures))
        finalize(self, library.forget_clock, self.address)
