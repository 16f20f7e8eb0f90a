"""A power cut at any operation of a job: what was on the disk stays there, whatever else is there,
and the same command goes on from it. The operations are those of a real run, recorded."""

import fcntl
import json
import os
import random
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

if shutil.which("cc") is None:
    pytest.skip("no C compiler", allow_module_level=True)
import power_cut  # noqa: E402
from faults import ToyJob, await_lines, below, wait  # noqa: E402

from xrunner.files.results import HeldFile, count_results  # noqa: E402
from xrunner.plan import saved_fingerprint  # noqa: E402

pytestmark = pytest.mark.mpi
COUNT = 40
# in random order within windows: results wait in held.jsonl, too
SHUFFLED = ("policy: rra, encode_batch: 3, decode_iterations: 4, shuffle: 12, tp_degree: 1, "
            "replicas: 1")


class Recorded(NamedTuple):
    """`written`: the queries whose results were there while the second rank was held; `kept`: those
    that a power cut would have left then."""

    job: ToyJob
    operations: list[power_cut.Operation]
    lines: dict[int, str]
    fingerprint: str | None
    written: frozenset[int]
    kept: frozenset[int]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A job that ran to its end, and what its processes did to its folder. On its way the second
    stage was held until the first, which has no result to write then, had put all on the disk."""
    folder = tmp_path_factory.mktemp("power")
    log = folder / "log"
    job = ToyJob(folder=folder, schedule=SHUFFLED, ranks=2, count=COUNT, run=", sync_s: 0.1",
                 prefix=("nice",), environ=power_cut.environment(
                     power_cut.compiled(folder), folder / "out", log)).write()
    process = job.start()
    assert await_lines(job, process, 1), process.communicate()
    rank = below(process.pid)["rank"][-1]
    hold(rank, log)
    try:
        written, kept = put_on_the_disk(job, log, folder / "cut")
    finally:
        os.kill(rank, signal.SIGCONT)
    _, told = process.communicate(timeout=200)
    assert process.returncode == 0, told
    lines = job.lines()
    assert len(lines) == COUNT
    return Recorded(replace(job, environ={}, prefix=()), list(power_cut.read_log(log)), lines,
                    saved_fingerprint(job.output), written, kept)


def hold(pid: int, log: Path) -> None:
    """Stops the process, which is not to hold the others up at their own records."""
    with log.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        os.kill(pid, signal.SIGSTOP)
        wait(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T",
             "the process is stopped")


def put_on_the_disk(job: ToyJob, log: Path, place: Path) -> tuple[frozenset[int], frozenset[int]]:
    """(queries whose results are written, those that are on the disk), once these are the same and
    the files were synced after the call; or as they are after a hundred looks."""
    before = len(list(power_cut.read_log(log)))
    for _ in range(100):
        time.sleep(0.1)
        written, operations = frozenset(job.lines()), list(power_cut.read_log(log))
        disk = power_cut.Disk()
        for operation in operations:
            disk.apply(operation)
        disk.after_a_cut(place / "out", None)
        kept = frozenset(replace(job, folder=place).lines())
        shutil.rmtree(place)
        if kept >= written and any(one.kind == "sync" and one.path == "results.jsonl"
                                   for one in operations[before:]):
            break
    return written, kept


def found_after(recorded: Recorded, folder: Path) -> set[int]:
    """The queries that a run would go on after; all that is there is as it was written."""
    count = count_results(folder / "results.jsonl")
    held = HeldFile(folder / "held.jsonl", count)
    text = (folder / "results.jsonl").read_text() if count else ""
    assert text == "".join(recorded.lines[index] for index in range(count))
    assert all(f"{held.line(index)}\n" == recorded.lines[index] for index in held.places)
    held.close()
    if count or held.places:
        assert saved_fingerprint(folder) == recorded.fingerprint, "else it would begin anew"
    return {*range(count), *held.places}


@pytest.mark.parametrize("every", [9, pytest.param(1, marks=pytest.mark.slow)])
def test_nothing_that_was_on_the_disk_is_lost_at_any_operation(recorded, every, tmp_path):
    disk, certain, place = power_cut.Disk(), set[int](), tmp_path / "out"
    is_durable_at = []
    for number, operation in enumerate(recorded.operations):
        disk.apply(operation)
        if number % every and operation is not recorded.operations[-1]:
            continue
        for seed in (None, 2 * number, 2 * number + 1):
            shutil.rmtree(place, ignore_errors=True)
            disk.after_a_cut(place, seed)
            found = found_after(recorded, place)
            assert found >= certain, f"{number = } {operation.kind} {operation.path} {seed = }"
            if (place / "metrics.json").is_file():
                assert json.loads((place / "metrics.json").read_text())["status"] == "done"
                assert len(found) == COUNT, "who is told that a job is done has all of it"
            if seed is None:
                certain = found
        is_durable_at.append(len(certain))
    assert is_durable_at[-1] == COUNT
    assert every > 1 or len({*is_durable_at} - {0, COUNT}) > 1, "results reach the disk under way"


def test_what_was_written_is_on_the_disk_while_the_run_goes_on(recorded):
    """Though nothing is written that would bring it there, and no file is closed."""
    assert 0 < len(recorded.written) < COUNT, "the run was under way"
    assert recorded.kept >= recorded.written


@pytest.mark.parametrize("share", [0.55, *(
    pytest.param(share, marks=pytest.mark.slow) for share in (0.2, 0.45, 0.5, 0.6, 0.65, 0.7, 1))])
def test_the_same_command_goes_on_after_a_cut(recorded, share):
    disk, chance = power_cut.Disk(), random.Random(share)
    for operation in recorded.operations[:round(share * len(recorded.operations))]:
        disk.apply(operation)
    output = recorded.job.output
    shutil.rmtree(output)
    disk.after_a_cut(output, chance.randrange(100))
    found = found_after(recorded, output)
    done = recorded.job.run_to_end()
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert [line for line, _ in recorded.job.answers()] == [f"q{i}" for i in range(COUNT)]
    assert all(recorded.job.lines()[index] == recorded.lines[index] for index in found)
    assert [json.loads(line)["output_ids"] for _, line in sorted(recorded.job.lines().items())] == [
        json.loads(line)["output_ids"] for _, line in sorted(recorded.lines.items())]
