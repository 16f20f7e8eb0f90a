"""Commands whose end is known, whoever started this process, and errors of a machine in words."""

import mmap
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from itertools import count
from pathlib import Path

import pytest
from faults import TOGETHER_S, alive, wait

from xgpt.core.errors import StoppedEarly
from xgpt.core.system import machine
from xgpt.core.system.machine import Contention
from xgpt.launch import isolated, process
from xgpt.launch.leftovers import remove_leftovers, scratch_folder
from xgpt.launch.process import RanksFailed, own_modules, run_watched, start, watch_to_end
from xgpt.launch.rank_watch import RankWatch
from xgpt.launch.stop_signals import stopping_in_order

# Whoever ignores SIGCHLD hands that on, and the system keeps no child's end for such a process.
_IGNORED = """
import signal
from xgpt.launch.process import RanksFailed, run_watched
assert signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN
try:
    run_watched(["sh", "-c", "sleep 0.3; exit 3"], watch=lambda: None, ask_to_stop=None)
except RanksFailed as failed:
    print(failed)
"""

def test_an_end_is_known_where_the_starter_ignored_the_ends_of_children():
    def ignore() -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)

    done = subprocess.run([sys.executable, "-c", _IGNORED], preexec_fn=ignore, text=True,
                          capture_output=True, check=True)
    assert "the ranks failed (exit code 3)" in done.stdout


@pytest.mark.parametrize("ends", ["kill -BUS $$", "exit 15"])  # the first rank's, or all ranks'
def test_too_little_shared_memory_is_told_where_ranks_fail(ends, monkeypatch):
    monkeypatch.setattr(process, "_room_bytes", lambda folder: 65536)
    with pytest.raises(RanksFailed, match=r"0\.1 MB of room: .* set by `--shm-size`"):
        run_watched(["sh", "-c", ends], watch=lambda: None, ask_to_stop=None)


def test_too_few_descriptors_are_told_where_ranks_fail(monkeypatch):
    """MPICH ends with words of its own, or with none."""
    ends = ["sh", "-c", "echo UCX failed; exit 255"]
    with pytest.raises(RanksFailed) as enough:
        run_watched(ends, watch=lambda: None, ask_to_stop=None)
    monkeypatch.setattr(process.resource, "getrlimit", lambda which: (24, 4096))
    with pytest.raises(RanksFailed, match="UCX failed\nA process may open 24 files here"):
        run_watched(ends, watch=lambda: None, ask_to_stop=None)
    assert "ulimit" not in str(enough.value)


def test_modules_in_the_folder_that_it_is_called_in_are_not_those_of_ranks(tmp_path, monkeypatch):
    """A user's `random.py` beside his prompts is no part of Python."""
    for name in ("random", "torch", "xgpt"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('{name} of the user')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["/usr/bin", *sys.path])  # as of the installed command
    with pytest.raises(RanksFailed, match="random of the user"):  # what is named itself is
        run_watched([sys.executable, "random.py"], watch=lambda: None, ask_to_stop=None)
    run_watched([sys.executable, "-m", "random"], watch=lambda: None, ask_to_stop=None)


def test_sources_that_are_not_installed_are_found_by_ranks(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    root = str(Path(process.__file__).resolve().parents[2])
    monkeypatch.chdir(root)
    for first, expected in (("", root), (root, root), ("/usr/bin", None)):
        monkeypatch.setattr(sys, "path", [first, *sys.path[1:]])
        assert own_modules().get("PYTHONPATH") == expected
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path[1:]])
    assert own_modules() == {"PYTHONSAFEPATH": "1"}


@pytest.mark.skipif(sys.platform != "linux", reason="Linux ends processes so")
def test_the_launcher_of_ranks_ends_with_who_started_it():
    """Ranks that are about to meet hear of nothing else."""
    starts = ("import subprocess, sys; p = subprocess.Popen(sys.argv[1:]); "
              "print(p.pid, flush=True); p.wait()")
    command = [sys.executable, "-I", "-S", isolated.__file__, "sleep", "100"]
    with subprocess.Popen([sys.executable, "-c", starts, *command], stdout=subprocess.PIPE,
                          text=True) as parent:
        own = int(parent.stdout.readline())
        wait(lambda: Path(f"/proc/{own}/comm").read_text() == "sleep\n", "it is the command")
        parent.kill()
        wait(lambda: not alive([own]), "it ends", TOGETHER_S)


