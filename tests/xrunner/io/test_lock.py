"""One run at a time in an output folder, even after its launcher was killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from xgpt.core.errors import XgptError
from xrunner.io.lock import output_lock


def test_a_second_run_is_refused_until_the_first_and_its_children_are_gone(tmp_path: Path) -> None:
    with output_lock(tmp_path) as descriptor:
        with pytest.raises(XgptError, match="another run"), output_lock(tmp_path):
            pass
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE,
                                 pass_fds=(descriptor,))
    with pytest.raises(XgptError, match="another run"), output_lock(tmp_path):
        pass
    child.communicate(b"\n", timeout=30)
    with output_lock(tmp_path):
        pass
