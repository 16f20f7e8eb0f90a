"""Does a run that is slowed in the middle keep a bound that it could keep, and does the same run
miss it where nothing is planned anew?

    python benchmarks/slowed_run.py [--policies rra,waa-c] [--out benchmarks/results]

SmolLM2-135M on two ranks of this machine, one thread each, in one copy. The bound is so many times
(BOUNDS) the tightest that the policy can meet on such stages that a run so slowed could keep it
with its margin, by smaller batches, and misses it as it was: both by replays. The run is slowed
when a quarter of its queries are done, by
  throttled   every rank is stopped for a share (STOPPED) of each tenth of a second (a processor
              that is clocked down, a container's quota)
  core taken  another process computes on the last core
and stays slowed to its end. Each is run with `run.step_times: auto` and with `run.reschedule: off`.
Counted are queries over the bound: of all, and of those begun once the run had had time to see it.
Those at work when it came keep their places, and some of them are over whatever is done: how many,
a replay says of the same queries, slowed at the same time, whose launcher is told at once by how
much (slowed_replay.py). The bound could be kept where that replay keeps it. (The machine must be
otherwise idle.)
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from slowed_replay import Replayed, in_pulses, slowed_replay, steadily

from xgpt.app.opened import open_file
from xgpt.app.plan import executable
from xgpt.core.local import cpu_cluster
from xgpt.core.schedule_file import load_schedule
from xprofiler.profile_file import load_profile
from xprofiler.profile_timing import ProfileTiming
from xprofiler.retimed import Factor
from xrunner.checkpoint.source import cache_dir

XGPT = [sys.executable, "-c", "from xgpt.cli.main import main; main()"]
SPIN = "import os\nos.sched_setaffinity(0, {max(os.sched_getaffinity(0))})\nwhile True: pass"
STOPPED, PERIOD_S = {"rra": 0.35, "waa-c": 0.5}, 0.1  # see BOUNDS
BEGINS = 0.25  # of the queries are done when the run is slowed
JOB = """\
name: slowed
model: smollm2-135m
cluster: local
workload:
  requests: {{count: {queries}}}
  input_tokens: {{mean: 48, std: 16, max: 96}}
  output_tokens: {{mean: 20, std: 6, max: 40}}
constraint: {{latency_s: {bound}, kind: queries, quantile: {quantile}, confidence: 0.9}}
schedule: {{policy: {policy}, replicas: 1, tp_degree: 1}}
run: {{ranks: 2, threads_per_rank: 1, seed: 1, {run}}}
output: {output}
"""
AUTO, OFF = "step_times: auto", "reschedule: off"
THROTTLED, TAKEN = "throttled", "core taken"
# Times the tightest bound that the policy can meet. WAA's steps take three quarters of what a
# profile says, which is measured with both ranks at the same work: a third less of the time would
# leave them about as quick as planned. Its schedules of twice to four times the tightest bound
# encode one query at a time, with the decode pool's chunks: nothing smaller is left to change to.
BOUNDS = {("rra", THROTTLED): 3.0, ("rra", TAKEN): 3.0, ("waa-c", THROTTLED): 6.0,
          ("waa-c", TAKEN): 7.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One run. Shares are of queries over the bound: of all, of those begun well after the run was
    slowed, and of all in the replay that is told at once."""

    policy: str
    slowed_by: str
    is_watched: bool
    bound_s: float
    over: float
    over_before: float
    over_after: float
    over_told: float
    p_after_s: float
    variables: Mapping[str, Any]
    decisions: list[str]
    wall_s: float

    @property
    def planned(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.variables.items()
                         if isinstance(value, int) and value)

    @property
    def line(self) -> str:
        return (f"| {self.policy} | {self.slowed_by} | {'on' if self.is_watched else 'off'} | "
                f"{self.bound_s:.2f} s | {self.over_before:.1%} | {self.p_after_s:.2f} s | "
                f"{self.over_after:.1%} | {self.over:.1%} | {self.over_told:.1%} | "
                f"{self.wall_s:.1f} s |")


class Cache:
    """A cache of the benchmark's own, which every run finds as the first measuring left it. What a
    run measured goes back into the profile: the run after a slowed one would be planned for a
    machine that is slow from its start on."""

    def __init__(self, folder: Path) -> None:
        self._now, self._kept = folder / "cache", folder / "cache-kept"
        compiled = cache_dir() / "native"
        if compiled.is_dir():
            shutil.copytree(compiled, self._now / "xgpt" / "native")

    def keep(self) -> None:
        """What is there now is what every later run begins with."""
        shutil.rmtree(self._kept, ignore_errors=True)
        shutil.copytree(self._now, self._kept)

    def again(self) -> None:
        """Back to what was kept."""
        shutil.rmtree(self._now)
        shutil.copytree(self._kept, self._now)

    def xgpt(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*XGPT, *arguments], capture_output=True, text=True, check=False,
                              env={**os.environ, "XDG_CACHE_HOME": str(self._now)})

    def call(self, *arguments: str) -> dict[str, Any]:
        done = self.xgpt(*arguments, "--json")
        assert done.returncode in (0, 4), done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found


