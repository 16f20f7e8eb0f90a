"""What every test may use: toy models on disk, markers that skip visibly what a machine lacks."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "browser" in item.keywords and not _chromium():
            item.add_marker(pytest.mark.skip(reason="no chromium on PATH"))
        if "slurm" in item.keywords and shutil.which("sbatch") is None:
            item.add_marker(pytest.mark.skip(reason="no Slurm (sbatch) on PATH"))
        if "gpu" in item.keywords and not _has_gpu():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def _chromium() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((path for name in names if (path := shutil.which(name))), None)


def _has_gpu() -> bool:
    return shutil.which("nvidia-smi") is not None and subprocess.run(
        ["nvidia-smi", "-L"], capture_output=True, check=False).returncode == 0


@pytest.fixture(scope="session")
def xgpt_command() -> list[str]:
    """The installed command, run by this interpreter."""
    return [sys.executable, "-c", "from xgpt.cli.main import main; main()"]
