"""One whole copy of the model's files on a node, whoever asks for it, and however a copier ended;
none where there is no room. Other processes are real ones."""

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
from plans import plan_of

from xgpt.app.teller import tell_run
from xgpt.core.system import direct_file
from xrunner.checkpoint.identity import model_files
from xrunner.checkpoint.staging import STAGING_FILE, release, staged
from xrunner.files.sink import STARTING, write_progress
from xrunner.plan import RunPlan

CONTEXT = multiprocessing.get_context("fork")

# Another rank: stages, says where its weights are, and stays until its standard input ends.
RANK = """
import os, sys
from pathlib import Path
from xrunner.checkpoint import staging
from xrunner.plan import load_plan
made, make = [], staging._make
staging._make = lambda *of: (made.append(1), make(*of))
if len(sys.argv) > 2:  # copies this many bytes, and then waits
    staging._CHUNK_BYTES = int(sys.argv[2])
    send, calls = os.sendfile, []
    def slow(*of):
        calls.append(of)
        if len(calls) == 2:
            print("copying", flush=True)
            sys.stdin.read()
        return send(*of)
    os.sendfile = slow
plan = load_plan(Path(sys.argv[1]))
found = staging.staged(plan).model_dir / "model.safetensors"
print(found, found.stat().st_ino, len(made), flush=True)
sys.stdin.read()
staging.release(plan)
"""


@pytest.fixture
def plan(tmp_path):
    """A run of a model of three files, one of them in a folder of its own."""
    model, out = tmp_path / "a model", tmp_path / "out"
    (model / "additional_chat_templates").mkdir(parents=True)
    (model / "model.safetensors").write_bytes(os.urandom(3 * 2**20))
    (model / "config.json").write_text('{"model_type": "llama"}')
    (model / "additional_chat_templates" / "tool.jinja").write_text("{{ messages }}")
    (model / "README.md").write_text("decides no answer")
    out.mkdir()
    return planned(replace(plan_of(out, model), stage_model=str(tmp_path / "disk")))


def planned(plan: RunPlan) -> RunPlan:
    plan = replace(plan, model_files=model_files(plan.model_dir))
    plan.save()
    return plan


@pytest.fixture(autouse=True)
def _given_up(plan):
    yield
    release(plan)


