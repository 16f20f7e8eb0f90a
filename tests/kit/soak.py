"""Jobs on toy models, each killed or stopped once or twice on its way: every line is there once, it
is what an undisturbed run gives (float32), and nothing that was done is run again.

    python tests/kit/soak.py --jobs 150 --rows soak.jsonl --out benchmarks/results

Each job's outcome is a line of --rows: the same command goes on after those that are there. The
folder of a job that went wrong is kept, and printed."""

import argparse
import json
import math
import os
import platform
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import NamedTuple

import power_cut
from faults import FAULTS, ToyJob, await_lines, await_metrics, await_the_end, below

COUNT = 300


class Shape(NamedTuple):
    """What a job runs on."""

    name: str
    ranks: int
    schedule: str


_PLAIN = "policy: rra, encode_batch: 6, decode_iterations: 4"
_ONE = "replicas: 1, tp_degree: 1"
SHAPES = (
    Shape("rra, 1 rank", 1, _PLAIN),
    Shape("rra, 2 stages", 2, f"{_PLAIN}, {_ONE}"),
    Shape("rra shuffled, 3 stages", 3, f"{_PLAIN}, shuffle: 20, {_ONE}"),
    Shape("rra in chunks, 2 stages", 2, f"{_PLAIN}, encode_chunk: 8, {_ONE}"),
    Shape("rra, TP 2", 2, f"{_PLAIN}, replicas: 1, tp_degree: 2, tp_gpus: 2"),
    Shape("rra, 2 stages of TP 2", 4, f"{_PLAIN}, replicas: 1, tp_degree: 2, tp_gpus: 4"),
    Shape("rra, 2 copies", 2, f"{_PLAIN}, replicas: 2, tp_degree: 1"),
    Shape("rra, 2 copies of 2 stages", 4, f"{_PLAIN}, replicas: 2, tp_degree: 1"),
    Shape("waa-c, 2 ranks", 2, f"policy: waa-c, encode_batch: 6, {_ONE}"),
    Shape("waa-m, 3 ranks", 3, f"policy: waa-m, encode_batch: 6, {_ONE}"),
    Shape("waa-c, 2 copies", 4, "policy: waa-c, encode_batch: 6, replicas: 2, tp_degree: 1"),
    Shape("waa-m, 2 ranks", 2, f"policy: waa-m, encode_batch: 6, {_ONE}"),
    Shape("ft, 2 stages", 2, f"policy: ft, encode_batch: 8, {_ONE}"),
    Shape("dsi, 2 stages", 2, f"policy: dsi, encode_batch: 8, {_ONE}"),
    Shape("orca, 2 stages", 2, f"policy: orca, max_active: 8, {_ONE}"),
    Shape("vllm, 2 stages", 2, f"policy: vllm, max_active: 8, token_budget: 40, {_ONE}"),
    Shape("sarathi, 2 stages", 2, f"policy: sarathi, max_active: 8, token_budget: 16, {_ONE}"))
