"""When Python looks for garbage that refers to itself."""

import ctypes
import gc
import os
import subprocess
import sys

import pytest

from xscheduler.planner import garbage_collection_paused

# In a process of its own: the tests' own objects are frozen.
LOOKS = """
import gc, weakref
from xscheduler.planner import garbage_collection_paused

class Node:
    def __init__(self):
        self.own = self

found = []
gc.callbacks.append(lambda phase, info: found.append(phase))
with garbage_collection_paused():
    made = [[number] for number in range(2 * gc.get_threshold()[0])]
    gone = weakref.ref(Node())
    assert not found and gone() is not None
assert gc.isenabled() and gc.get_freeze_count() == 0
gc.collect()
assert found and gone() is None
"""

def test_nothing_is_looked_for_meanwhile_and_what_refers_to_itself_found_afterwards():
    done = subprocess.run([sys.executable, "-c", LOOKS], capture_output=True, text=True,
                          check=False)
    assert done.returncode == 0, done.stderr


def test_what_others_have_frozen_stays_so_and_who_has_it_off_keeps_it_off():
    gc.freeze()
    with garbage_collection_paused():
        pass
    assert gc.get_freeze_count() > 0
    gc.disable()
    try:
        with garbage_collection_paused():
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
from xscheduler.planner import keep_freed_memory
keep_freed_memory()
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
