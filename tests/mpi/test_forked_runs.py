"""Several ranks that are forks of the one that is started ahead are ranks like others: imports and
weights are read once for all of them, and who dies as it begins, or loses its stand-in, ends the
run by name."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="runs need the extra `run`")
import toys  # noqa: E402
from disturbed import RRA, TOGETHER_S, end, start  # noqa: E402
from faults import ToyJob, alive, wait  # noqa: E402

from xgpt.launch.local import find_mpiexec  # noqa: E402

pytestmark = pytest.mark.mpi

# Each interpreter that reads the user's folders leaves its command's last words.
_COUNTED = """
import os, sys
with open(os.environ["BEGUN"], "a") as file:
    print(*sys.orig_argv[-2:], file=file)
"""


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def with_sitecustomize(folder: Path, text: str) -> dict[str, str]:
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(text)
    return {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}


@pytest.mark.slow  # test_faults.py kills a rank
@pytest.mark.parametrize("who", ["a stand-in", "the forked"])
def test_ranks_that_lose_who_stands_for_them_end_and_start_again(who: str, tmp_path: Path) -> None:
    job, process, own = start(tmp_path, count=200)
    assert len(own["rank"]) == 2 and len(own["ahead"]) == 3
    assert len({parent_of(pid) for pid in own["rank"]}) == 1
    forked = parent_of(own["rank"][0])
    os.kill(forked if who == "the forked" else min({*own["ahead"]} - {forked}), signal.SIGKILL)
    wait(lambda: not alive([pid for pids in own.values() for pid in pids]), "all end", TOGETHER_S)
    facts = end(process, own)
    assert facts["code"] == 0 and facts["status"] == "done", facts
    assert "the ranks start again (1 more restart after this)" in " ".join(facts["told"].split())
    assert [line for line, _ in job.answers()] == [f"q{i}" for i in range(200)]


@pytest.mark.slow  # tests/xrunner/test_forks.py has the stand-in alone
def test_ranks_end_though_who_forked_them_is_stopped(tmp_path: Path) -> None:
    job, process, own = start(tmp_path, count=200)
    forked = parent_of(own["rank"][0])
    os.kill(forked, signal.SIGSTOP)
    try:
        facts = end(process, {**own, "ahead": [pid for pid in own["ahead"] if pid != forked]})
    finally:
        with suppress(ProcessLookupError):
            os.kill(forked, signal.SIGCONT)
    assert facts["code"] == 0 and facts["status"] == "done", facts
    assert [line for line, _ in job.answers()] == [f"q{i}" for i in range(200)]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core binds nobody")
def test_forks_are_bound_as_mpiexec_binds_their_ranks(tmp_path: Path) -> None:
    _job, process, own = start(tmp_path, count=200, environ={"HYDRA_BINDING": "core"})
    assert own["ahead"] and len(own["rank"]) == 2
    cores = [os.sched_getaffinity(pid) for pid in own["rank"]]
    assert [len(of) for of in cores] == [1, 1] and cores[0] != cores[1]
    assert end(process, own)["code"] == 0


# The second fork is gone as it begins. The command waits for it for one second, not for five, in
# which mpiexec and the first rank would spin.
_GONE_AS_IT_BEGINS = """
import os, sys
if "submit" in sys.orig_argv:
    from xgpt.launch import first_end
    assert first_end._LOOKS_GONE > 10
    first_end._LOOKS_GONE = 10
if "xrunner.standby" in sys.orig_argv:
    forks = []
    def begin():
        if len(forks) == 2:
            if os.environ["HOW"] == "is killed":
                os.kill(os.getpid(), 9)
            os._exit(1)
    os.register_at_fork(before=lambda: forks.append(1), after_in_child=begin)
"""
_SAID = {"exits": r"rank . .*on {host}\)? ended before it had met the others",
         "is killed": "Signal 9 ended a rank"}


@pytest.mark.parametrize("how", ["exits", pytest.param("is killed", marks=pytest.mark.slow)])
def test_a_fork_that_is_gone_before_the_others_meet_it_is_named(how: str, tmp_path: Path) -> None:
    job = ToyJob(folder=tmp_path, schedule=RRA, ranks=2, count=20, run=", restarts: 0", environ={
        **with_sitecustomize(tmp_path / "gone", _GONE_AS_IT_BEGINS), "HOW": how}).write()
    facts = end(job.start(), {})
    assert facts["code"] == 1
    assert re.search(_SAID[how].format(host=socket.gethostname()), facts["error"]), facts
    assert "BAD TERMINATION" not in facts["told"], facts


_LEAVES = """
import sys, time
from contextlib import suppress
from pathlib import Path
from mpi4py import MPI
from xrunner.rank import leave
if MPI.COMM_WORLD.Get_rank() == 0:
    leave(0)
MPI.Finalize()
time.sleep(1)  # of its end
Path(sys.argv[1]).touch()
"""


def test_a_rank_that_leaves_ends_no_other(tmp_path: Path) -> None:
    """MPICH's mpiexec kills all where one is gone without having taken leave of it."""
    script, left = tmp_path / "leaves.py", tmp_path / "left"
    script.write_text(_LEAVES)
    subprocess.run([find_mpiexec(), "-n", "2", sys.executable, str(script), str(left)], check=True)
    assert left.exists()


@pytest.mark.parametrize("dtype", [
    "float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_copies_import_and_read_their_weights_once(dtype: str, tmp_path: Path) -> None:
    job = ToyJob(folder=tmp_path, schedule="policy: rra, replicas: 2, encode_batch: 3, "
                 "decode_iterations: 4", ranks=2, count=30, environ={
                     **with_sitecustomize(tmp_path / "counted", _COUNTED),
                     "BEGUN": str(tmp_path / "begun")}).write()
    toys.make_model("llama", job.folder / "model")
    job.file.write_text(job.file.read_text().replace(", weights: random", "").replace(
        "float32", dtype))
    done = job.run_to_end()
    assert done.returncode == 0, done.stderr
    begun = (tmp_path / "begun").read_text().splitlines()
    assert [words for words in begun if "xrunner" in words] == ["-m xrunner.standby"]
    facts = json.loads(done.stdout)
    size = sum(path.stat().st_size for path in (job.folder / "model").glob("*.safetensors"))
    assert facts["ranks"] == 2 and 0.5 * size < facts["loaded_bytes"] <= size
    assert len(job.answers()) == 30
