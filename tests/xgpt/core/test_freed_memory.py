"""Memory that is freed, and wanted again at once."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallopt"), reason="another C library than glibc")

# Pages that a process is given while it takes and frees 20 MB, ten times over.
PAGES = """
import resource
import sys

import numpy as np

from xscheduler.planner import keep_freed

if sys.argv[1] == "kept":
    keep_freed()


def work():
    held = [np.ones(2**17) for _ in range(20)]


work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    work()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def pages(how: str, **environment: str) -> int:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run([sys.executable, "-c", PAGES, how], env=clean | environment, check=True,
                          capture_output=True, text=True)
    return int(done.stdout)


def test_what_was_freed_is_taken_again_without_new_pages() -> None:
    assert pages("given back") > 20_000
    assert pages("kept") < 1_000


def test_what_the_environment_says_stays() -> None:
    assert pages("kept", MALLOC_TRIM_THRESHOLD_="0", MALLOC_TOP_PAD_="0") > 20_000
