"""What the tests of toys share: a job on a toy model with its profile, and packages that look
installed."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from job_folder import SUPPORT, XGPT, as_requests, write_job, xgpt

from xgpt.core import policies


@dataclass(frozen=True, slots=True, kw_only=True)
class ToyJob:
    """A job on two ranks whose model is measured. `queries`: those of its requests."""

    path: Path
    queries: list[Any]
    cache: Path  # $XDG_CACHE_HOME

    @property
    def output(self) -> Path:
        return self.path.parent / "out"


@pytest.fixture(scope="session")
def toy_job(tmp_path_factory, profiled):
    pytest.importorskip("torch", reason="runs need the extra `run`")
    from toys import make_model, random_queries

    folder = tmp_path_factory.mktemp("toy-job")
    make_model("llama", folder / "model")
    queries = random_queries(24, seed=9)
    path = write_job(folder, folder / "model", as_requests(queries), schedule="policy: rra",
                     ranks=2)
    return ToyJob(path=path, queries=queries,
                  cache=Path(profiled("llama", 2)["XDG_CACHE_HOME"]))


@pytest.fixture
def with_package():
    """Runs an xgpt command with one more folder on the path, as if its package were installed."""

    def run(folder: Path, *arguments: object, cache: Path | None = None) -> str:
        path = [str(folder), str(SUPPORT / "measured_briefly"),
                *filter(None, [os.environ.get("PYTHONPATH")])]
        return command(*arguments, env={
            "PYTHONPATH": os.pathsep.join(path),
            **({} if cache is None else {"XDG_CACHE_HOME": str(cache)})})

    return run


@pytest.fixture
def within(monkeypatch):
    """The same in this process, which has forgotten the package afterwards."""
    before = {*sys.modules}

    def run(folder: Path, *arguments: object) -> str:
        if str(folder) not in sys.path:
            monkeypatch.syspath_prepend(str(folder))
            policies._rows.cache_clear()
        done = xgpt(*arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    yield run
    policies._rows.cache_clear()
    for name in {*sys.modules} - before:
        if name.startswith("toy_"):
            del sys.modules[name]


def command(*arguments: object, env: dict[str, str]) -> str:
    """What the command prints."""
    done = subprocess.run([*XGPT, *map(str, arguments)], capture_output=True, text=True,
                          env={**os.environ, **env}, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
