"""A disk that is full or fails, and memory that runs out, under real commands with real ranks: one
message, and the same command goes on. And `xgpt stop` while ranks, or the command itself, do not
hear of it, before they start, and after a death."""

import json
import os
import re
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest
from faults import RRA, ToyJob, alive, below, end, start, wait
from mpi_runs import injected

pytestmark = pytest.mark.mpi


@pytest.fixture
def disk(tmp_path):
    """A file system of a job's output folder alone."""
    own = Disk(tmp_path / "disk.img", tmp_path / "out")
    own.folder.mkdir()
    with own.image.open("wb") as file:
        file.truncate(32 * 2**20)
    try:
        subprocess.run(["mkfs.ext4", "-q", own.image], check=True, capture_output=True)
        own.mount()
    except (OSError, subprocess.CalledProcessError) as cause:
        pytest.skip(f"no file system of its own can be mounted here: {cause}")
    yield own
    subprocess.run(["umount", "-l", own.folder], check=False, capture_output=True)


class Disk(NamedTuple):
    image: Path
    folder: Path

    def mount(self) -> None:
        subprocess.run(["mount", "-o", "loop,errors=remount-ro", self.image, self.folder],
                       check=True, capture_output=True)

    def fill(self, left_bytes: int) -> None:
        with (self.folder / "ballast").open("wb", buffering=0) as file:
            with suppress(OSError):  # what a system tells to be free is not all to be had
                while True:
                    file.write(bytes(65_536))
            file.truncate(file.tell() - left_bytes)

    def fail(self) -> None:
        """An error of the disk, upon which the system mounts it read-only."""
        device = next(line.split()[0] for line in Path("/proc/mounts").read_text().splitlines()
                      if line.split()[1] == str(self.folder))
        Path(f"/sys/fs/ext4/{Path(device).name}/trigger_fs_error").write_text("1")

    def repair(self) -> None:
        subprocess.run(["umount", self.folder], check=True, capture_output=True)
        done = subprocess.run(["e2fsck", "-fp", self.image], check=False, capture_output=True)
        assert done.returncode <= 1, done.stdout
        self.mount()


@pytest.mark.slow
@pytest.mark.parametrize("trouble", ["full", "read-only"])
def test_a_disk_that_takes_no_more_is_one_message(trouble, disk, tmp_path):
    job, process, own = start(tmp_path, run=", sync_s: 0.2", after=200)
    if trouble == "full":
        disk.fill(left_bytes=20_000)
    else:
        disk.fail()
    facts = end(process, own)
    said = "No space left on device" if trouble == "full" else "Read-only file system"
    assert facts["code"] == 1, facts
    assert said in facts["error"] and "the same command goes on" in facts["error"]
    if trouble == "full":
        (disk.folder / "ballast").unlink()
    else:
        disk.repair()
    done = job.lines()
    assert 100 < len(done) < job.count
    again = job.run_to_end()
    assert again.returncode == 0, again.stderr
    assert [line for line, _ in job.answers()] == [f"q{i}" for i in range(1500)]
    assert job.lines().items() >= done.items()


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "words"), [
    *((f"--as={gigabytes * 10**9}", "memory ran out") for gigabytes in (1, 3, 5)),
    *((f"--nofile={files}", "open files|ulimit -n") for files in (28, 36, 40, 44, 64))])
def test_memory_or_descriptors_that_run_out_are_one_message(limit, words, tmp_path):
    job = ToyJob(folder=tmp_path, schedule=RRA, ranks=2, count=60, run=", restarts: 0",
                 prefix=("prlimit", limit)).write()
    done = job.run_to_end()
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode == 0 or re.search(words, done.stderr), done.stderr


# The second rank goes into a group of little memory before it has any.
_CONFINED = """
import os, sys
if "xrunner.rank.standby" in sys.orig_argv and os.environ.get("PMI_RANK") == "1":
    with open(os.environ["GROUP"] + "/cgroup.procs", "w") as file:
        file.write(str(os.getpid()))
"""


@pytest.fixture
def group():
    """A control group of 60 MB."""
    base = Path("/sys/fs/cgroup/memory")
    base = base if base.is_dir() else base.parent
    limit = "memory.limit_in_bytes" if base.name == "memory" else "memory.max"
    folder = base / f"xgpt-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / limit).write_text(str(60 * 10**6))
    except OSError as cause:
        pytest.skip(f"no control groups of memory here: {cause}")
    yield folder
    wait(lambda: not (folder / "cgroup.procs").read_text(), "the group is empty")
    folder.rmdir()


@pytest.mark.slow
def test_a_rank_that_the_system_kills_for_its_memory_is_told(group, tmp_path):
    job = ToyJob(folder=tmp_path, schedule=RRA, ranks=2, count=20, run=", restarts: 1",
                 environ=injected(tmp_path / "confined", _CONFINED, GROUP=str(group))).write()
    done = job.run_to_end()
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    error = json.loads(done.stdout)["error"]
    assert "Signal 9 ended a rank" in error and "when memory runs out" in error
    assert done.stderr.count("the ranks start again") == 1


@pytest.mark.slow
def test_a_stop_ends_ranks_that_do_not_hear_of_it(tmp_path):
    job, process, own = start(tmp_path)
    os.kill(own["rank"][0], signal.SIGSTOP)
    assert job.command("stop").returncode == 0
    facts = end(process, own)
    assert facts["code"] == 75 and "asked to stop, and the ranks did not" in facts["message"]


@pytest.mark.slow
def test_a_stop_is_heard_while_the_command_itself_is_stopped(tmp_path):
    """Ctrl-Z, or Slurm's suspension: the ranks see to it, and wait."""
    job, process, own = start(tmp_path)
    process.send_signal(signal.SIGSTOP)
    assert "asked to stop" in job.command("stop").stdout
    wait((job.output / "measured.json").is_file, "the run ends")
    process.send_signal(signal.SIGCONT)
    facts = end(process, own)
    assert facts["code"] == 75 and facts["queries"] == len(job.lines()) < job.count


@pytest.mark.slow
def test_a_stop_before_the_ranks_start_and_of_what_has_ended(tmp_path):
    job = ToyJob(folder=tmp_path, schedule=RRA, ranks=2, count=20).write()
    assert "No run in" in job.command("stop").stderr
    process = job.start()
    wait((job.output / ".owner.json").is_file, "the folder is taken")
    process.send_signal(signal.SIGSTOP)
    own = below(process.pid)
    assert "asked to stop" in job.command("stop").stdout
    process.send_signal(signal.SIGCONT)
    facts = end(process, own)
    assert facts["code"] == 75 and "before the ranks were started" in facts["message"]
    refused = job.command("stop")
    assert refused.returncode == 1 and "no run is active there (state: stopped)" in refused.stderr
    assert job.run_to_end().returncode == 0 and len(job.answers()) == 20
    refused = job.command("stop", "--json")
    assert refused.returncode == 1 and "state: done" in json.loads(refused.stdout)["error"]


@pytest.mark.slow
def test_a_stop_between_a_death_and_the_next_start_ends_the_run(tmp_path):
    job, process, own = start(tmp_path)
    process.send_signal(signal.SIGSTOP)  # else the ranks are there again before `stop` is
    os.kill(own["rank"][-1], signal.SIGKILL)
    wait(lambda: not alive(own["rank"]), "the ranks end")
    assert "asked to stop" in job.command("stop").stdout
    process.send_signal(signal.SIGCONT)
    facts = end(process, own)
    assert facts["code"] == 75 and facts["queries"] == len(job.lines()) < job.count
    assert "asked to stop meanwhile" in facts["message"] and "start again" not in facts["told"]
