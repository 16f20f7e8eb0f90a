"""A process that has more threads than it began with forks no ranks: these would lack them. Nor
does one to which a descriptor of theirs has not come, or that may not fork; these are started then.
Nor does it stay for ranks that cannot be forks: of another mpiexec than MPICH's."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch", reason="the runner needs the extra `run`")

from xgpt.core import stand_in  # noqa: E402
from xrunner import forks  # noqa: E402
from xrunner.loading import Shelf  # noqa: E402

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks are forks on Linux alone")


ALL = 1 + 2 + 4  # over which is answered, namespaces, its own


def heard_of(tmp_path: Path, arrive: int, *, num_threads: int = 999) -> bytes:
    """What a stand-in hears of which so many descriptors arrive, from a process that forks; which
    has ended then, and kept none of them."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line, _other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    word = json.dumps({"argument": str(tmp_path / "run.json"), "count": 1, "asks": True,
                       "files": [0, 1, 2, 9]})
    with ours, line, _other:
        with its:
            given = [os.dup(its.fileno()) for _ in range(arrive)]
        assert forks.Forks(line, Shelf(), num_threads=num_threads).serve(word, given) == 0
        said = ours.recv(64)
        assert not said or ours.recv(64) == b"", "it keeps nothing"
    return said


def test_who_has_computed_with_several_threads_refuses(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("it forked"))
    assert heard_of(tmp_path, ALL, num_threads=0) == forks.REFUSED


@pytest.mark.parametrize("arrive", [ALL - 1, 1, 0])
def test_who_lacks_room_for_all_descriptors_refuses(
        arrive: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system hands over as many as a process may yet open, and no more."""
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("it forked"))
    assert heard_of(tmp_path, arrive) == (forks.REFUSED if arrive else b"")


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.ENOMEM])
def test_who_cannot_fork_refuses_and_goes_on(number: int, tmp_path: Path,
                                             monkeypatch: pytest.MonkeyPatch) -> None:
    def fork() -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fork", fork)
    monkeypatch.setattr(forks, "load_plan", lambda path: SimpleNamespace(device_kind="cpu"))
    assert heard_of(tmp_path, ALL) == forks.REFUSED


@pytest.mark.parametrize("case", ["its folder is gone", "its word is too long"])
def test_a_stand_in_asks_or_says_that_it_does_not(case: str, tmp_path: Path) -> None:
    is_long = case == "its word is too long"
    line, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    (folder := tmp_path / "gone").mkdir()
    done = tmp_path / "done"
    command = [sys.executable, "-I", "-S", stand_in.__file__, str(its.fileno()), "1", "/bin/sh",
               "-c", f"echo done > {done}"]
    with line, its:
        rank = subprocess.Popen(
            ["/bin/sh", "-c", 'rmdir "$PWD"; exec "$@"', "sh", *command], cwd=folder,
            pass_fds=[its.fileno()], env={**os.environ, "PMI_FD": "0", **(
                {"ONE": "x" * 2**16, "OTHER": "x" * 2**16} if is_long else {})})
        word, files, *_ = socket.recv_fds(line, forks.MOST_BYTES, forks.MOST_FILES)
        asked = json.loads(word.partition(b"\0")[2])
        assert asked["asks"] is not is_long and asked["folder"] is None
        assert len(files) == (1 if is_long else 3 + len(asked["files"]))
        os.write(files[0], forks.REFUSED)
        for file in files:
            os.close(file)
        assert rank.wait(60) == 0
    assert done.read_text() == "done\n"


def test_it_ends_where_no_rank_asks_and_these_become_their_commands(tmp_path: Path) -> None:
    shelf, done = Shelf(), tmp_path / "done"
    shelf.put("weights", None)  # type: ignore[arg-type]
    line, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environ = {name: value for name, value in os.environ.items() if name != "PMI_FD"}
    with line, its:
        ranks = [subprocess.Popen(
            [sys.executable, "-I", "-S", stand_in.__file__, str(its.fileno()), "2", "/bin/sh",
             "-c", f"echo done >> {done}"], pass_fds=[its.fileno()], env=environ)
            for _ in range(2)]
        word, files, *_ = socket.recv_fds(line, forks.MOST_BYTES, forks.MOST_FILES)
        module, _, argument = word.decode().partition("\0")
        assert module == forks.NAME
        assert forks.Forks(line, shelf, num_threads=99).serve(argument, files) == 0
        assert [rank.wait(60) for rank in ranks] == [0, 0]
    assert done.read_text() == "done\ndone\n" and shelf.is_empty


@pytest.mark.parametrize("number", [0, 3, -9])
@pytest.mark.parametrize("is_told", [True, False])
def test_a_stand_in_whose_rank_has_ended_needs_nobody_to_say_so(
        number: int, is_told: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who forked it may have been stopped, and mpiexec then waited for ever."""
    monkeypatch.setattr(stand_in, "_SILENT_S", 600 if is_told else 0.01)
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, its, subprocess.Popen([sys.executable, "-c", "import os, sys; number = int(sys.argv["
                                      "1]); os.kill(os.getpid(), -number) if number < 0 else "
                                      "sys.exit(number)", str(number)]) as rank:
        if is_told:
            its.send(b"ended 7")
        said = stand_in._seen_to_end(rank.pid, ours)
        if is_told:
            assert (said, ours.recv(64)) == (b"", b"ended 7")
        else:
            assert said == b"ended " + str(256 * number if number >= 0 else -number).encode()
        assert rank.wait() == number
        assert is_told or stand_in._seen_to_end(rank.pid, ours) == b"", "it is no more"
