"""When Python looks for garbage that refers to itself."""

import ctypes
import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Callable

import pytest

from xscheduler import planner as collecting
from xscheduler.planner import uncollected


class Node:
    """Refers to itself."""

    def __init__(self) -> None:
        self.own = self


@pytest.fixture
def melted(monkeypatch):
    """The tests' own objects are frozen otherwise."""
    monkeypatch.setattr(collecting, "_others_froze", False)
    gc.unfreeze()
    yield
    gc.freeze()


def looks(work: Callable[[], None]) -> int:
    """How often garbage is looked for while the work is done."""
    found: list[str] = []

    def told(phase: str, info: dict[str, int]) -> None:
        found.append(phase)

    gc.callbacks.append(told)
    try:
        work()
    finally:
        gc.callbacks.remove(told)
    return found.count("start")


def test_nothing_is_looked_for_meanwhile_and_what_refers_to_itself_found_afterwards(melted):
    def work() -> None:
        with uncollected():
            make()
        kept.append([])

    def make() -> None:
        kept.extend([number] for number in range(2 * gc.get_threshold()[0]))

    kept: list[list[int]] = []
    assert looks(make) > 0
    assert looks(work) == 0
    assert gc.isenabled() and gc.get_freeze_count() == 0
    with uncollected():
        gone = weakref.ref(Node())
    assert gone() is not None
    gc.collect()
    assert gone() is None


def test_what_others_have_frozen_stays_so_and_who_has_it_off_keeps_it_off():
    gc.freeze()
    with uncollected():
        pass
    assert gc.get_freeze_count() > 0
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


needs_glibc = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallopt"), reason="another C library than glibc")

# Pages that a process is given while it takes and frees 20 MB, ten times over.
PAGES = """
import resource
import numpy as np
from xscheduler.planner import keep_freed
keep_freed()
for place in range(11):
    held = [np.ones(2**17) for _ in range(20)]
    del held
    now = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    before = now if place == 0 else before
print(now - before)
"""

def pages(**environment: str) -> int:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run([sys.executable, "-c", PAGES], env=clean | environment, check=True,
                          capture_output=True, text=True)
    return int(done.stdout)


@needs_glibc
def test_what_was_freed_is_taken_again_without_new_pages_unless_the_environment_says_so():
    assert pages() < 1_000
    assert pages(MALLOC_TRIM_THRESHOLD_="0", MALLOC_TOP_PAD_="0") > 20_000
