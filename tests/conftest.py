"""What every test may use: markers that skip visibly what a machine lacks, and how two processes
share the tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import Any

import pytest

_STARTS_RANKS = ("tests/mpi/", "tests/gpu/", "tests/extending/")
_WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))

if _WORKERS > 1:  # before numpy and torch load: each worker has its share of the cores
    os.environ.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // _WORKERS, 1)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file at a time, so that its fixtures are made once; those that start ranks all in one
    process, for ranks fill the cores."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "ranks" if file.startswith(_STARTS_RANKS) else file

    return ByFile(config, log) if config.option.dist == "loadfile" else None


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