class Slower(threading.Thread):
    """Slows the run in `output` once enough of its queries are done, until it is told to end."""

    def __init__(self, output: Path, by: str, queries: int, stopped: float) -> None:
        super().__init__(daemon=True)
        self._output, self._by, self._queries, self._stopped = output, by, queries, stopped
        self._is_over = threading.Event()
        self.began_s: float | None = None  # on the run's own clock

    def run(self) -> None:
        while not self._is_over.wait(0.1):
            elapsed_s = self._elapsed_s()
            if elapsed_s is not None:
                self.began_s = elapsed_s
                break
        if self._by == TAKEN and self.began_s is not None:
            other = subprocess.Popen([sys.executable, "-c", SPIN])
            self._is_over.wait()
            other.kill()
            other.wait()
        elif self.began_s is not None:
            self._throttle()

    def end(self) -> None:
        self._is_over.set()
        self.join()

    def _throttle(self) -> None:
        ranks = list(_ranks(str(self._output)))
        while not self._is_over.is_set():
            _signal(ranks, signal.SIGSTOP)
            time.sleep(self._stopped * PERIOD_S)
            _signal(ranks, signal.SIGCONT)
            time.sleep((1 - self._stopped) * PERIOD_S)

    def _elapsed_s(self) -> float | None:
        try:
            raw = json.loads((self._output / "progress.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        is_due = raw["state"] == "running" and raw["done"] >= BEGINS * self._queries
        return float(raw["elapsed_s"]) if is_due else None


def _ranks(output: str) -> Iterator[int]:
    """The run's own processes: those of ours whose command names its folder."""
    for folder in Path("/proc").iterdir():
        try:
            command = (folder / "cmdline").read_bytes().decode().split("\0")
        except (OSError, UnicodeDecodeError):
            continue
        if "xrunner.worker" in command and any(part.startswith(output) for part in command) and (
                "python" in command[0]):
            yield int(folder.name)


def _signal(ranks: Sequence[int], number: int) -> None:
    for rank in ranks:
        try:
            os.kill(rank, number)
        except ProcessLookupError:
            continue


def outcome(cache: Cache, folder: Path, policy: str, by: str, *, is_watched: bool,
            bound_s: float, options: argparse.Namespace) -> Outcome:
    cache.again()
    output = folder / f"{policy}-{by.replace(' ', '-')}-{is_watched}"
    job = folder / "job.yaml"
    job.write_text(JOB.format(queries=options.queries, bound=bound_s, policy=policy,
                              quantile=options.quantile, run=AUTO if is_watched else OFF,
                              output=output))
    slower = Slower(output, by, options.queries, STOPPED[policy])
    slower.start()
    metrics = cache.call("submit", str(job))
    slower.end()
    assert slower.began_s is not None, "the run was over before it was slowed"
    results = [json.loads(line) for line in (output / "results.jsonl").read_text().splitlines()]
    late = np.array([row["latency_s"] > bound_s for row in results])
    latency_s = np.array([row["latency_s"] for row in results])
    # those at work when it came, and those begun until word of it led to a change, are what a
    # change cannot help
    after = np.array([row["encode_start_s"] > slower.began_s + 2 * bound_s + SETTLING_S
                      for row in results])
    before = np.array([row["encode_start_s"] + row["latency_s"] < slower.began_s
                       for row in results])
    return Outcome(
        policy=policy, slowed_by=by, is_watched=is_watched, bound_s=bound_s, over=late.mean(),
        over_before=float(late[before].mean()),
        over_told=told_at_once(job, by, slower.began_s, results).over(bound_s),
        over_after=float(late[after].mean()) if after.any() else float("nan"),
        p_after_s=float(np.quantile(latency_s[after], options.quantile)) if after.any() else (
            float("nan")), wall_s=metrics["wall_s"]["measured"],
        variables=load_schedule(output / "schedule.json").estimate.variables,
        decisions=[f"{own['sentence']} (planned in {own['search_s']:.1f} s{_taken(own, slower)})"
                   for own in metrics["rescheduling"]])


def _taken(decision: Mapping[str, Any], slower: Slower) -> str:
    """When it was taken up, in words."""
    if decision.get("elapsed_s") is None or slower.began_s is None:
        return ""
    return f", taken up {decision['elapsed_s'] - slower.began_s:.1f} s after the slowing"


def told_at_once(job: Path, by: str, began_s: float, results: Sequence[dict[str, Any]]) -> Replayed:
    """The run's queries replayed, slowed when the run was, with a launcher that knows it."""
    opened = executable(open_file(job))
    output, schedule = opened.job.output, load_schedule(opened.job.output / "schedule.json")
    timing = ProfileTiming(load_profile(output / "profile.json"))
    if by == THROTTLED:
        stopped = STOPPED[schedule.estimate.policy]
        worked, factor = in_pulses(stopped, PERIOD_S, began_s), 1 / (1 - stopped)
    else:  # of the last stage's: a single group waits for both, several for the slow one
        worked = steadily(2.0, (schedule.deployment.stages[-1].index,), began_s)
        factor = 1.5 if schedule.deployment.num_groups == 1 else 2.0
    factors = {"decode": Factor(rows=float(schedule.figures.decode_batch), factor=factor)}
    if by == TAKEN and len(schedule.deployment.pools) > 1:  # the other pool's core is its own
        factors["encode"] = Factor(rows=1.0, factor=1.0)
    return slowed_replay(
        opened.problem, timing, schedule, worked,
        [np.array([row[key] for row in results]) for key in ("input_tokens", "output_tokens")],
        known=(began_s, factors))


SETTLING_S = 5.0  # a run looks once a second, wants two halves of a window, and plans


def tightest_of(cache: Cache, folder: Path, policy: str, options: argparse.Namespace) -> float:
    """Seconds: the tightest bound that the policy can meet, of a profile measured for all runs."""
    job = folder / "free.yaml"
    job.write_text(JOB.format(queries=options.queries, bound=0.001, policy=policy, run=AUTO,
                              quantile=options.quantile, output=folder / "free"))
    cache.call("profile", str(job), "--budget", "10s")
    cache.keep()
    refused = cache.xgpt("schedule", str(job))
    found = re.search(r"tightest that can be met is ([0-9.]+) s", " ".join(refused.stderr.split()))
    assert found is not None, refused.stderr
    return float(found[1])


def page(found: Sequence[Outcome], options: argparse.Namespace) -> str:
    share = f"{options.quantile:.0%}"
    lines = [f"# Runs that are slowed in the middle ({cpu_cluster(None).device.name}, "
             f"{datetime.date.today()})", "",
             f"SmolLM2-135M, 2 ranks, {options.queries} queries, {share} of them to keep the "
             f"bound; slowed from a quarter of the queries on: *throttled*, every rank stopped for "
             f"{', '.join(f'{stopped:.0%} ({name})' for name, stopped in STOPPED.items())} of the "
             "time (a processor that is clocked down); *core taken*, another process on the last "
             "core. *after*: queries begun once the run had had time to see it "
             f"(twice the bound and {SETTLING_S:.0f} s). *told at once*: a replay whose launcher "
             "knows when and by how much steps become slower. `benchmarks/slowed_run.py`.", "",
             f"| policy | slowed by | watched | bound | over it, before | {share} of those after | "
             "over it, after | of all | of all, told at once | run |",
             "|---|---|---|---|---|---|---|---|---|---|"]
    lines += [own.line for own in found]
    lines += ["", "Planned, both runs of a pair from the same profile:", ""]
    lines += [f"- {policy}: {words}" for policy, words in
              dict.fromkeys((own.policy, own.planned) for own in found)]
    lines += ["", "What the runs said:", ""]
    lines += [f"- {own.policy}, {own.slowed_by}: {sentence}" for own in found
              for sentence in own.decisions]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policies", default="rra,waa-c")
    parser.add_argument("--by", default=f"{THROTTLED},{TAKEN}")
    parser.add_argument("--queries", type=int, default=1500)
    parser.add_argument("--quantile", type=float, default=0.95)
    parser.add_argument("--bound", type=float, help="times the tightest, in place of BOUNDS")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory() as folder:
        cache = Cache(Path(folder))
        for policy in options.policies.split(","):
            tightest_s = tightest_of(cache, Path(folder), policy, options)
            for by in options.by.split(","):
                bound_s = round((options.bound or BOUNDS[policy, by]) * tightest_s, 2)
                for is_watched in (True, False):
                    found.append(outcome(cache, Path(folder), policy, by, is_watched=is_watched,
                                         bound_s=bound_s, options=options))
                    print(found[-1].line, *found[-1].decisions, sep="\n", file=sys.stderr,
                          flush=True)
    text = page(found, options)
    print(text)
    if options.out:
        (options.out / f"slowed-run-{datetime.date.today()}.md").write_text(
            text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
