"""Load tests of eight deployments of one model: measured beside predicted, under arriving requests.

    python benchmarks/service.py FOLDER [--only TEXT] [--seconds 60] [--again]
        [--out benchmarks/results]

Each run is one `xgpt submit` of SmolLM2-135M in float32 on CPU ranks of one thread, under Poisson
arrivals at a share of the capacity that `xgpt schedule` promises for that policy and number of
replicas. Lengths are forced (INPUTS, OUTPUTS). One batch job without arrivals answers the same
requests; each run's tokens are compared with its tokens. The launcher of two runs is killed when a
third of the answers are there, and the same command goes on. Limits: LIMITS, which ATTAINMENT of
the requests are to keep jointly.

Two replicas of WAA have four ranks, and are not among them.

FOLDER keeps what was run, and the profile, which is measured first and to which no run adds: the
same command goes on after the runs that are there. The machine must be otherwise idle. `--only`:
the runs whose name holds TEXT. `--again`: anew.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml
from bounds import USUAL
from runner import about, machine, options, table, today, write
from several_runs import DISTURBED, XGPT, SeveralRuns

import xgpt
from xgpt.app.schedule import job_with_times
from xgpt.core.problem import QueryLengths
from xgpt.core.schedule_file import load_schedule
from xgpt.core.served import ServedMetric
from xrunner.checkpoint.source import cache_dir
from xsimulator.replay.job import Replayer
from xsimulator.replay.recordings import load_recordings
from xsimulator.replay.service import counted, seconds_by_metric

MODEL, RANKS = "smollm2-135m", 2
INPUTS, OUTPUTS = USUAL
LIMITS, ATTAINMENT = {"ttft_s": 2.0, "tpot_s": 0.25}, 0.9  # chosen
WANTED, WANTED_POINTS = 0.20, 0.08  # differences wanted: of times at the median, of attainment
TIMES = {"ttft_p50_s": "TTFT P50", "ttft_p90_s": "TTFT P90",
         "tpot_p50_s": "TPOT P50", "tpot_p90_s": "TPOT P90"}
METRICS: tuple[ServedMetric, ...] = ("ttft", "tpot")
LEAST = 30  # chosen: requests of a run
ENDED_S = 5.0  # chosen: ranks end with their launcher in less


class Case(NamedTuple):
    policy: str
    replicas: int
    load: float  # share of the capacity
    is_killed: bool = False

    @property
    def name(self) -> str:
        return f"{self.policy}-{self.replicas}-{self.load:g}"


CASES = (
    Case("rra", 1, 0.5), Case("rra", 2, 0.85, is_killed=True),
    Case("waa-c", 1, 0.5), Case("waa-c", 1, 0.85),
    Case("sarathi", 2, 0.5), Case("sarathi", 1, 0.85, is_killed=True),
    Case("vllm", 1, 0.5), Case("vllm", 2, 0.85))


class Pair(NamedTuple):
    """Seconds of a metric's quantile, or shares of the requests."""

    measured: float
    predicted: float

    @property
    def ratio(self) -> float:
        return self.measured / self.predicted


class Done(NamedTuple):
    """One load test, and what was found in its folder."""

    case: Case
    rate: float
    metrics: dict[str, Any]
    served: dict[str, Any]  # of the schedule
    timed: dict[str, float]  # key -> predicted with the run's own step times; {} where killed
    lines: list[dict[str, Any]]
    killed_at: int  # answers that were there; 0: not killed
    expected: dict[str, list[int]]

    def pair(self, key: str) -> Pair:
        """A figure as measured, and as predicted for the lengths and arrivals of the run; of a run
        that was killed, whose arrivals had a gap, as planned."""
        own, (metric, _, quantile) = self.metrics["served"][key], key.partition("_")
        predicted = own["predicted"]
        if predicted is None and not quantile:
            predicted = self.served[key]
        elif predicted is None:
            predicted = next(one[quantile] for one in self.served["metrics"]
                             if one["metric"] == metric)
        return Pair(own["measured"], predicted)

    @property
    def times(self) -> list[Pair]:
        return [self.pair(key) for key in TIMES]

    @property
    def attainment(self) -> Pair:
        return self.pair("attainment")

    @property
    def num_other(self) -> int:
        """Requests whose tokens are not the batch job's."""
        return sum(line["output_ids"] != self.expected[line["id"]] for line in self.lines)


