"""A stop that a library swallowed is not lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress

import pytest

from xgpt.core.errors import StoppedEarly
from xgpt.launch.asked import warned_in_good_order
from xgpt.launch.process import start, watch_to_end

RANKS = [sys.executable, "-c", "import time; time.sleep(60)"]


def test_what_a_signal_raises_and_something_catches_is_raised_before_ranks_start() -> None:
    with pytest.raises(StoppedEarly, match="SIGTERM came while no ranks"), warned_in_good_order():
        with suppress(BaseException):  # as torch's import does
            os.kill(os.getpid(), signal.SIGTERM)
        start(RANKS)
        pytest.fail("they were started")


def test_ranks_that_are_there_already_end() -> None:
    ranks = start(RANKS)
    with pytest.raises(StoppedEarly), warned_in_good_order():
        with suppress(BaseException):
            os.kill(os.getpid(), signal.SIGTERM)
        watch_to_end(ranks, watch=lambda: None, ask_to_stop=None)
    assert ranks.process.wait(10) != 0


def test_what_one_command_was_asked_the_next_is_not() -> None:
    with suppress(StoppedEarly), warned_in_good_order():
        os.kill(os.getpid(), signal.SIGTERM)
    done = start([sys.executable, "-c", "pass"])
    watch_to_end(done, watch=lambda: None, ask_to_stop=None)
    assert isinstance(done.process, subprocess.Popen) and done.process.returncode == 0