RANKS = [sys.executable, "-c", "import time; time.sleep(60)"]


def test_what_a_signal_raises_is_raised_before_ranks_start_and_ends_those_there():
    with pytest.raises(StoppedEarly, match="SIGTERM came while no ranks"), stopping_in_order():
        with suppress(BaseException):  # as torch's import does
            os.kill(os.getpid(), signal.SIGTERM)
        start(RANKS)
        pytest.fail("they were started")
    ranks = start(RANKS)
    with pytest.raises(StoppedEarly), stopping_in_order():
        with suppress(BaseException):
            os.kill(os.getpid(), signal.SIGTERM)
        watch_to_end(ranks, watch=lambda: None, ask_to_stop=None)
    assert ranks.process.wait(10) != 0


_STOPPED_IN_EXEC = """
import os, signal, sys
from xgpt.core.errors import StoppedEarly
from xgpt.launch.stop_signals import stopping_in_order
try:
    with stopping_in_order(ends_process=True):
        exec("os.kill(os.getpid(), signal.SIGINT)")
except StoppedEarly as stopped:
    sys.exit(stopped.exit_code)
"""

def test_a_signal_during_the_exec_of_text_leaves_the_exit_code(tmp_path):
    (tmp_path / "stopped.py").write_text(_STOPPED_IN_EXEC)
    done = subprocess.run([sys.executable, "-m", "stopped"], cwd=tmp_path)
    assert done.returncode == StoppedEarly.exit_code


def write_stat(path: Path, busy_ticks: int) -> None:
    path.write_text(f"cpu {busy_ticks} 0 0 123456 7 0 0 0 0 0\ncpu0 1 2 3\n")


def test_what_is_neither_idle_nor_ours_is_others(tmp_path, monkeypatch):
    stat, ticks, cores = tmp_path / "stat", os.sysconf("SC_CLK_TCK"), os.cpu_count() or 1
    clock, own = iter([100.0, 110.0]), iter([5.0, 5.0 + 4.0])
    with monkeypatch.context() as patch:
        patch.setattr(machine.time, "monotonic", lambda: next(clock))
        patch.setattr(machine, "_own_s", lambda: next(own))
        write_stat(stat, 1000 * ticks)
        meter = Contention(stat)
        write_stat(stat, 1010 * ticks)  # ten busy seconds, four of them ours, in ten seconds
        assert meter.others_share() == pytest.approx(6 / 10 / cores)
    assert Contention(tmp_path / "none").others_share() is None
    write_stat(stat, 50)
    meter = Contention(stat)
    sum(range(200_000))
    assert meter.others_share() == 0, "never less than nothing"


@pytest.mark.parametrize("kind", ["mpich_shm", "vllm_dist", "deepspeed_allreduce_buffer"])
def test_only_what_nobody_has_is_removed(tmp_path, kind):
    files = {name: tmp_path / f"{kind}_{name}_0" for name in ("left", "mapped", "young")}
    for path in (*files.values(), tmp_path / "of_another_program"):
        path.write_bytes(bytes(4096))
        if path != files["young"]:
            os.utime(path, (1e9, 1e9))
    with files["mapped"].open("r+b") as file, mmap.mmap(file.fileno(), 4096):
        assert remove_leftovers(tmp_path) == [files["left"]]
    assert {path.name for path in tmp_path.iterdir()} == {
        f"{kind}_mapped_0", f"{kind}_young_0", "of_another_program"}


def test_what_mpiexec_wrote_of_the_machine_goes_once_it_is_dead(tmp_path):
    left, living = (tmp_path / f"hydra_hwloc_xmlfile_{name}" for name in ("left", "living"))
    left.touch()
    with living.open("w"):
        assert remove_leftovers(tmp_path) == [left]