POWER_CUT, AT_THE_END = "power cut", "kill the launcher at metrics.json"
LATE = "too late"
KINDS = (*FAULTS, POWER_CUT, AT_THE_END)
assert math.gcd(len(SHAPES), len(KINDS)) == 1


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What came of one job. `together_s`: the longest from a death to the end of all."""

    number: int = 0
    shape: str
    faults: list[str] = field(default_factory=list)
    kept: int = 0  # answers that were there at the last fault
    together_s: float = 0.0
    wall_s: float = 0.0
    trouble: str = ""


def one_job(shape: Shape, kind: str, seed: int, folder: Path, library: Path,
            expected: Sequence[tuple[str, tuple[int, ...]]], count: int = COUNT,
            environ: Mapping[str, str] | None = None) -> Outcome:
    """Runs one job through its faults to its end, and looks at what it left."""
    chance, outcome = random.Random(seed), Outcome(shape=shape.name)
    log, began_s = folder / "log", time.monotonic()
    recorded = power_cut.environment(library, folder / "out", log) if kind == POWER_CUT else {}
    job = ToyJob(folder=folder, schedule=shape.schedule, ranks=shape.ranks, count=count,
                 run=", sync_s: 0.2, restarts: 1", prefix=("nice",),
                 environ={**(environ or {}), **recorded}).write()
    try:
        done = _disturb(job, kind, chance, outcome, log)
        job = replace(job, environ=environ or {})
        end = job.run_to_end()
        if end.returncode != 0 or "Traceback" in end.stderr:
            outcome.trouble = f"exit code {end.returncode}: {end.stderr[-600:]}"
        elif job.answers() != list(expected):
            outcome.trouble = "other answers than an undisturbed run"
        elif any(job.lines().get(index) != line for index, line in done.items()):
            outcome.trouble = "something that was done was run again"
    except Exception as trouble:
        outcome.trouble = f"{type(trouble).__name__}: {trouble}"
    outcome.wall_s = time.monotonic() - began_s
    return outcome


def _disturb(job: ToyJob, kind: str, chance: random.Random, outcome: Outcome,
             log: Path) -> dict[int, str]:
    """The lines that were there after the last fault."""
    for _ in range(1 if kind in (POWER_CUT, AT_THE_END) else chance.choice((1, 1, 1, 1, 2))):
        process = job.start()
        if kind == AT_THE_END:
            is_at_work = await_metrics(job, process)
        else:
            have = len((job.output / "results.jsonl").read_bytes().splitlines()) if (
                job.output / "results.jsonl").is_file() else 0
            more = chance.randint(1, max(job.count - have - 30, 1))
            is_at_work = await_lines(job, process, min(have + more, job.count - 10))
        own = below(process.pid)
        everybody = [process.pid, *(pid for pids in own.values() for pid in pids)]
        if is_at_work:
            name = kind if kind in FAULTS else "kill the launcher"
            outcome.faults.append(kind)
            began_s = time.monotonic()
            FAULTS[name](job, process, own, chance)
            process.communicate(timeout=600)
            if process.returncode != 0:  # else the ranks were started again, and are done
                ended_s = time.monotonic()
                await_the_end(everybody)
                began_s = began_s if process.returncode < 0 else ended_s
                outcome.together_s = max(outcome.together_s, time.monotonic() - began_s)
        else:
            process.communicate()
            outcome.faults.append(LATE)
    if kind == POWER_CUT:
        _cut(job.output, log, chance)
    done = job.lines()
    outcome.kept = len(done)
    return done


def _cut(output: Path, log: Path, chance: random.Random) -> None:
    """The folder as the disk may have it after a cut at some moment of the recorded run."""
    operations = list(power_cut.read_log(log))
    disk = power_cut.Disk()
    for operation in operations[:chance.randint(len(operations) // 3, len(operations))]:
        disk.apply(operation)
    shutil.rmtree(output)
    disk.after_a_cut(output, chance.choice((None, chance.randrange(10**6))))


def undisturbed(folder: Path, count: int = COUNT, environ: Mapping[str, str] | None = None,
                ) -> list[tuple[str, tuple[int, ...]]]:
    """Whose answers all others are to have."""
    job = ToyJob(folder=folder, schedule=SHAPES[0].schedule, ranks=1, count=count,
                 environ=environ or {}).write()
    end = job.run_to_end()
    assert end.returncode == 0, end.stderr
    return job.answers()


def page(outcomes: Sequence[Outcome], seed: int) -> str:
    shapes = Counter(outcome.shape for outcome in outcomes)
    faults = Counter(fault for outcome in outcomes for fault in outcome.faults)
    troubles = [outcome for outcome in outcomes if outcome.trouble]
    return "\n".join([
        "# Jobs through faults", "",
        f"{date.today()}; `python tests/kit/soak.py --jobs {len(outcomes)} --seed {seed}`: jobs of "
        f"{COUNT} queries of a toy model in float32, {sum(o.wall_s for o in outcomes) / 60:.0f} "
        f"minutes of jobs on {os.cpu_count()} shared cores ({platform.machine()}).", "",
        f"**{len(outcomes) - len(troubles)} of {len(outcomes)} jobs ended with every line once, "
        "with the tokens of an undisturbed run, and with every line that was there after the last "
        "fault as it was.** From the end of the command, or of who was killed, to the end of all "
        f"its processes it took {max(o.together_s for o in outcomes):.1f} s at most. "
        f"{sum(0 < o.kept < COUNT for o in outcomes)} jobs went on from the middle. "
        f"`{LATE}`: the job was done before its fault. A power cut leaves what was synced, and a "
        "random choice of the rest.", "", "| fault or job | times |", "|---|---|",
        *(f"| {name} | {n} |" for name, n in [*sorted(faults.items()), *shapes.items()]), "",
        *(f"- {o.number}: {o.shape}, {', '.join(o.faults)}: {' '.join(o.trouble.split())}"
          for o in troubles)]).rstrip() + "\n"


def read_rows(path: Path | None) -> dict[int, Outcome]:
    """Number of a job -> its last outcome."""
    lines = () if path is None or not path.is_file() else path.read_text().splitlines()
    return {row["number"]: Outcome(**row) for row in map(json.loads, lines)}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=150)
    parser.add_argument("--at-a-time", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=600)
    parser.add_argument("--rows", type=Path, help="outcomes, a line each; those there stay")
    parser.add_argument("--again", action="store_true", help="run those that went wrong once more")
    parser.add_argument("--out", type=Path, help="folder of the page")
    asked = parser.parse_args(arguments)
    begin_s, outcomes = time.monotonic(), read_rows(asked.rows)
    due = [number for number in range(asked.jobs) if number not in outcomes or (
        asked.again and outcomes[number].trouble)]
    folder = Path(tempfile.mkdtemp(prefix="xgpt-soak-"))
    # start-up is most of what such a job takes: what is compiled is kept, and nothing is measured
    environ = {"PYTHONPYCACHEPREFIX": str(folder / "pyc"), "PYTHONDONTWRITEBYTECODE": ""}
    library = power_cut.compiled(folder)
    expected = undisturbed(folder / "undisturbed", environ=environ) if due else []

    def run(number: int) -> None:
        if time.monotonic() - begin_s > 60 * asked.minutes:
            return
        # every kind comes to every shape: the two numbers have no common divisor
        shape, kind = SHAPES[number % len(SHAPES)], KINDS[number % len(KINDS)]
        own = folder / f"job{number}"
        outcome = one_job(shape, kind, asked.seed + number, own, library, expected, environ=environ)
        outcome.number = number
        outcomes[number] = outcome
        print(f"{len(outcomes)} {time.monotonic() - begin_s:.0f} s: {outcome}"
              + (f" (see {own})" if outcome.trouble else ""), flush=True)
        if asked.rows is not None:
            with asked.rows.open("a") as file:
                file.write(json.dumps(asdict(outcome)) + "\n")
        if not outcome.trouble:
            shutil.rmtree(own, ignore_errors=True)

    with ThreadPoolExecutor(asked.at_a_time) as pool:
        list(pool.map(run, due))
    if asked.out is not None and outcomes:
        asked.out.mkdir(exist_ok=True)
        (asked.out / "soak.md").write_text(
            page([outcomes[number] for number in sorted(outcomes)], asked.seed))
    is_well = not any(outcome.trouble for outcome in outcomes.values())
    if is_well:
        shutil.rmtree(folder, ignore_errors=True)
    return not is_well


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
