"""How much longer steps take when another process takes one of the cores, by what a rank's threads
do about it.

    python benchmarks/taken_core.py [--seconds 2] [--rounds 3] [--out benchmarks/results]

One rank of as many threads as there are cores executes decode and encode steps of SmolLM2-135M
(random weights), alone and beside a process that computes without end on core 0. Each way is a
process of its own, since OpenMP reads its environment once; ways take turns, so that what the
machine does from minute to minute falls on all of them alike. Medians over all steps of all rounds;
the first second beside the other process is left out. (The machine must be otherwise idle.)

A core that is shared by two leaves each half of it: of C cores C - 1/2 are left, and a step that
could be divided at will would take C / (C - 1/2) as long. Threads have equal parts of each product,
so that it takes twice as long with all of them, and C / (C - 1) with one less: 2 where C is 2.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from xgpt.core import catalog
from xgpt.core.local import cpu_cluster

MODEL, LAYERS = "smollm2-135m", 8
DECODE, ENCODE = [120] * 16, [52] * 5  # contexts of a decode step, inputs of an encode step
OURS = "as xgpt does: a thread less while they wait for cores"
WAYS = {
    OURS: {},
    "the system's own": {},
    "sleep at once": {"GOMP_SPINCOUNT": "0"},
    "spin 1000 times": {"GOMP_SPINCOUNT": "1000"},
    "spin 4000 times": {"GOMP_SPINCOUNT": "4000"},
    "pinned": {"OMP_PROC_BIND": "true", "OMP_PLACES": "cores"},
}
OPENMP = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_PROC_BIND", "OMP_PLACES", "KMP_BLOCKTIME")
SPIN = "import os\nos.sched_setaffinity(0, {%d})\nwhile True: pass"
ALONE, TAKEN = "alone", "a core taken"
SETTLE_S = 1.0
Times = dict[str, list[float]]  # kind of step -> seconds


def measure(seconds: float, *, is_ours: bool) -> dict[str, Times]:
    """Steps of each kind for so long, alone and beside another process."""
    import torch

    from xprofiler.measure.bench import LayerBench
    from xrunner.threads import Threads

    threads = Threads(len(os.sched_getaffinity(0)))
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    spec = catalog.model(MODEL)
    bench = LayerBench(spec, torch.bfloat16, num_stages=-(-spec.num_layers // LAYERS))
    steps: dict[str, Callable[[], object]] = {
        "decode": bench.decode(DECODE), "encode": bench.encode(ENCODE)}
    found: dict[str, Times] = {ALONE: {}, TAKEN: {}}
    for state, core in ((ALONE, None), (TAKEN, 0)):
        with taken(core):
            for kind, step in steps.items():
                settling = time.perf_counter()
                while time.perf_counter() - settling < (SETTLE_S if core is not None else 0.1):
                    step()
                    if is_ours:
                        threads.look()
                begin, times = time.perf_counter(), list[float]()
                while time.perf_counter() - begin < seconds or len(times) < 5:
                    start = time.perf_counter()
                    step()
                    times.append(time.perf_counter() - start)
                    if is_ours:
                        threads.look()
                found[state][kind] = times
    return found


@contextmanager
def taken(core: int | None) -> Iterator[None]:
    """Another process computes on this core; None: none does."""
    if core is None:
        yield
        return
    other = subprocess.Popen([sys.executable, "-c", SPIN % core])
    time.sleep(0.2)
    try:
        yield
    finally:
        other.kill()
        other.wait()


def in_rounds(ways: Sequence[str], seconds: float, rounds: int) -> dict[tuple[str, str], Times]:
    """Steps by (way, ALONE or TAKEN)."""
    found: dict[tuple[str, str], Times] = defaultdict(lambda: defaultdict(list))
    clean = {key: value for key, value in os.environ.items() if key not in OPENMP}
    for _ in range(rounds):
        for way in ways:
            done = subprocess.run(
                [sys.executable, __file__, "--measure", str(seconds),
                 *(["--ours"] if way == OURS else [])], text=True,
                capture_output=True, check=True, env={**clean, **WAYS[way]})
            for state, of_state in json.loads(done.stdout).items():
                for kind, times in of_state.items():
                    found[way, state][kind] += times
    return found


def page(found: dict[tuple[str, str], Times]) -> str:
    cores = len(os.sched_getaffinity(0))
    usual = found.get(("the system's own", ALONE))
    device = cpu_cluster(None).device.name
    lines = [f"# A core that is taken ({device}, {cores} cores, {datetime.date.today()})",
             "", "Medians of steps of SmolLM2-135M, a quarter of its layers, one rank of "
             f"{cores} threads, alone and beside a process that computes on core 0 "
             "(`benchmarks/taken_core.py`).", "",
             "| threads that wait | kind | alone | against the system's own | a core taken | "
             "times as long | worst of a hundred |", "|---|---|---|---|---|---|---|"]
    for way in dict.fromkeys(way for way, _ in found):
        for kind, times in found[way, ALONE].items():
            alone, with_other = statistics.median(times), found[way, TAKEN][kind]
            beside = statistics.median(with_other)
            worst = statistics.quantiles(with_other, n=100)[-1]
            against = "" if usual is None else f"{alone / statistics.median(usual[kind]) - 1:+.1%}"
            setting = " ".join(f"{k}={v}" for k, v in WAYS[way].items())
            lines.append(f"| {way}{f' (`{setting}`)' if setting else ''} | {kind} | "
                         f"{alone * 1e3:.2f} ms | {against} | {beside * 1e3:.2f} ms | "
                         f"{beside / alone:.2f} | {worst * 1e3:.1f} ms |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1.5, help="of each kind, way and round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--ours", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--measure", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.measure is not None:
        print(json.dumps(measure(options.measure, is_ours=options.ours)))
        return
    text = page(in_rounds(options.ways.split(","), options.seconds, options.rounds))
    print(text)
    if options.out:
        (options.out / f"taken-core-{datetime.date.today()}.md").write_text(
            text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