class LoadTests:
    """The folder of a round."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self._folder, self._seconds = folder.absolute(), seconds
        self._several = SeveralRuns(self._folder)
        self._model = cache_dir() / "models" / MODEL  # its folder: one shape for every command
        if not self._model.is_dir():
            sys.exit(f"{self._model}: not there; `xgpt submit jobs/quickstart.yaml` fetches it")
        self._profile = self._folder / "profile.json"
        if not self._profile.is_file():
            job = self._folder / "profile.yaml"
            job.write_text(yaml.safe_dump(self._job(CASES[0], LEAST, None)), "utf-8")
            self._said("profile")
            self._xgpt("profile", "measure", str(job), "--tp", "1", "--out", str(self._profile))

    def run(self, cases: Sequence[Case]) -> Iterator[Done]:
        """Yields the run of each case: the one that is there, or a new one."""
        rates = [case.load * self._capacity(case) for case in cases]
        counts = [max(round(self._seconds * rate), LEAST) for rate in rates]
        expected = self._batch(max(counts))
        for case, rate, count in zip(cases, rates, counts, strict=True):
            yield self._run(case, rate, count, expected)

    def _run(self, case: Case, rate: float, count: int, expected: dict[str, list[int]]) -> Done:
        place = self._folder / case.name
        if not (place / "out" / "metrics.json").is_file():
            shutil.rmtree(place, ignore_errors=True)
            job = self._job(case, count, {"rate": round(rate, 4), "process": "poisson"})
            self._submit(place, job, case, count)
        killed = place / "killed"
        return Done(case, rate, read(place / "out" / "metrics.json"),
                    read(place / "out" / "schedule.json")["served"],
                    {} if case.is_killed else with_step_times(place),
                    [json.loads(line) for line in (place / "out" / "results.jsonl").open()],
                    int(killed.read_text()) if killed.is_file() else 0, expected)

    def _xgpt(self, *words: str) -> None:
        done = self._several.xgpt(*words)
        if done.returncode != 0:
            sys.exit(f"{' '.join(words)}: exit code {done.returncode}\n{done.stderr[-2000:]}")

    def _capacity(self, case: Case) -> float:
        """Requests/s that `xgpt schedule` promises."""
        kept = self._folder / f"capacity-{case.policy}-{case.replicas}.json"
        if not kept.is_file():
            kept.with_suffix(".yaml").write_text(
                yaml.safe_dump(self._job(case, 500, {"process": "poisson"})), "utf-8")
            self._said(f"capacity of {case.policy}, {case.replicas} replicas")
            self._xgpt("schedule", str(kept.with_suffix(".yaml")), "--out", str(kept))
        return float(read(kept)["served"]["capacity"]["qps"])

    def _job(self, case: Case, count: int, arrivals: dict[str, Any] | None) -> dict[str, Any]:
        """The job of a case: a batch job without `arrivals`."""
        requests, outputs = self._requests(count)
        under = {} if arrivals is None else {"arrivals": arrivals}
        limits = {} if arrivals is None else {
            "constraint": {**LIMITS, "attainment": ATTAINMENT}}
        profile = {"profile": str(self._profile)} if self._profile.is_file() else {}
        return {"model": str(self._model), "cluster": "local", "output": "out", **limits, **profile,
                "workload": {"requests": str(requests), "input_tokens": "from_requests",
                             "output_tokens": {"mean": float(np.mean(outputs)), "max": max(outputs),
                                               "std": float(np.std(outputs))}, **under},
                "schedule": {"policy": case.policy, "replicas": case.replicas},
                "run": {"ranks": RANKS, "dtype": "float32", "threads_per_rank": 1}}

    def _requests(self, count: int) -> tuple[Path, list[int]]:
        """The file of the first `count` requests, and their output lengths."""
        rng, outputs, lines = np.random.default_rng(20261130), list[int](), list[str]()
        for number in range(count):
            size, length = INPUTS.draw(rng, 1)[0], OUTPUTS.draw(rng, 1)[0]
            tokens = rng.integers(100, 30_000, size=size).tolist()
            outputs.append(length)
            lines.append(json.dumps({"id": f"r{number:04d}", "tokens": tokens,
                                     "forced_tokens": length}) + "\n")
        path = self._folder / f"requests-{count}.jsonl"
        path.write_text("".join(lines), "utf-8")
        return path, outputs

    def _submit(self, place: Path, job: dict[str, Any], case: Case, count: int) -> None:
        """Runs the job to its end; of a case that is killed twice, its launcher killed once."""
        place.mkdir(parents=True)
        (place / "job.yaml").write_text(yaml.safe_dump(job), "utf-8")
        self._said(f"{case.name}: {count} requests")
        if case.is_killed:
            process = self._start(place)
            while answers(place) < count / 3 and process.poll() is None:
                time.sleep(0.1)
            process.send_signal(signal.SIGKILL)
            process.communicate()
            (place / "killed").write_text(str(answers(place)))
            time.sleep(ENDED_S)
        process = self._start(place)
        _, told = process.communicate()
        if process.returncode != 0:
            sys.exit(f"{case.name}: exit code {process.returncode}\n{told[-2000:]}")

    def _start(self, place: Path) -> subprocess.Popen[str]:
        environ = {**os.environ, "XDG_CACHE_HOME": str(self._folder / "cache")}
        return subprocess.Popen([*XGPT, "submit", str(place / "job.yaml"), "--json"], text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ)

    def _batch(self, count: int) -> dict[str, list[int]]:
        """Request -> its tokens in a batch job of at least so many."""
        kept = sorted(self._folder.glob("batch-*/out/metrics.json"))
        place = next((path.parents[1] for path in kept
                      if int(path.parents[1].name.partition("-")[2]) >= count), None)
        if place is None:
            case, place = Case("sarathi", 1, 0.0), self._folder / f"batch-{count}"
            shutil.rmtree(place, ignore_errors=True)
            self._submit(place, self._job(case, count, None), case, count)
        rows = map(json.loads, (place / "out" / "results.jsonl").open())
        return {row["id"]: row["output_ids"] for row in rows}

    def _said(self, words: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {words}", file=sys.stderr, flush=True)


def with_step_times(place: Path) -> dict[str, float]:
    """The figures TIMES of a replay with the run's own arrivals, lengths and step times: what they
    are apart from measured ones is due to heads, messages, and ranks that wait for each other."""
    opened, timing = job_with_times(xgpt.load(place / "job.yaml"))
    estimate = load_schedule(place / "out" / "schedule.json").estimate
    lines = [json.loads(line) for line in (place / "out" / "results.jsonl").open()]
    arrival_s = np.array([line["arrival_s"] for line in lines])
    found = {metric: np.full(len(lines), np.nan) for metric in METRICS}
    for one in load_recordings(place / "out", estimate.deployment):
        order = np.argsort(arrival_s[one.queries], kind="stable")
        outputs, rows = one.outputs[order], one.queries[order]
        result = Replayer(opened.problem, timing, estimate.one_copy).run(
            QueryLengths(inputs=one.inputs[order], outputs=outputs, most_outputs=outputs),
            arrival_s=arrival_s[rows], clocks=one.clocks())
        seconds = seconds_by_metric(result.times, outputs)
        for metric, own in found.items():
            own[rows] = seconds[metric]
    kept = counted(arrival_s)
    return {f"{metric}_p{share}_s": float(np.nanquantile(own[kept], share / 100))
            for metric, own in found.items() for share in (50, 90)}


def read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text("utf-8")))


def answers(place: Path) -> int:
    """Answers that are on disk."""
    return sum((place / "out" / name).read_bytes().count(b"\n")
               for name in ("results.jsonl", "held.jsonl") if (place / "out" / name).is_file())


def row(done: Done) -> str:
    case = done.case
    cells = [f"{pair.measured:.3f} / {pair.predicted:.3f}"
             + (f" ({done.timed[key]:.3f})" if done.timed else "")
             for key, pair in zip(TIMES, done.times, strict=True)]
    killed = "" if not done.killed_at else f", killed at {done.killed_at}"
    ids = {line["id"] for line in done.lines}
    whole = f"{len(ids)} of {len(done.lines)}{killed}"
    others = done.metrics.get("others_cpu_share") or 0.0
    return (f"| {case.policy} | {case.replicas} | {case.load:g} | {done.rate:.2f} | {whole} | "
            f"{' | '.join(cells)} | {done.attainment.measured:.1%} / "
            f"{done.attainment.predicted:.1%} | {done.num_other} | {others:.0%} |")


def summary(found: list[Done]) -> Iterator[str]:
    """Yields a sentence for each figure that is wanted."""
    for at, words in enumerate(TIMES.values()):
        off = [abs(done.times[at].ratio - 1) for done in found]
        yield (f"{words}: off by {statistics.median(off):.0%} at the median of {len(found)} runs "
               f"(wanted: {WANTED:.0%}), {max(off):.0%} at worst.")
    apart = [abs(done.attainment.measured - done.attainment.predicted) for done in found]
    yield (f"Attainment: {100 * max(apart):.1f} points apart at worst (wanted: "
           f"{100 * WANTED_POINTS:.0f}).")
    yield (f"Tokens: {sum(done.num_other for done in found)} of "
           f"{sum(len(done.lines) for done in found)} answers differ from the batch job's.")
    disturbed = [done.case.name for done in found
                 if (done.metrics.get("others_cpu_share") or 0.0) > DISTURBED]
    if disturbed:
        yield f"Other programs disturbed {', '.join(disturbed)}."


def misses(done: Done) -> Iterator[str]:
    """Yields a sentence for each time that is off by more than WANTED, with its cause."""
    for (key, words), pair in zip(TIMES.items(), done.times, strict=True):
        if abs(pair.ratio - 1) <= WANTED:
            continue
        cause = "killed, so its own step times were not replayed"
        if done.timed:
            part = (done.timed[key] - pair.predicted) / (pair.measured - pair.predicted)
            cause = f"{part:.0%} of the difference are step times"
        yield (f"{done.case.name}, {words}: {pair.measured:.3f} s, predicted {pair.predicted:.3f} "
               f"s; {cause}.")


def page(found: list[Done]) -> str:
    header = ("policy", "replicas", "of capacity", "requests/s", "requests, lines",
              *(f"{words} (s)" for words in TIMES.values()),
              "attainment", "other tokens", "others' CPU")
    limits = ", ".join(f"{key} {value:g}" for key, value in LIMITS.items())
    return "\n".join([
        f"# Load tests against their prediction, {today()}", "", about(__doc__), "",
        f"{machine()}. INPUTS: {INPUTS.words}, OUTPUTS: {OUTPUTS.words}, LIMITS: {limits}, "
        f"ATTAINMENT: {ATTAINMENT:g}. Figures are measured / predicted for the run's arrivals. In "
        "brackets: replayed with the run's own step times; where these are near the measured "
        "figures, step times explain a difference, else heads, messages and waiting do.", "",
        *table(header), *map(row, found), "", *(f"- {line}" for line in summary(found)), "",
        f"Times that are off by more than {WANTED:.0%}:", "",
        *([f"- {line}" for done in found for line in misses(done)] or ["- none"])])


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--seconds", type=float, default=60.0, help="of arrivals, of each run")
    parser.add_argument("--again", action="store_true")
    arguments = parser.parse_args()
    if arguments.again:
        shutil.rmtree(arguments.folder, ignore_errors=True)
    tests = LoadTests(arguments.folder, arguments.seconds)
    found = list(tests.run([case for case in CASES if arguments.only in case.name]))
    write("service", page(found), arguments.out)


if __name__ == "__main__":
    main()
