"""Whole commands with a placement and real ranks: the tokens of the job in memory, wherever its
bytes lie and however it was interrupted."""

import json
import os
import random
import re
from pathlib import Path

import pytest
from faults import FAULTS, ToyJob, below, end, wait

pytestmark = [pytest.mark.mpi, pytest.mark.slow]
COUNT = 24
FT = "policy: ft, encode_batch: {}, tp_degree: 1, replicas: {}"
RRA = "policy: rra, encode_batch: 6, decode_iterations: 4, tp_degree: 1, replicas: 1"
HOST = "tiers: {host: {memory: 1 GiB, up: 5 GB, down: 5 GB}}\n"
THREE = "weights: [0.2, 0.4, 0.4], kv: [0.2, 0.4, 0.4], hidden: [0.5, 0.5, 0]"
ON_DISK = "weights: [0, 0, 1], kv: [0, 0, 1]"


def placed_job(folder: Path, schedule: str, placement: str = "", *, device_batch: int = 5,
               **more) -> ToyJob:
    """A toy's job with that placement; "": in memory. Its inputs fill blocks of the files."""
    own = f", placement: {{{placement}, device_batch: {device_batch}}}" if placement else ""
    more = {"count": COUNT, "shared": 80, **more}
    job = ToyJob(folder=folder, schedule=schedule + own, **more).write()
    if "0.4, 0.4]" in placement:
        job.file.write_text(job.file.read_text() + HOST)
    return job


@pytest.fixture(scope="module")
def in_memory(tmp_path_factory):
    job = placed_job(tmp_path_factory.mktemp("memory"), FT.format(COUNT, 1))
    assert (done := job.run_to_end()).returncode == 0, done.stderr
    return job.answers()


@pytest.mark.parametrize(("schedule", "ranks", "placement"), [
    (FT.format(COUNT, 1), 1, "weights: [0.2, 0, 0.8]"),
    (FT.format(COUNT, 1), 1, "kv: [0.25, 0, 0.75], overlap: false"),
    (FT.format(COUNT, 1), 1, f"{THREE}, order: row, host_attention: false"),
    (FT.format(COUNT, 1), 1, f"{THREE}, order: zigzag, host_attention: true"),
    (FT.format(12, 1), 2, THREE), (FT.format(12, 2), 2, ON_DISK),
    (RRA, 1, ON_DISK), (RRA, 2, "weights: [0.2, 0.4, 0.4], kv: [0, 0.1, 0.9]")], ids=str)
def test_placed_ranks_answer_as_ranks_in_memory(in_memory, tmp_path, schedule, ranks, placement):
    job = placed_job(tmp_path, schedule, placement, ranks=ranks)
    assert (done := job.run_to_end()).returncode == 0, done.stderr
    assert job.answers() == in_memory
    offload = json.loads((job.output / "metrics.json").read_text())["offload"]
    moved = {one["term"]: one["measured_bytes"] for one in offload["terms"]}
    assert bool(moved["up"]) == ("0.4" in placement)
    assert moved["read"] > 0 and (moved["write"] > 0) == ("kv" in placement)
    for tier in offload["tiers"]:
        assert tier["peak_bytes"] <= tier["planned_bytes"]
    assert left_over(tmp_path) == {"weights"}


def test_weights_are_laid_out_once_and_read_from_their_file_later(tmp_path):
    job = placed_job(tmp_path, FT.format(COUNT, 1), ON_DISK)
    first = job.run_to_end()
    (file,) = weights_in(tmp_path / "out.offload")
    made = file.stat()
    job.file.write_text(job.file.read_text().replace("output: out", "output: again").replace(
        "weights: random", f"weights: random, offload: {file.parent}"))
    second = job.run_to_end()
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert (file.stat().st_ino, file.stat().st_mtime_ns) == (made.st_ino, made.st_mtime_ns)
    read = [json.loads((tmp_path / name / "measured.json").read_text())["ranks"][0]["bytes_read"]
            for name in ("out", "again")]
    assert read[1] < read[0] / 100, "of norms alone"


@pytest.mark.parametrize(("kind", "schedule", "ranks", "placement"), [
    ("kill a rank", FT.format(40, 1), 1, ON_DISK), ("SIGINT", FT.format(20, 1), 2, THREE),
    ("kill a rank", RRA, 2, THREE), ("kill the launcher", FT.format(20, 2), 2, ON_DISK),
    ("SIGTERM", RRA, 1, ON_DISK)], ids=str)
def test_a_job_interrupted_within_a_block_goes_on(tmp_path, kind, schedule, ranks, placement):
    """Weights stay for the next start; files of entries are gone, however the ranks end."""
    count = 600
    job = placed_job(tmp_path, schedule, placement, ranks=ranks, count=count)
    process = job.start()
    wait(lambda: len(job.lines()) >= 50 or process.poll() is not None, "some results")
    own, kept = below(process.pid), job.lines()
    FAULTS[kind](job, process, own, random.Random(0))
    facts = end(process, own)
    assert facts["code"] == {"kill a rank": 0, "kill the launcher": -9}.get(kind, 75), facts
    assert left_over(tmp_path) == {"weights"} and len(job.lines()) >= len(kept)
    if kind != "kill a rank":  # else its ranks were started again
        assert len(job.lines()) < count
        assert (done := job.run_to_end()).returncode == 0, done.stderr
    assert job.lines().items() >= kept.items()
    whole = placed_job(tmp_path / "memory", FT.format(40, 1), count=count)
    assert (done := whole.run_to_end()).returncode == 0, done.stderr
    assert job.answers() == whole.answers() and len(whole.answers()) == count
    assert left_over(tmp_path) == {"weights"}


@pytest.mark.parametrize(("schedule", "ranks"), [(FT.format(40, 1), 1), (FT.format(20, 2), 2)])
def test_a_file_of_weights_that_is_shortened_meanwhile_ends_the_run_in_words(
        tmp_path, schedule, ranks):
    job = placed_job(tmp_path, schedule, ON_DISK, ranks=ranks, count=600)
    process = job.start()
    wait(lambda: len(job.lines()) >= 50 or process.poll() is not None, "some results")
    own, (file,) = below(process.pid), weights_in(tmp_path / "out.offload")
    os.truncate(file, 4096)
    facts = end(process, own)
    assert facts["code"] == 1
    assert re.search(rf"{file}: ended at byte [\d,]+ of [\d,]+: another program", facts["error"])
    assert (done := job.run_to_end()).returncode == 0, done.stderr
    assert [name for name, _ in job.answers()] == [f"q{i}" for i in range(600)]


def weights_in(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if not path.suffix]


def left_over(folder: Path) -> set[str]:
    """Kinds of files in the folder for offloading."""
    return {path.name.partition("-")[0] for path in (folder / "out.offload").iterdir()}
