"""A power cut at any operation of a job: what was on the disk stays there, whatever else is there,
and the same command goes on from it. The operations are those of a real run, recorded."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

pytest.importorskip("torch", reason="runs need the extra `run`")
if shutil.which("cc") is None:
    pytest.skip("no C compiler", allow_module_level=True)
import power_cut  # noqa: E402
from faults import ToyJob  # noqa: E402

from xrunner.io.results import count_results, read_held  # noqa: E402
from xrunner.plan import saved_fingerprint  # noqa: E402

pytestmark = pytest.mark.mpi
COUNT = 40
# in random order within windows: results wait in held.jsonl, too
SHUFFLED = "policy: rra, encode_batch: 3, decode_iterations: 4, shuffle: 12"


class Recorded(NamedTuple):
    job: ToyJob
    operations: list[power_cut.Operation]
    lines: dict[int, str]
    fingerprint: str | None


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """A job that ran to its end, and what its processes did to its folder."""
    folder = tmp_path_factory.mktemp("power")
    log = folder / "log"
    job = ToyJob(folder=folder, schedule=SHUFFLED, count=COUNT, run=", sync_s: 0.1",
                 environ=power_cut.environment(power_cut.compiled(folder), folder / "out",
                                               log)).write()
    done = job.run_to_end()
    assert done.returncode == 0, done.stderr
    lines = job.lines()
    assert len(lines) == COUNT
    return Recorded(replace(job, environ={}), list(power_cut.read_log(log)), lines,
                    saved_fingerprint(job.output))


def found_after(recorded: Recorded, folder: Path) -> set[int]:
    """The queries that a run would go on after; all that is there is as it was written."""
    count = count_results(folder / "results.jsonl")
    held = read_held(folder / "held.jsonl", count)
    text = (folder / "results.jsonl").read_text() if count else ""
    assert text == "".join(recorded.lines[index] for index in range(count))
    assert all(f"{line}\n" == recorded.lines[index] for index, line in held.items())
    if count or held:
        assert saved_fingerprint(folder) == recorded.fingerprint, "else it would begin anew"
    return {*range(count), *held}


@pytest.mark.parametrize("every", [9, pytest.param(1, marks=pytest.mark.slow)])
def test_nothing_that_was_on_the_disk_is_lost_at_any_operation(recorded: Recorded, every: int,
                                                               tmp_path: Path) -> None:
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


@pytest.mark.parametrize("share", [0.55, *(
    pytest.param(share, marks=pytest.mark.slow) for share in (0.2, 0.45, 0.5, 0.6, 0.65, 0.7, 1))])
def test_the_same_command_goes_on_after_a_cut(recorded: Recorded, share: float) -> None:
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
