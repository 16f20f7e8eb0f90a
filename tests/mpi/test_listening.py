"""Nobody beyond this machine can talk to the ranks of a run on it, or to what starts them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from faults import ToyJob, await_lines, below
from job_folder import SUPPORT, read_lines
from listening import listens

from xgpt.launch import isolated
from xgpt.launch.launcher import LocalLauncher, RankProgram

pytestmark = pytest.mark.mpi
LOOPBACK = "0100007F"  # 127.0.0.1 as /proc/net/tcp has it


@pytest.fixture(autouse=True)
def ranks_find_the_script(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(
        [str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])]))
    for name in isolated.LOOPBACK:
        monkeypatch.delenv(name, raising=False)


def program(tmp_path: Path) -> RankProgram:
    return RankProgram(module="listening", argument=tmp_path / "seen.jsonl", count=2)


def may_isolate() -> bool:
    """Whether the system permits a network of one's own: asked of it, and not of what is tested."""
    code = ("import ctypes, fcntl, os, socket, struct\n"
            "if ctypes.CDLL(None).unshare(0x40000000 if os.getuid() == 0 else 0x50000000):\n"
            "    raise SystemExit(1)\n"
            "own = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
            "fcntl.ioctl(own, 0x8914, struct.pack('16sh14x', b'lo', 1))\n")
    return subprocess.run([sys.executable, "-c", code], check=False,
                          capture_output=True).returncode == 0


def test_ranks_are_in_a_network_of_their_own(tmp_path):
    if not may_isolate():
        pytest.skip("this system permits no network namespace")
    LocalLauncher().run(program(tmp_path), watch=lambda: None)
    ranks = read_lines(tmp_path / "seen.jsonl")
    assert len(ranks) == 2 and ranks[0]["namespace"] == ranks[1]["namespace"]
    assert ranks[0]["namespace"] != os.readlink("/proc/self/ns/net")
    assert ranks[0]["rank"], "the transport listens, on what is there"


def test_without_such_a_network_ranks_listen_on_loopback_alone(tmp_path):
    """The launcher's own port is bound to every interface (docs/security.md); the ranks inherit
    it."""
    refused = ("import sys; from xgpt.launch import isolated; "
               "isolated._is_permitted = lambda: False; isolated.main(sys.argv[1:])")
    command = LocalLauncher().command(program(tmp_path))
    started = command.index(isolated.__file__) + 1
    subprocess.run([sys.executable, "-c", refused, *command[started:]], check=True, timeout=100)
    ranks = read_lines(tmp_path / "seen.jsonl")
    assert len(ranks) == 2
    for rank in ranks:
        assert rank["namespace"] == os.readlink("/proc/self/ns/net")
        own = set(rank["rank"]) - set(rank["mpiexec"])
        assert own and all(address.startswith(LOOPBACK) for address in own), rank
        assert len(rank["mpiexec"]) == 1


def test_the_users_own_interface_counts(tmp_path, monkeypatch):
    monkeypatch.setenv("UCX_NET_DEVICES", "eth7")
    seen = subprocess.run([sys.executable, isolated.__file__, "sh", "-c",
                           "readlink /proc/self/ns/net; echo $UCX_NET_DEVICES"],
                          capture_output=True, text=True, check=True)
    assert seen.stdout.split() == [os.readlink("/proc/self/ns/net"), "eth7"]


@pytest.mark.slow
def test_a_single_rank_opens_no_port(tmp_path):
    job = ToyJob(folder=tmp_path, schedule="policy: rra, encode_batch: 6, decode_iterations: 4",
                 count=1500).write()
    process = job.start()
    assert await_lines(job, process, 1), process.communicate()
    [rank] = below(process.pid)["rank"]
    os.kill(rank, signal.SIGSTOP)
    ports = listens(str(rank)) + listens(str(process.pid))
    process.kill()
    process.communicate()
    assert not ports
