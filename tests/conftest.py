"""What every test may use: markers that skip visibly what a machine lacks, how two processes share
the tests, and profiles of toy models, which are measured once."""

import functools
import gc
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import examples
import pytest
from compiled import keep_compiled
from examples import one_in
from job_folder import SUPPORT, XGPT, MeasuredToy, write_job

# of every instruction set that this processor has, not only of the one that serves
os.environ.setdefault("XGPT_NATIVE_LEVELS", "all")
# toys' products are of thousands of sizes, each of which oneDNN compiles: 0.6 ms, 0.04 once it is
# kept, and it keeps 1,024 by itself
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "4096")
gc.disable()  # until all is collected: it would go through torch and the tests again and again

_STARTS_RANKS = ("tests/mpi/", "tests/gpu/", "tests/extending/", "tests/slurm/")
_WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))

if _WORKERS > 1:  # before numpy and torch load: each worker has its share of the cores
    os.environ.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // _WORKERS, 1)))
    # a thread that waits for its like sleeps: the other worker's tests need the core
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

if sys.dont_write_bytecode:  # the workers of this process too
    keep_compiled(Path(__file__).parents[1] / ".pytest_cache" / "compiled")

examples.register()


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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--one-in", type=int, default=1, metavar="N", help=(
        "of each test's cases the first and every N-th after it: what .ci/run takes of slow ones"))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
    # garbage of tests is not worth a look after every 700 objects, nor one through all that is kept
    # after every hundred of these
    gc.set_threshold(50_000, 10, 50)


@pytest.hookimpl(trylast=True)  # of what -m and -k leave
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept = one_in(config.option.one_in, items)
    config.hook.pytest_deselected(items=[*{*items} - {*kept}])
    items[:] = kept
    for item in items:
        if "browser" in item.keywords and not _chromium():
            item.add_marker(pytest.mark.skip(reason="no chromium on PATH"))
        if "slurm" in item.keywords and shutil.which("sbatch") is None:
            item.add_marker(pytest.mark.skip(reason="no Slurm (sbatch) on PATH"))
        if "gpu" in item.keywords and not _has_gpu():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """What runs a rank in this process gives torch that rank's threads: of more than one, toys'
    many small products would take ten times as long in every test that follows."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() > 1:
        torch.set_num_threads(1)


def _chromium() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((path for name in names if (path := shutil.which(name))), None)


def _has_gpu() -> bool:
    return shutil.which("nvidia-smi") is not None and subprocess.run(
        ["nvidia-smi", "-L"], capture_output=True, check=False).returncode == 0


@pytest.fixture(scope="session")
def xgpt_command():
    """The installed command, run by this interpreter."""
    return [sys.executable, "-c", "from xgpt.__main__ import main; main()"]


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """One profile cache for all runs: a toy's profile serves every job on it, and is measured
    briefly (kit/measured_briefly), for how good the plans are does not matter."""
    path = [str(SUPPORT / "measured_briefly"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "XDG_CACHE_HOME": str(_new_cache(tmp_path_factory.mktemp("cache"))),
            "PYTHONPATH": os.pathsep.join(path)}


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """(directory, transformers' model) of a family's toy, made when first asked for."""
    pytest.importorskip("torch", reason="runs need the extra `run`")
    import toys

    @functools.cache
    def make(family: str) -> tuple[Path, Any]:
        directory = tmp_path_factory.mktemp(family)
        return directory, toys.make_model(family, directory)

    return make


@pytest.fixture(scope="session")
def llama(made):
    return made("llama")


@pytest.fixture
def short_replays(monkeypatch):
    """A replay checks each plan: of 4,000 queries it takes longer than most of what is tested."""
    monkeypatch.setattr("xsimulator.replay.prediction.CHECKED_QUERIES", 1500)


@pytest.fixture(scope="session")
def measured_llama(tmp_path_factory, cache):
    """Measured once, for the tests of what is measured; `cache` holds a copy for all others. It
    sees its sizes more often until it is stopped, and goes on briefly."""
    folder = tmp_path_factory.mktemp("measured")
    own = _new_cache(tmp_path_factory.mktemp("own-cache"))
    job, target = _toy_job(folder, "llama", ranks=2), folder / "profile.json"
    environment = {**cache, "XDG_CACHE_HOME": str(own)}
    stopped = _stopped_profile(job, own, {**environment, "MOST_STEPS": "40"})
    for kept in _profiles_in(own):
        shutil.copy(kept, folder / "kept.json")
    done = subprocess.run(
        [*XGPT, "profile", str(job), "--tp", "1,2,3", "--out", str(target)],
        capture_output=True, text=True, timeout=200, check=False, env=environment)
    shutil.copytree(own / "xgpt" / "profiles", Path(cache["XDG_CACHE_HOME"], "xgpt", "profiles"),
                    dirs_exist_ok=True)
    return MeasuredToy(job=job, profile=target, cache=own, done=done, stopped=stopped,
                       kept=folder / "kept.json")


@pytest.fixture(scope="session")
def profiled(tmp_path_factory, cache, request):
    """`cache`, with the least profile there is of a family's toy on so many ranks."""

    @functools.cache
    def measure(family: str, ranks: int = 2) -> None:
        if (family, ranks) == ("llama", 2):
            done = request.getfixturevalue("measured_llama").done
        else:
            job = _toy_job(tmp_path_factory.mktemp(f"profile-{family}"), family, ranks=ranks)
            done = subprocess.run([*XGPT, "profile", str(job)], env=cache,
                                  capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr

    def with_profile(family: str, ranks: int = 2) -> dict[str, str]:
        measure(family, ranks)
        return cache

    return with_profile


def _new_cache(folder: Path) -> Path:
    """Without profiles, but with this machine's compiled operators: what they are compiled of is
    in their names."""
    from xrunner.checkpoint.source import cache_dir

    compiled = cache_dir() / "native"
    compiled.mkdir(parents=True, exist_ok=True)
    (folder / "xgpt").mkdir()
    (folder / "xgpt" / "native").symlink_to(compiled)
    return folder


def _profiles_in(cache: Path) -> list[Path]:
    return [*cache.glob("xgpt/profiles/*.json")]


def _stopped_profile(job: Path, cache: Path, environment: dict[str, str],
                     ) -> subprocess.CompletedProcess[str]:
    """A measurement that is interrupted as soon as something of it is kept."""
    command = [*XGPT, "profile", str(job), "--tp", "1,2"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline and not _profiles_in(cache):
        time.sleep(0.1)  # the first save comes with the first points
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    return subprocess.CompletedProcess(command, process.returncode, stderr=said)


def _toy_job(folder: Path, family: str, *, ranks: int) -> Path:
    """A job as the tests' own, for its profile alone."""
    import toys  # torch, which the core's own tests do without

    toys.make_model(family, folder / "model")
    return write_job(folder, folder / "model", [{"id": "q", "tokens": [7, 8, 9]}],
                     schedule="policy: rra", ranks=ranks)
