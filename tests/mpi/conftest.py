from __future__ import annotations

import functools
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from job_folder import XGPT, MeasuredToy, write_job


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """One profile cache for all runs: a toy's profile serves every job on it."""
    return {**os.environ, "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))}


@pytest.fixture(scope="session")
def measured_llama(tmp_path_factory: pytest.TempPathFactory, cache: dict[str, str],
                   ) -> MeasuredToy:
    """Measured once, for the tests of what is measured; `cache` holds a copy for all others."""
    folder, own = tmp_path_factory.mktemp("measured"), tmp_path_factory.mktemp("own-cache")
    job, target = toy_job(folder, "llama", ranks=2), folder / "profile.json"
    done = subprocess.run(
        [*XGPT, "profile", str(job), "--budget", "1s", "--tp", "1,2,3", "--out", str(target)],
        capture_output=True, text=True, timeout=200, check=False,
        env={**cache, "XDG_CACHE_HOME": str(own)})
    shutil.copytree(own, cache["XDG_CACHE_HOME"], dirs_exist_ok=True)
    return MeasuredToy(job=job, profile=target, cache=own, done=done)


@pytest.fixture(scope="session")
def profiled(tmp_path_factory: pytest.TempPathFactory, cache: dict[str, str],
             request: pytest.FixtureRequest) -> Callable[[str, int], dict[str, str]]:
    """`cache`, with the least profile there is of a family's toy on so many ranks: how good the
    plans are does not matter."""

    @functools.cache
    def measure(family: str, ranks: int = 2) -> None:
        if (family, ranks) == ("llama", 2):
            done = request.getfixturevalue("measured_llama").done
        else:
            job = toy_job(tmp_path_factory.mktemp(f"profile-{family}"), family, ranks=ranks)
            done = subprocess.run([*XGPT, "profile", str(job), "--budget", "1s"], env=cache,
                                  capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr

    def with_profile(family: str, ranks: int = 2) -> dict[str, str]:
        measure(family, ranks)
        return cache

    return with_profile


def toy_job(folder: Path, family: str, *, ranks: int) -> Path:
    """A job as the tests' own, for its profile alone."""
    import toys

    toys.make_model(family, folder / "model")
    return write_job(folder, folder / "model", [{"id": "q", "tokens": [7, 8, 9]}],
                     schedule="policy: rra", ranks=ranks)
