"""Memory that a long file of requests takes: `python benchmarks/million.py LINES...`.

Made requests of 24 tokens each, with ids, as a job on a toy model of random weights: the launcher
does all that it does for a run (reads, hashes and spools the requests, plans, starts, waits, and
makes figures and the page of what was answered), and rank 0 takes up every query and writes every
result, without computing one. Prints VmHWM of each process beside that of a job of one line.

--launcher-only ends where ranks would start, --folder keeps the job there; `--stage intake --folder
DIR` does the first of these alone, of the requests.jsonl that is in DIR."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from faults import ToyJob

STAGES = ("intake", "launcher", "rank")
SCHEDULE = "policy: rra, encode_batch: 64, decode_iterations: 8"


def make(folder: Path, lines: int, schedule: str = SCHEDULE, max_tokens: int = 8) -> ToyJob:
    job = ToyJob(folder=folder, schedule=schedule, count=1).write()
    tokens = [[1 + (7 * number + place) % 90 for place in range(24)] for number in range(97)]
    with (folder / "requests.jsonl").open("w", encoding="utf-8") as file:
        for number in range(lines):
            file.write(f'{{"id": "request-{number:012}", "tokens": {tokens[number % 97]}, '
                       f'"max_tokens": {max_tokens}}}\n')
    return job


class Characters:
    """A token a character, where a request has a text."""

    vocab_size = 256

    def tokenise(self, requests: Any) -> list[list[int]]:
        return [list((request.prompt or "").encode()) if request.tokens is None
                else list(request.tokens) for request in requests]


def intake(folder: Path) -> None:
    import numpy as np

    from xgpt.core.request_files.files import RequestFiles
    from xgpt.core.spool import SpoolWriter
    from xrunner.io.intake import take_in

    spool = SpoolWriter()
    requests = take_in(RequestFiles(paths=(folder / "requests.jsonl",)), Characters(), spool)
    rows = np.arange(len(requests))
    spool.save(folder, np.stack([rows, requests.output_caps(8)], axis=1), 0)


class Replaced:
    """In the launcher of ranks' place: starts this file as rank 0."""

    is_here = True

    def run(self, ranks: Any, *, watch: Callable[[], None], **_: Any) -> None:
        with subprocess.Popen([sys.executable, __file__, "--stage", "rank", "--folder",
                               str(ranks.argument.parent)], stdout=subprocess.DEVNULL) as process:
            while process.poll() is None:
                watch()
                time.sleep(0.1)
        assert process.returncode == 0, process.returncode


class Stopped(Exception):
    """Where ranks would start."""


def launcher(folder: Path, *, is_whole: bool) -> None:
    """Runs the job of a folder as `xgpt submit` does."""
    from xgpt.app import run
    from xgpt.app.plan import plan_job
    from xgpt.app.telling import LogTeller
    from xgpt.core.job_file import load_job
    from xprofiler.roofline import Roofline

    def started(*_: Any) -> Any:
        if not is_whole:
            raise Stopped
        return Replaced()

    run.launcher_of = started
    opened = run.open_to_run(load_job(folder / "job.yaml", ()), LogTeller())
    problem = opened.problem
    timing = Roofline(problem.model, problem.cluster.device, problem.dtype)
    plan = plan_job(opened, timing)
    with suppress(Stopped):
        run.execute(plan.opened, plan.timing, plan.schedule)


def rank(output: Path) -> None:
    """Every query is begun and done in its turn, 64 at a time."""
    from xrunner.engine.supply import FromSpool
    from xrunner.io.sink import RunSink
    from xrunner.plan import load_plan
    from xrunner.query import FinishedQuery
    from xrunner.rank import RunOutcome, order_of, read_work, write_measured

    plan = load_plan(output / "run.json")
    queries, num_errors, before = read_work(plan)
    sink = RunSink(plan, num_queries=len(queries), before=before)
    waiting: list[Any] = []
    roster = SimpleNamespace(num_waiting=0)

    def submit(query: Any) -> bool:
        waiting.append(query)
        roster.num_waiting = len(waiting)
        return True

    head: Any = SimpleNamespace(roster=roster, submit=submit)
    supply = FromSpool(queries, order_of(len(queries), plan, before), len(queries) - before.total,
                       least=640)
    now_s = 0.0
    while True:
        supply.look(head)
        if not waiting:
            break
        for query in waiting[:64]:
            sink.finished(FinishedQuery(
                query=query, output_ids=(1, 2, 3), finish_reason="length", text="abc",
                encode_start_s=now_s, first_token_s=now_s + 0.01, last_token_s=now_s + 0.02))
            now_s += 0.001
        del waiting[:64]
        roster.num_waiting = len(waiting)
    assert supply.close(head)
    sink.close(now_s, "done")
    write_measured(output, RunOutcome(state="done", wall_s=now_s, queries_before=0,
                                      num_errors=num_errors), sink.tally, [])
    (output / "rank.peak").write_text(str(peak_bytes()))


def peak_bytes() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines()
                if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def measured(lines: int, folder: Path, *, is_whole: bool) -> dict[str, int]:
    """Bytes of each process."""
    job = make(folder, lines)
    done = subprocess.run(
        [sys.executable, __file__, "--stage", "launcher", "--folder", str(folder),
         *([] if is_whole else ["--launcher-only"])], check=True, stdout=subprocess.PIPE,
        text=True)
    peaks = {"launcher": int(done.stdout.splitlines()[-1])}
    if is_whole:
        results = job.output / "results.jsonl"
        with results.open("rb") as file:
            assert sum(1 for _ in file) == lines
        metrics = json.loads((job.output / "metrics.json").read_text())
        assert (metrics["status"], metrics["queries"]) == ("done", lines)
        assert (job.output / "report.html").is_file()
        peaks["rank"] = int((job.output / "rank.peak").read_text())
    return peaks


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("lines", type=int, nargs="*")
    parser.add_argument("--launcher-only", action="store_true")
    parser.add_argument("--stage", choices=STAGES)
    parser.add_argument("--folder", type=Path)
    asked = parser.parse_args()
    is_whole = not asked.launcher_only
    if asked.stage == "launcher":
        launcher(asked.folder, is_whole=is_whole)
        print(peak_bytes())
        return
    if asked.stage == "intake":
        intake(asked.folder)
        print(peak_bytes())
        return
    if asked.stage == "rank":
        rank(asked.folder)
        return
    with tempfile.TemporaryDirectory() as name:
        empty = measured(1, Path(name), is_whole=is_whole)
    for lines in asked.lines:
        with tempfile.TemporaryDirectory() as name:
            began_s = time.monotonic()
            found = measured(lines, asked.folder or Path(name), is_whole=is_whole)
        print(f"{lines:,} lines: " + ", ".join(
            f"{stage} {(found[stage] - empty[stage]) / 1e6:.0f} MB above one line's "
            f"{empty[stage] / 1e6:.0f} MB" for stage in found)
            + f", {time.monotonic() - began_s:.0f} s", flush=True)


if __name__ == "__main__":
    main()
