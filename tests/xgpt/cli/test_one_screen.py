"""Every command's default screen is at most 25 lines of 80 columns, and six of them are as they
were, their figures masked."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import toys
from by_data_sheets import COMMAND
from fake_run import write_fake_run
from job_folder import as_requests, write_job
from mpi_runs import call
from runs import RUNNING
from screens import check_screen, without_figures

from xgpt.cli.main import COMMANDS
from xrunner.files.sink import write_progress

SCREENS = Path(__file__).with_name("one_screen.txt")
JOBS = Path(__file__).resolve().parents[3] / "jobs"
_OF_THE_MACHINE = ("machine", "times", "note", "WARNING", "layout", "model")  # labels of rows


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """The jobs of the tutorial, in a folder of their own; and a run that is done."""
    folder = tmp_path_factory.mktemp("tutorial")
    shutil.copytree(JOBS, folder / "jobs")
    write_progress(write_fake_run(folder / "out" / "nightly") / "progress.json",
                   replace(RUNNING, state="done", total=72, done=72))
    return folder


def screen_of(folder, cache, *words):
    """What the command shows; it is one screen."""
    done = call(*words, env={**cache, "COLUMNS": "80", "HF_HUB_OFFLINE": "1"},
                xgpt=["env", "-C", str(folder), *COMMAND])
    shown = (done.stderr + done.stdout).replace(str(folder), "FOLDER")
    shown = re.sub(r"note: these plans need not be good.*?rough\n", "", shown, flags=re.S)
    lines = shown.splitlines()
    assert len(lines) <= 25 and max(map(len, lines)) <= 80, shown
    return shown


def golden(name, shown):
    """Compares a screen without the rows that depend on this machine."""
    rows = re.split(r"\n(?=\S|\n)", shown)
    kept = [" ".join(row.split()) for row in rows if not row.startswith(_OF_THE_MACHINE)]
    check_screen(SCREENS, name, without_figures("\n".join(filter(None, kept))))


@pytest.mark.parametrize(("name", "words"), [
    ("schedule", ("schedule", "jobs/opt-13b-summarise.yaml")),
    ("simulate", ("simulate", "jobs/opt-13b-summarise.yaml", "--set", "schedule.encode_batch=16",
                  "--set", "schedule.decode_iterations=16")),
    ("sweep", ("sweep", "jobs/opt-13b-summarise.yaml", "--bounds", "8,inf", "--over",
               "policy=sarathi,ft")),
    ("slurm", ("submit", "jobs/slurm-opt-13b.yaml", "--dry-run", "--set", "slurm.time=00:05:00")),
    ("status", ("status",))])
def test_a_screen_is_as_it_was(jobs, cache, name, words):
    golden(name, screen_of(jobs, cache, *words))


@pytest.mark.parametrize("words", [
    *(f"submit jobs/{name}.yaml --dry-run --set model=opt-125m" + " --set run.ranks=1" * is_here
      for name, is_here in (("quickstart", True), ("reviews", True), ("slurm-quickstart", False))),
    "top", "report", "models", "status out/nightly"])
def test_a_screen_fits(jobs, cache, words):
    screen_of(jobs, cache, *words.split())


def test_a_run_is_one_screen_and_the_first_line_is_its_duration(tmp_path, llama, cache):
    job = write_job(tmp_path, llama[0], as_requests(toys.random_queries(12)), ranks=1,
                    schedule="policy: rra, encode_batch: 3, decode_iterations: 4")
    job.write_text(job.read_text() + "constraint: {latency_s: 600}\n")
    shown = screen_of(tmp_path, cache, "submit", "job.yaml")
    first = next(line for line in shown.splitlines() if not line.startswith(("note", " ")))
    assert re.match(r"time +\S+ \S+ for 12 requests", first), shown
    golden("submit", re.sub(r"(faster than predicted|within # %|[\d.]+ \S+ (less|times as much))",
                            "VERDICT", shown))
    assert "already done: 12 of 12" in screen_of(tmp_path, cache, "submit", "job.yaml")


def test_without_an_argument_the_newest_run_is_meant(jobs, cache, tmp_path):
    assert "out/nightly/results.jsonl" in screen_of(jobs, cache, "status")
    for command in ("status", "top", "stop", "report", "explain"):
        assert command in COMMANDS
        done = call(command, env=cache, code=1, xgpt=["env", "-C", str(tmp_path), *COMMAND])
        assert "No run here yet. Start one: xgpt submit job.yaml" in done.stderr