@contextmanager
def rank(plan: RunPlan, *arguments: str):
    with subprocess.Popen([sys.executable, "-c", RANK, str(plan.output / "run.json"), *arguments],
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def said(process: Any) -> list[str]:
    return process.stdout.readline().rsplit(maxsplit=2)


def end(plan: RunPlan, state: str) -> None:
    (plan.output / "measured.json").write_text(json.dumps({"state": state}))


def copies(plan: RunPlan) -> list[Path]:
    """Folders of whole copies and of those under way."""
    return [path for path in Path(plan.stage_model).glob("xgpt-models-*/*") if path.is_dir()]


def test_all_files_that_decide_answers_are_copied_and_the_copy_goes_with_the_job(plan):
    own = staged(plan)
    assert own == replace(plan, model_dir=own.model_dir) and copies(plan) == [own.model_dir]
    assert model_files(own.model_dir) == plan.model_files
    for name in plan.model_files:
        assert (own.model_dir / name).read_bytes() == (plan.model_dir / name).read_bytes()
    assert not (own.model_dir / "README.md").exists()
    assert own.model_dir.parent.stat().st_mode & 0o777 == 0o700
    end(plan, "done")
    release(plan)
    assert not copies(plan) and not (plan.output / STAGING_FILE).exists()


def test_a_stopped_run_keeps_its_copy_for_the_next(plan):
    before = staged(plan).model_dir.stat()
    end(plan, "stopped")
    release(plan)
    other = planned(replace(plan, output=plan.output.parent))  # of the same files
    assert staged(other).model_dir.stat() == before


def test_other_files_under_the_same_names_are_another_copy(plan):
    first = staged(plan).model_dir
    (plan.model_dir / "config.json").write_text("{}")
    second = staged(planned(plan)).model_dir
    assert second != first and sorted(copies(plan)) == sorted([first, second])


def test_of_two_ranks_at_once_one_copies(plan):
    with rank(plan) as one, rank(plan) as other:
        found = [said(one), said(other)]
        assert found[0][:2] == found[1][:2] and {made for *_, made in found} == {"0", "1"}


def test_ranks_that_begin_at_the_same_moment_wait_for_none_that_has_its_copy(plan):
    """Each keeps the lock until all have a copy, as ranks do while they run."""
    for _ in range(20):
        barrier = CONTEXT.Barrier(4)
        ranks = [CONTEXT.Process(target=_staged_beside, args=(plan, barrier)) for _ in range(4)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(30)
        assert [process.exitcode for process in ranks] == [0] * 4
        shutil.rmtree(plan.stage_model)


def _staged_beside(plan: RunPlan, barrier: Any) -> None:
    barrier.wait(10)
    found = staged(plan)
    barrier.wait(10)
    assert found.model_dir != plan.model_dir


def test_a_rank_waits_for_the_one_that_copies(plan):
    with rank(plan, "1000000") as one:
        assert said(one) == ["copying"]
        assert " of 3 MiB, 0" in progress_of(plan)
        with rank(plan) as other:
            with pytest.raises(subprocess.TimeoutExpired):
                other.wait(2)
            one.communicate(timeout=60)  # goes on to its end
            assert said(other)[2] == "0" and "copying" not in progress_of(plan)


def test_a_killed_copier_leaves_nothing_that_counts(plan):
    with rank(plan, "1000000") as one:
        assert said(one) == ["copying"]
        one.send_signal(signal.SIGKILL)
    assert [path.suffix for path in copies(plan)] == [".partial"]
    assert model_files(staged(plan).model_dir) == plan.model_files
    assert [path.suffix for path in copies(plan)] == [""]


def test_a_copy_that_another_job_uses_stays(plan):
    end(plan, "done")
    with rank(plan) as other:
        folder = Path(said(other)[0]).parent
        assert staged(plan).model_dir == folder
        release(plan)
        assert model_files(folder) == plan.model_files
        other.communicate(timeout=60)
        assert not folder.exists()


def test_a_damaged_copy_is_made_again(plan):
    folder = staged(plan).model_dir
    release(plan)
    (folder / "model.safetensors").unlink()
    assert model_files(staged(plan).model_dir) == plan.model_files


def notes(plan: RunPlan) -> list[str]:
    """Messages of the launcher, which looks often."""
    told: list[str] = []
    tell: Any = SimpleNamespace(say=told.append, progress=lambda line: None)
    write_progress(plan.output / "progress.json", STARTING)
    for _ in range(3):
        tell_run(tell, plan.output / "progress.json", 2.0)
    return [" ".join(text.split()) for text in told]


def progress_of(plan: RunPlan) -> str:
    """The progress line that the launcher shows."""
    told: list[str] = []
    tell: Any = SimpleNamespace(progress=told.append)
    write_progress(plan.output / "progress.json", STARTING)
    tell_run(tell, plan.output / "progress.json", 2.0)
    return told[0]


def test_without_room_the_files_are_read_from_where_they_are_and_that_is_said_once(plan):
    with (plan.model_dir / "model.safetensors").open("r+b") as file:
        file.truncate(2**43)  # sparse: more than any disk here has room for
    plan = planned(plan)
    assert staged(plan) == staged(plan) == plan and not copies(plan)
    (told,) = notes(plan)
    assert "read from where they are" in told and "8 TiB needed" in told, told


def test_memory_is_no_disk(plan):
    plan = replace(plan, stage_model="/dev/shm")
    assert staged(plan) == plan and "in memory" in notes(plan)[0]
    Path(f"/dev/shm/xgpt-models-{os.getuid()}").rmdir()


def test_a_folder_that_cannot_be_made_is_said(plan):
    plan = replace(plan, stage_model=str(plan.model_dir / "config.json" / "disk"))
    assert staged(plan) == plan and "Not a directory" in notes(plan)[0]


def test_files_that_change_meanwhile_are_not_taken_for_the_planned_ones(plan):
    (plan.model_dir / "config.json").write_text("{}")
    assert staged(plan) == plan and not copies(plan) and "changed while" in notes(plan)[0]


@pytest.fixture
def mounts(plan, tmp_path, monkeypatch):
    """The model on another device than the rest (here both are this machine's), and a function that
    lets the system say which kinds of file systems these two are."""
    with TemporaryDirectory(dir="/dev/shm") as folder:
        if os.stat(folder).st_dev == tmp_path.stat().st_dev:
            pytest.skip("needs two file systems")
        for name in ("SLURM_TMPDIR", "TMPDIR"):
            monkeypatch.setenv(name, str(tmp_path / name))
            (tmp_path / name).mkdir()
        monkeypatch.setattr(direct_file, "MOUNTS", tmp_path / "mounts")

        def mount(of_model: str, of_rest: str = "ext4") -> None:
            (tmp_path / "mounts").write_text("".join(
                f"1 0 {os.major(device)}:{os.minor(device)} / /x rw shared:1 - {kind} /dev/x rw\n"
                for device, kind in ((os.stat(folder).st_dev, of_model),
                                     (tmp_path.stat().st_dev, of_rest))))

        yield replace(plan, model_dir=Path(shutil.move(plan.model_dir, folder)),
                      stage_model="auto"), mount


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs",
                                  "fuse.sshfs"])
def test_auto_copies_what_lies_on_a_network_to_the_first_disk_of_the_node(mounts, kind):
    plan, mount = mounts
    mount("xfs")
    assert staged(plan) == plan, "on a disk already"
    mount(kind)
    assert staged(plan).model_dir.parents[1] == Path(os.environ["SLURM_TMPDIR"])
    del os.environ["SLURM_TMPDIR"]
    assert staged(plan).model_dir.parents[1] == Path(os.environ["TMPDIR"])
    assert staged(replace(plan, stage_model="off")).model_dir == plan.model_dir


@pytest.mark.parametrize("kind", ["tmpfs", "nfs4"])
def test_auto_copies_nothing_where_no_disk_is_known(mounts, kind):
    plan, mount = mounts
    mount("nfs", kind)
    assert staged(plan) == plan


def test_a_link_to_a_network_counts_as_the_network(mounts):
    plan, mount = mounts
    mount("nfs4")
    folder = Path(os.environ["TMPDIR"], "model")
    shutil.copytree(plan.model_dir, folder)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(plan.model_dir / "model.safetensors")
    own = staged(replace(plan, model_dir=folder))
    assert own.model_dir != folder and not (own.model_dir / "model.safetensors").is_symlink()
