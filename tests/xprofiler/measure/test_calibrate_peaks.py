"""What a machine does at most is kept with how much of it others had meanwhile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="measuring needs the extra `run`")

from xgpt.core.busy import busy_s  # noqa: E402
from xprofiler.kept_peaks import KeptPeaks, kept_peaks  # noqa: E402


def calibrated(folder: Path) -> KeptPeaks:
    """By a process of its own, to which those of this one are others."""
    request = folder / "request.json"
    request.write_text(json.dumps({
        "dtype": "float32", "threads": 1, "folder": str(folder), "name": "one"}),
        encoding="utf-8")
    subprocess.run([sys.executable, "-m", "xprofiler.measure.calibrate", str(request)], check=True)
    kept = kept_peaks(folder, "one")
    assert kept is not None
    return kept


@pytest.mark.skipif(busy_s() is None, reason="the system does not say who used its cores")
def test_peaks_beside_another_program_on_every_core_are_known_to_be_disturbed(
        tmp_path: Path) -> None:
    burning = [subprocess.Popen([sys.executable, "-c", "print(flush=True)\nwhile True: pass"],
                                stdout=subprocess.PIPE) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        for one in burning:
            assert one.stdout is not None and one.stdout.readline()
        kept = calibrated(tmp_path)
    finally:
        for one in burning:
            one.kill()
            one.communicate()
    assert kept.is_disturbed and kept.is_worth_again and kept.tries == 1
