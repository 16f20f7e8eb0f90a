"""The process that holds a rank's engine, as the rank sees it, by scripts that stand in for it, and
the devices of a replica."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from faults import wait

from xgpt.core.errors import XgptError
from xrunner.backends.vllm import child as child_of
from xrunner.backends.vllm import devices
from xrunner.backends.vllm.child import EngineChild
from xrunner.backends.vllm.devices import own_devices
from xrunner.backends.vllm.protocol import Load, Step
from xrunner.engine.pipeline import ExecutorDied

STAND_IN = """
import json, os, sys, time
from multiprocessing.connection import Connection
from xrunner.backends.vllm import protocol
from xrunner.backends.vllm.protocol import Failed, Load, Loaded, Step, Tokens
mode = os.environ["STAND_IN"]
rank = Connection(int(sys.argv[1]))
rank.send(protocol.VERSION + (mode == "strange"))
files = {int(name): os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")
         if os.path.exists(f"/proc/self/fd/{name}")}
print(json.dumps({"files": files, "names": sorted(os.environ), "cores": [
    *os.sched_getaffinity(0)], "threads": os.environ.get("OMP_NUM_THREADS")}), flush=True)
number = 0
while True:
    asked = rank.recv()
    if isinstance(asked, Step):  # answered where it is finished
        continue
    number += 1
    if isinstance(asked, Load):
        if mode == "dies loading":
            os._exit(3)
        rank.send(Failed("no such model", is_final=True) if mode == "refuses" else Loaded(64, 128))
        continue
    if number > 4:
        if mode == "dies":
            os.kill(os.getpid(), 9)
        if mode == "fails":
            rank.send(Failed("out of memory"))
        if mode == "hangs":
            time.sleep(600)
    rank.send(Tokens.of({}))
"""


@pytest.fixture
def started(tmp_path, monkeypatch):
    """A function that starts a stand-in which behaves so; what is left is ended."""
    script, made = tmp_path / "stand_in.py", list[EngineChild]()
    script.write_text(STAND_IN)
    monkeypatch.setattr(child_of, "command_of", lambda python, module: [python, str(script)])
    monkeypatch.setenv("PYTHONPATH", str(Path(child_of.__file__).parents[3]))

    def start(mode: str, **options: Any) -> EngineChild:
        monkeypatch.setenv("STAND_IN", mode)
        made.append(EngineChild(sys.executable, tmp_path / "engine.log", **options))
        made[-1].load(Load({}, {}))
        return made[-1]

    yield start
    for child in made:
        child.kill()


def steps(child: EngineChild, count: int) -> None:
    for _ in range(count):
        assert child.step(Step([("a", 1)])) == {}


@pytest.mark.parametrize(("mode", "why"), [
    ("dies", "ended by signal 9"), ("fails", "failed: out of memory"),
    ("hangs", "gave no answer for")])
def test_an_engine_that_dies_is_told_of_and_starts_again(started, monkeypatch, mode, why):
    monkeypatch.setattr(child_of, "FIRST_STEP_S", 20.0)
    child = started(mode, step_limit_s=2.0 if mode == "hangs" else 20.0)
    assert child.await_ready() and child.loaded.max_pass == 64
    steps(child, 3)
    with pytest.raises(ExecutorDied, match=why):
        steps(child, 1)
    assert not child.await_ready(0.0)
    with pytest.raises(ExecutorDied, match="has ended"):
        steps(child, 1)
    child.load(Load({}, {}))
    assert child.await_ready()
    steps(child, 3)


def test_one_that_cannot_load_says_why(started):
    with pytest.raises(ExecutorDied, match="ended with exit code 3"):
        started("dies loading").await_ready()
    with pytest.raises(XgptError, match="no such model"):
        started("refuses").await_ready()
    with pytest.raises(XgptError, match="speaks version"):
        started("strange").await_ready()


def test_it_inherits_its_socket_and_log_alone_and_is_in_no_job(started, tmp_path, monkeypatch):
    for name in ("PMI_RANK", "SLURM_JOB_ID", "OMPI_COMM_WORLD_RANK", "VLLM_PORT"):
        monkeypatch.setenv(name, "1")
    reading, writing = os.pipe()
    os.set_inheritable(writing, True)
    child = started("well")
    assert child.await_ready()
    told = json.loads((tmp_path / "engine.log").read_text())
    files = {name: file for name, file in told["files"].items() if not file.startswith("/proc/")}
    assert files.pop("0") == "/dev/null"
    assert files.pop("1") == files.pop("2") == str(tmp_path / "engine.log")
    assert [file.startswith("socket:") for file in files.values()] == [True], files
    assert not [name for name in told["names"] if name.startswith(("PMI", "SLURM_", "OMPI_"))]
    assert "VLLM_PORT" not in told["names"] and "CUDA_VISIBLE_DEVICES" in told["names"]
    child.close()
    os.close(reading)
    os.close(writing)


def test_the_real_process_ends_with_its_rank(tmp_path):
    """However the rank ends."""
    script = tmp_path / "rank.py"
    script.write_text(f"""
