"""One run at a time in an output folder, even after its launcher was killed."""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import pytest

from xgpt.core.errors import XgptError
from xrunner.files.heartbeat import HEARTBEATS, Heartbeat, read_heartbeats
from xrunner.files.lock import is_locked, output_lock


def test_a_second_run_is_refused_until_the_first_and_its_children_are_gone(tmp_path):
    with output_lock(tmp_path) as descriptor:
        with pytest.raises(XgptError, match="another run"), output_lock(tmp_path):
            pass
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE,
                                 pass_fds=(descriptor,))
    with pytest.raises(XgptError, match="another run"), output_lock(tmp_path):
        pass
    child.communicate(b"\n", timeout=30)
    with output_lock(tmp_path):
        pass


_NO_FLOCK = {"none": "return 0;", "refused": "errno = ENOLCK; return -1;"}
_HOLDS = """
import sys
from pathlib import Path
from xrunner.files.lock import is_locked, output_lock
with output_lock(Path(sys.argv[1])):
    print("held", is_locked(Path(sys.argv[1])), flush=True)
    input()
"""


@pytest.fixture(params=sorted(_NO_FLOCK))
def shim(request, tmp_path):
    """The system's locks as on file systems that do not carry them from one host to another: each
    host has its own (as if there were none), or all are refused."""
    if shutil.which("cc") is None or subprocess.run(
            ["unshare", "--uts", "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs a C compiler, and rights to give a process another host's name")
    source, library = tmp_path / "flock.c", tmp_path / "flock.so"
    source.write_text("#include <errno.h>\nint flock(int file, int how) { (void)file; (void)how; "
                      + _NO_FLOCK[request.param] + " }\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    return library


@contextmanager
def on_host(name: str, folder: Path, shim: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that takes the folder's lock, by another host's name."""
    with subprocess.Popen(
            ["unshare", "--uts", "sh", "-c", f'hostname {name} && exec "$@"', "sh",
             sys.executable, "-c", _HOLDS, str(folder)], text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={**os.environ, "LD_PRELOAD": str(shim)}) as process:
        try:
            yield process
        finally:
            process.kill()


def test_two_hosts_without_locks_between_them_do_not_share_a_folder(shim, tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    with on_host("node-a", folder, shim) as first:
        assert first.stdout is not None and first.stdout.readline() == "held True\n"
        with on_host("node-b", folder, shim) as second:
            told = second.communicate(timeout=60)[1]
            assert second.returncode == 1 and "another run is writing there" in told
            assert f"(process {first.pid} on node-a)" in told
        first.kill()
        first.wait()
    path = folder / ".owner.json"
    with on_host("node-b", folder, shim) as second:  # whose end on another host nobody can see
        assert "node-a" in second.communicate(timeout=60)[1]
    os.utime(path, (path.stat().st_mtime - 61,) * 2)
    with on_host("node-b", folder, shim) as second:
        assert second.stdout is not None and second.stdout.readline() == "held True\n"
        assert json.loads(path.read_text())["host"] == "node-b"
        assert second.communicate("\n", timeout=60)[1] == "" and second.returncode == 0
    assert not path.exists()


def owner(folder: Path, **values: object) -> Path:
    path = folder / ".owner.json"
    path.write_text(json.dumps({"host": "elsewhere", "boot": "b", "pid": 1, "started": "1",
                                **values}))
    return path


def test_another_hosts_run_is_seen_by_its_file_until_it_is_silent(tmp_path):
    """As on a file system whose locks do not reach other hosts."""
    (tmp_path / ".lock").touch()
    path = owner(tmp_path)
    assert is_locked(tmp_path)
    with pytest.raises(XgptError, match=r"process 1 on elsewhere.*free 60 s after"), output_lock(
            tmp_path):
        pass
    os.utime(path, (path.stat().st_mtime - 61,) * 2)
    assert is_locked(tmp_path) is False
    with output_lock(tmp_path):
        assert json.loads(path.read_text())["pid"] == os.getpid()
        assert is_locked(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == [".lock"]


def test_what_a_dead_process_of_this_host_left_is_taken_over_at_once(tmp_path):
    with output_lock(tmp_path):
        mine = json.loads((tmp_path / ".owner.json").read_text())
    child = subprocess.Popen(["true"])
    child.wait()
    owner(tmp_path, **{**mine, "pid": child.pid})
    assert is_locked(tmp_path) is False
    owner(tmp_path, **{**mine, "started": "1"})  # its number is another process's by now
    with output_lock(tmp_path):
        pass


def test_a_rank_tells_its_state_about_once_a_second(tmp_path):
    heartbeat = Heartbeat(tmp_path, rank=1, stage=0, pool="all")
    heartbeat(2.0, 1.0, 5)
    first = read_heartbeats(tmp_path)
    assert [(s.rank, s.recent_share, s.queries) for s in first] == [(1, 0.5, 5)]
    heartbeat(2.9, 1.9, 6)
    assert read_heartbeats(tmp_path) == first, "too soon"
    heartbeat(4.0, 2.5, 7)
    (state,) = read_heartbeats(tmp_path)
    assert (state.recent_share, state.busy_s, state.queries) == (0.75, 2.5, 7)
    heartbeat(0.5, 0.25, 2)  # its clock is restarted
    (state,) = read_heartbeats(tmp_path)
    assert (state.recent_share, state.queries) == (0.5, 2)


def test_a_rank_tells_where_it_runs_and_what_it_is_at(tmp_path, monkeypatch):
    now_s = [100.0]
    monkeypatch.setattr("xrunner.files.heartbeat.time.monotonic", lambda: now_s[0])
    heartbeat = Heartbeat(tmp_path, rank=1, stage=0, pool="all", replica=1, devices="GPU 3")
    heartbeat.note = "loading vLLM, at most 30 min"
    heartbeat(2.0, 1.0, 5)
    (state,) = read_heartbeats(tmp_path)
    assert (state.node, state.devices) == (socket.gethostname().partition(".")[0], "GPU 3")
    assert state.doing == "while loading vLLM, at most 30 min" and state.tokens_per_s == 0
    heartbeat.note, heartbeat.restarts, heartbeat.waiting = "", 2, 7
    for now_s[0], heartbeat.output_tokens in ((110.0, 100), (112.0, 500)):
        heartbeat(now_s[0], 1.0, 5)
    (state,) = read_heartbeats(tmp_path)
    assert (state.restarts, state.waiting, state.tokens_per_s) == (2, 7, 41.7)
    assert state.doing == "after the order to load its weights"
    old = {key: value for key, value in asdict(state).items() if key not in (
        "node", "devices", "waiting", "tokens_per_s", "restarts", "note")}
    (tmp_path / HEARTBEATS / "1.json").write_text(json.dumps(old))
    assert read_heartbeats(tmp_path)[0].node == "", "an older version's file"


def test_ranks_come_in_their_order_and_half_a_file_is_left_out(tmp_path):
    for rank in (10, 2, 0):
        Heartbeat(tmp_path, rank=rank, stage=rank, pool="all")(1.0, 1.0, 0)
    (tmp_path / HEARTBEATS / "3.json").write_text('{"rank": 3')
    assert [state.rank for state in read_heartbeats(tmp_path)] == [0, 2, 10]
    assert read_heartbeats(tmp_path / "elsewhere") == []


def test_a_folder_that_cannot_be_written_to_does_not_end_a_run(tmp_path):
    (tmp_path / HEARTBEATS).write_text("a file in its place")
    Heartbeat(tmp_path, rank=0, stage=0, pool="all")(1.0, 1.0, 0)
