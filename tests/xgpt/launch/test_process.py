"""Commands whose end is known, whoever started this process, and errors of a machine in words."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from faults import TOGETHER_S, alive, wait

from xgpt.core.troubles import in_words
from xgpt.launch import isolated, process
from xgpt.launch.own_modules import own_modules
from xgpt.launch.process import RanksFailed, run_watched

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


def test_an_end_is_known_where_the_starter_ignored_the_ends_of_children() -> None:
    def ignore() -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)

    done = subprocess.run([sys.executable, "-c", _IGNORED], preexec_fn=ignore, text=True,
                          capture_output=True, check=True)
    assert "the ranks failed (exit code 3)" in done.stdout


@pytest.mark.parametrize("ends", ["kill -BUS $$", "exit 15"])  # the first rank's, or all ranks'
def test_too_little_shared_memory_is_told_where_ranks_fail(
        ends: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_room_bytes", lambda folder: 65536)
    with pytest.raises(RanksFailed, match=r"0\.1 MB of room: .* set by `--shm-size`"):
        run_watched(["sh", "-c", ends], watch=lambda: None, ask_to_stop=None)


def test_too_few_descriptors_are_told_where_ranks_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """MPICH ends with words of its own, or with none."""
    ends = ["sh", "-c", "echo UCX failed; exit 255"]
    with pytest.raises(RanksFailed) as enough:
        run_watched(ends, watch=lambda: None, ask_to_stop=None)
    monkeypatch.setattr(process.resource, "getrlimit", lambda which: (24, 4096))
    with pytest.raises(RanksFailed, match="UCX failed\nA process may open 24 files here"):
        run_watched(ends, watch=lambda: None, ask_to_stop=None)
    assert "ulimit" not in str(enough.value)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_descriptors_that_ran_out_are_told_in_words(number: int) -> None:
    said = in_words(OSError(number, os.strerror(number)), Path("/out"))
    assert said is not None and "`ulimit -n`" in said and "the same command goes on" in said


def test_modules_in_the_folder_that_it_is_called_in_are_not_those_of_ranks(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's `random.py` beside his prompts is no part of Python."""
    for name in ("random", "torch", "xgpt"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('{name} of the user')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["/usr/bin", *sys.path])  # as of the installed command
    with pytest.raises(RanksFailed, match="random of the user"):  # what is named itself is
        run_watched([sys.executable, "random.py"], watch=lambda: None, ask_to_stop=None)
    run_watched([sys.executable, "-m", "random"], watch=lambda: None, ask_to_stop=None)


def test_sources_that_are_not_installed_are_found_by_ranks(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_the_launcher_of_ranks_ends_with_who_started_it() -> None:
    """Ranks that are about to meet hear of nothing else."""
    starts = ("import subprocess, sys; p = subprocess.Popen(sys.argv[1:]); "
              "print(p.pid, flush=True); p.wait()")
    command = [sys.executable, "-I", "-S", isolated.__file__, "sleep", "100"]
    with subprocess.Popen([sys.executable, "-c", starts, *command], stdout=subprocess.PIPE,
                          text=True) as parent:
        assert parent.stdout is not None
        own = int(parent.stdout.readline())
        wait(lambda: Path(f"/proc/{own}/comm").read_text() == "sleep\n", "it is the command")
        parent.kill()
        wait(lambda: not alive([own]), "it ends", TOGETHER_S)