import sys, time
from pathlib import Path
from xrunner.backends.vllm.child import EngineChild
child = EngineChild(sys.executable, Path({str(tmp_path / "log")!r}))
child.start()
print(child._process.pid, flush=True)
child._has_come(60)
print("greeted", flush=True)
time.sleep(600)
""")
    rank = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env={
        **os.environ, "PYTHONPATH": str(Path(child_of.__file__).parents[3])})
    assert rank.stdout is not None
    pid = int(rank.stdout.readline())
    assert rank.stdout.readline() == "greeted\n"
    rank.kill()
    rank.communicate()
    wait(lambda: not Path(f"/proc/{pid}").exists() or "Z" in Path(
        f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0], "the engine ends", 30)


def shared(monkeypatch: Any, seen: list[tuple[str, list[tuple[str, str]]]], count: int,
           kind: str = "gpu") -> list[Any]:
    """The devices of each rank, by its host and those visible there; an error in words."""
    words = [json.dumps(one) for one in seen]
    found = list[Any]()
    for rank, (host, visible) in enumerate(seen):
        monkeypatch.setattr(devices, "visible_gpus", lambda visible=visible: visible)
        monkeypatch.setattr("socket.gethostname", lambda host=host: host)
        try:
            found.append(own_devices(lambda own: words, rank, kind, count))
        except XgptError as error:
            found.append(str(error))
    return found


FOUR = [(str(i), f"GPU-{i}") for i in range(4)]


def test_replicas_take_their_slices_of_what_their_node_shows(monkeypatch):
    assert shared(monkeypatch, [("a", FOUR), ("a", FOUR), ("b", FOUR)], 2) == [
        ["0", "1"], ["2", "3"], ["0", "1"]]
    mig = [(f"MIG-{i}", f"MIG-{i}") for i in range(2)]
    assert shared(monkeypatch, [("a", mig), ("a", mig)], 1) == [["MIG-0"], ["MIG-1"]]
    bound = [("a", FOUR[:2]), ("a", FOUR[2:])]  # as Slurm binds tasks
    assert shared(monkeypatch, bound, 2) == [["0", "1"], ["2", "3"]]
    twice = [("0", "GPU-0"), ("0", "GPU-0")]  # a card for two, on purpose
    assert shared(monkeypatch, [("a", twice), ("a", twice)], 1) == [["0"], ["0"]]


def test_too_few_devices_and_shared_ones_are_named(monkeypatch):
    first, second = shared(monkeypatch, [("a", FOUR[:3]), ("a", FOUR[:3])], 2)
    assert first == ["0", "1"]
    assert "replica 1 needs 2 GPUs of a" in second and "0, 1, 2" in second
    for words in shared(monkeypatch, [("a", FOUR[:2]), ("a", FOUR[1::-1])], 1):
        assert "replicas" in words and "would share a GPU of a: 0" in words


def test_an_engine_runs_on_the_cores_of_its_replica_alone(started, tmp_path):
    """Two engines that each took all cores were 20 times slower: their threads wait by spinning."""
    core = max(os.sched_getaffinity(0))
    assert started("", cores=[core]).await_ready()
    said = json.loads((tmp_path / "engine.log").read_text().splitlines()[0])
    assert said["cores"] == [core] and said["threads"] == "1"
