"""Operators are compiled beside the beginning of a run, and no longer than its command lasts."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jobs import job
from xgpt.app import compiling

# A compiler that says when it is at work, and never ends by itself.
SLOW = """#!/bin/sh
case "$1" in --version) echo slow 1; exit;; esac
while [ $# -gt 0 ]; do [ "$1" = -o ] && : > "$2" && : > "$AT_WORK"; shift; done
sleep 600
"""


@pytest.mark.parametrize(("cluster", "is_compiled"), [("local", True), ("a40-4", False)])
def test_operators_are_compiled_beside_the_beginning_of_a_run_on_this_machine(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cluster: str, is_compiled: bool) -> None:
    asked: list[Path] = []
    monkeypatch.setattr(compiling, "start_compiling", asked.append)
    monkeypatch.setattr(compiling, "cache_dir", lambda: tmp_path)
    compiling.begin_compiling(job(tmp_path, model="opt-125m", cluster=cluster))
    assert asked == [tmp_path / "native"] * is_compiled


@pytest.mark.parametrize(("end", "code"), [
    ("raise SystemExit(2)", 2), ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL)])
def test_a_command_that_ends_before_the_compiler_ends_it_and_leaves_no_file(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, code: int) -> None:
    compiler, at_work = tmp_path / "slow", tmp_path / "at_work"
    compiler.write_text(SLOW, encoding="utf-8")
    compiler.chmod(0o755)
    for name, value in (("CXX", str(compiler)), ("AT_WORK", str(at_work)), ("XGPT_NATIVE", ""),
                        ("XGPT_NATIVE_LEVELS", "all"), ("TMPDIR", str(tmp_path / "tmp"))):
        monkeypatch.setenv(name, value)
    (tmp_path / "tmp").mkdir()
    (tmp_path / "native").mkdir()
    command = f"""
import os
import signal
import time
from pathlib import Path
from xgpt.app.compiling import start_compiling
print(start_compiling(Path({str(tmp_path / "native")!r})).pid, flush=True)
while not Path({str(at_work)!r}).exists():
    time.sleep(0.01)
{end}
"""
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True,
                          timeout=60, check=False)
    assert done.returncode == code, done.stderr
    assert _are_gone(int(done.stdout)), "its compilers too"
    assert [path.suffix for path in (tmp_path / "native").iterdir()] == [".lock"]
    assert not list((tmp_path / "tmp").iterdir())


def test_one_that_is_not_interrupted_is_waited_for(tmp_path: Path,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/bin/false")
    process = compiling.start_compiling(tmp_path)
    assert process.wait(30) == 1
    compiling._end(process)  # what has ended already is nobody's
    assert process.returncode != -signal.SIGTERM


def _are_gone(group: int) -> bool:
    for _ in range(500):
        states = subprocess.run(["ps", "-o", "stat=", "-s", str(group)], capture_output=True,
                                text=True, check=False).stdout.split()
        if all(state.startswith("Z") for state in states):
            return True
        time.sleep(0.01)
    return False
