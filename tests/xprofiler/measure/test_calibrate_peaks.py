"""What a machine does at most is kept with how much of it others had meanwhile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="measuring needs the extra `run`")

from xgpt.core.busy import busy_s  # noqa: E402
from xprofiler.kept_peaks import kept_peaks  # noqa: E402

# Others need not burn while it imports what takes seconds beside them.
_CALIBRATES = """
import sys
from xprofiler.measure import calibrate
print(flush=True)
sys.stdin.readline()
sys.exit(calibrate.main(sys.argv[1:]))
"""


@contextmanager
def burning() -> Iterator[None]:
    """Another program, on every core."""
    started = [subprocess.Popen([sys.executable, "-c", "print(flush=True)\nwhile True: pass"],
                                stdout=subprocess.PIPE) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        for one in started:
            assert one.stdout is not None and one.stdout.readline()
        yield
    finally:
        for one in started:
            one.kill()
            one.communicate()


@pytest.mark.skipif(busy_s() is None, reason="the system does not say who used its cores")
def test_peaks_beside_another_program_on_every_core_are_known_to_be_disturbed(
        tmp_path: Path) -> None:
    request = tmp_path / "request.json"
    request.write_text(json.dumps({
        "dtype": "float32", "threads": 1, "folder": str(tmp_path), "name": "one"}),
        encoding="utf-8")
    # a process of its own, to which those of this one are others
    with subprocess.Popen([sys.executable, "-c", _CALIBRATES, str(request)],
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline()
        with burning():
            process.communicate("now\n")
    kept = kept_peaks(tmp_path, "one")
    assert process.returncode == 0 and kept is not None
    assert kept.is_disturbed and kept.is_worth_again and kept.tries == 1