def test_folders_go_with_what_is_raised_and_those_of_killed_processes_are_removed(tmp_path):
    with pytest.raises(KeyError), scratch_folder("ours-", tmp_path) as folder:
        (folder / "file").touch()
        raise KeyError
    assert not list(tmp_path.iterdir())
    program = f"""
import os, signal
from pathlib import Path
from xgpt.launch.leftovers import scratch_folder
with scratch_folder("ours-", Path({str(tmp_path)!r})) as folder:
    (folder / "request").write_text("words")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run([sys.executable, "-c", program], check=False, timeout=60)
    (left,) = tmp_path.iterdir()
    assert killed.returncode == -signal.SIGKILL and (left / "request").is_file()
    with scratch_folder("ours-", tmp_path):
        assert left.is_dir(), "young: it may be of a process that has not locked it yet"
    with scratch_folder("ours-", tmp_path) as living:
        for path in (left, living):
            os.utime(path, (1e9, 1e9))
        (tmp_path / "theirs").mkdir()
        with scratch_folder("ours-", tmp_path) as mine:
            assert {path.name for path in tmp_path.iterdir()} == {
                living.name, mine.name, "theirs"}
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux tells of processes so")
LOOKS = 60  # more than after which a rank is given up
SHELL = os.path.realpath("/bin/sh")
HOST = socket.gethostname()


@contextmanager
def launcher(script: str) -> Iterator[subprocess.Popen[str]]:
    """A shell at work in the place of mpiexec."""
    process = subprocess.Popen(["/bin/sh", "-c", f"{script}\nread end"], stdin=subprocess.PIPE,
                               text=True, start_new_session=True)
    try:
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def first_end(process: subprocess.Popen[str]) -> RankWatch:
    """Of two ranks; a look takes a tenth of a second of its clock."""
    return RankWatch(process.pid, 2, now=count(step=0.1).__next__)


def looked(end: RankWatch, until: int = LOOKS) -> str | None:
    """What so many looks find, which are otherwise a tenth of a second apart."""
    for _ in range(until):
        if (gone := end.look()) is not None:
            return gone
    return None


def children_of(process: subprocess.Popen[str]) -> list[str]:
    return Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()


def children(process: subprocess.Popen[str], number: int) -> None:
    """Once there are so many, each what the shell starts, and no longer a shell."""
    def are_there() -> bool:
        with suppress(OSError):
            programs = [os.readlink(f"/proc/{child}/exe") for child in children_of(process)]
            return len(programs) == number and SHELL not in programs
        return False

    wait(are_there, f"{number} children")


def test_ranks_that_could_not_be_started_are_not_waited_for_and_late_ones_found():
    with launcher("PMI_RANK=0 sleep 100 & kid=$!; read go; kill $kid; wait $kid") as process, (
            closing(first_end(process))) as end:
        children(process, 1)
        assert end.look() is None and len(end._found) == 1
        process.stdin.write("\n")
        process.stdin.flush()
        children(process, 0)
        assert looked(end) == f"rank 1 on {HOST}"
    with launcher("PMI_RANK=0 sleep 100 & read go; PMI_RANK=1 sleep 100 &") as process, (
            closing(first_end(process))) as end:
        children(process, 1)
        assert looked(end, 20) is None and len(end._found) == 1
        process.stdin.write("\n")
        process.stdin.flush()
        children(process, 2)
        assert looked(end) is None and len(end._found) == 2


@pytest.mark.parametrize(("name", "is_known"), [
    ("hydra_pmi_proxy", True), ("mpiexec.hydra", True), ("other", False)])
def test_a_launcher_that_could_start_none_is_not_waited_for(name, is_known, tmp_path):
    """Another's ranks may be anywhere."""
    for own in ("hydra_pmi_proxy", name):
        shutil.copy(shutil.which("sleep") or "", tmp_path / own)
    with launcher(f"{tmp_path / name} 100 &") as process, (
            closing(first_end(process))) as end:
        children(process, 1)
        assert looked(end, 250) is None
        assert looked(end) == (f"rank 0 on {HOST}" if is_known else None)
