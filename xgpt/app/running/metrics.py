"""Writes metrics.json: measured figures beside predicted ones, and the causes of the difference.
Adds a run's step times, by kind, to the cached profile that it was planned with.

So the next job measures nothing, and a quick profile improves with each run. Only complete runs
count that others did not disturb and whose steps took as long at the end as at the beginning."""

import json
import math
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from xgpt.app.opened_job import OpenedJob
from xgpt.app.running.deadlines import deadline_facts
from xgpt.app.running.forecast_figures import forecast_figures
from xgpt.app.running.predictions import for_lengths
from xgpt.core.errors import XgptError
from xgpt.core.lengths import IntArray
from xgpt.core.problem import Problem, QueryLengths
from xgpt.core.schedule import Schedule
from xgpt.core.schedule_file import plain, write_json
from xgpt.core.system.machine import NOTICEABLE_SHARE, contention_words
from xgpt.core.system.whole_file import read_object
from xgpt.core.units import INT8
from xgpt.launch.launcher import RankProgram, launcher_of, threads_per_rank
from xgpt.report.figures import check_bounds, kept_facts, was_changed
from xgpt.report.output import Output, read_output, text_at
from xgpt.report.page import MAX_ANSWERS, write_page
from xgpt.report.replicas import replica_facts
from xgpt.report.results_file import write_results
from xgpt.report.run_screen import end_screen
from xgpt.report.service_run import service_facts
from xgpt.report.table import shown, summary_table
from xgpt.report.words import agreement_words, clean, counted, operators_words
from xgpt.run_folder.files import MESSAGES_FILE, METRICS_FILE, RESULTS_FILE, START_FILE
from xprofiler.profile import LearnedSteps, Profile, cached_profile_path, changing
from xprofiler.profile_file import load_profile, save_profile
from xprofiler.profile_timing import LEARNED_KEPT, ProfileTiming
from xprofiler.timing import TimingSource
from xrunner.checkpoint.source import cache_dir
from xrunner.files.heartbeat import ReportedStep
from xrunner.plan import AGREEMENT_FILE, RunPlan
from xscheduler.evaluator import in_run_order, job_lengths
from xscheduler.live.step_monitor import KINDS, Ratio, Ratios
from xsimulator.memory import kv_bytes
from xsimulator.replay.job import Replayer
from xsimulator.replay.prediction import MOST_PREDICTED, JobPrediction
from xsimulator.replay.recordings import Recording, load_recordings

LEAST_STEPS = 30  # of a kind on a stage, for a run's times to count
# or so few that took so long together: a job of few queries encodes them in a few long steps
_FEW_STEPS, LONG_S = 3, 1.0
_MOST_STEPS = 2000  # the latest of a stage, which are used
PASSING = 1.3  # factor by which a kind's last third may be slower or quicker than its first
_EXTREME = 0.1  # share of a kind's steps that is left out, half at each end of their ratios


def write_metrics(opened: OpenedJob, timing: TimingSource | None, schedule: Schedule | None,
                  measured: Mapping[str, Any], prediction: JobPrediction | None, *,
                  learned: str = "", **own: Any) -> dict[str, Any]:
    """Writes metrics.json and the report, prints the end of the screen, and returns the content of
    metrics.json: each measured figure beside its prediction (None where there is none), the keys in
    `own`, and the causes of the difference. `timing`, `schedule`: where they are known. `learned`:
    words for what the run added to the profile."""
    output, tell, after, replayed = opened.job.output, opened.tell, None, None
    read = read_output(output, MAX_ANSWERS)  # once: ten million queries take much memory
    is_service = opened.problem.arrivals is not None
    if (prediction is not None or is_service) and timing and schedule and (
            found := for_lengths(opened.problem, timing, schedule, read)):
        after, replayed = found
    expected = after or prediction
    metrics = {**_measured_beside_predicted(opened, schedule, measured, expected),
               **deadline_facts(measured, expected), **replica_facts(measured, expected),
               **service_facts(read.queries, schedule, replayed),
               "is_predicted_for_lengths": after is not None, **own}
    # a replay of the first schedule says nothing about a run that changed it
    why = attribute(opened.problem, timing, schedule, output, prediction.wall_s) if (
        prediction is not None and not measured["changes"] and timing and schedule
        and not is_service) else None
    metrics["attribution"] = None if why is None else {**asdict(why), "sentence": why.sentence}
    forecasts = forecast_figures(output, read.queries)
    metrics["forecast"] = None if forecasts is None else {
        **asdict(forecasts), "sentence": forecasts.sentence}
    left = replace(read, metrics=metrics, schedule=schedule,
                   queries_before=measured["queries_before"])
    # with those of the ranks' earlier starts
    metrics["failed"] = max(metrics["failed"], left.queries.reasons()["error"])
    metrics |= kept_facts(checks := check_bounds(left))
    write_json(output / METRICS_FILE, metrics)
    notes = [*_notes(opened, left, learned)]
    files = {"answers": shown(output / RESULTS_FILE)}
    if metrics["status"] == "done":
        (output / START_FILE).unlink(missing_ok=True)
    if opened.job.results is not None and (metrics["status"] == "done" or metrics.get("expired")):
        sentence = write_results(output, opened.job.results, opened.job.quote_formulas)
        files["answers"] = shown(opened.job.results)
        notes += filter(None, [sentence.partition("; ")[2]])
    files["report"] = _report(replace(left, metrics=plain(metrics)))  # it links the table
    files["next"] = ("the same command goes on" if metrics.get("status") == "stopped" else
                     f"xgpt explain {shown(output)}   why this schedule")
    tell.say(end_screen(metrics, checks, notes, files))
    tell.detail(summary_table(metrics, (
        *(check.sentence for check in checks if check.is_kept is not None), *notes)))
    return metrics


def _report(left: Output) -> str:
    """Writes the report; returns its path, or why it was not written (which fails no run)."""
    try:
        return shown(write_page(left))
    except OSError as cause:
        return f"not written ({cause.filename}: {cause.strerror}): `xgpt report` writes it"


def _notes(opened: OpenedJob, output: Output, learned: str) -> Iterator[str]:
    """Yields sentences that a user needs beside the run's figures, the worst first."""
    metrics = output.metrics or {}
    yield from (check.sentence for check in check_bounds(output) if check.is_kept is False)
    for first in output.errors[:1]:
        yield clean(f"the first error, in line {first.get('line')} of the requests: "
                    f"{first.get('error')}")
    if output.remarks:
        yield f"{' '.join(output.remarks)} Those lines are not counted."
    known, reasons = opened.problem.queries, output.queries.reasons()
    is_wished = opened.job.run.ignore_eos or (known is not None and known.outputs is not None)
    if (cut := reasons["length"]) and not is_wished:
        caps = set() if known is None else set(known.most_outputs.tolist())
        at = f"max_tokens={caps.pop()}" if len(caps) == 1 else "their max_tokens"
        yield (f"{cut} of {len(output.queries):,} answers were truncated at {at} "
               "(raise workload.max_tokens)")
    if was_changed(metrics):
        count = len(metrics["rescheduling"])
        yield (f"the schedule was changed during the run ({counted(count, 'decision')}: see "
               f"{MESSAGES_FILE}); the prediction is for the first one")
    words = text_at(metrics, "attribution", "sentence") or ""
    if (warning := contention_words(metrics["others_cpu_share"])) is not None:
        yield warning
    elif "slower" in words and not metrics["is_predicted_for_lengths"]:
        yield words
    yield from filter(None, (operators_words(metrics), learned,
                             text_at(metrics, "forecast", "sentence")))


def _measured_beside_predicted(opened: OpenedJob, schedule: Schedule | None,
                               measured: Mapping[str, Any],
                               prediction: JobPrediction | None) -> dict[str, Any]:
    # the prediction is for the whole job: not for half of one, or the rest of a resumed one. It
    # holds for a job whose schedule was changed: that is the job whose duration was predicted
    is_whole = measured["state"] == "done" and measured["queries_before"] == 0

    def pair(key: str) -> dict[str, float | None]:
        expected = getattr(prediction, key, None) if is_whole else None
        return {"measured": measured.get(key), "predicted": expected}

    keys = ("throughput_qps", "output_tokens_per_s", "latency_p50_s", "latency_p99_s", "ttft_p50_s",
            "ttft_p99_s", "tpot_p50_s", "tpot_p99_s", "wall_s", "load_s", "overhead_share")
    job, cluster = opened.job, opened.problem.cluster
    assert opened.files is not None
    # planned bytes of KV cache per rank, by stage
    planned = dict(enumerate(
        int(held) for pool in (schedule.estimate.all_pools if schedule else ())
        for held in kv_bytes(opened.problem, pool.stages, pool.kv_tokens)))
    return {
        "version": 1, "name": job.name, "status": measured["state"], "engine": job.run.engine,
        "queries": measured["queries_before"] + measured["queries"],
        "queries_held": measured["queries_held"], "errors": measured["errors"],
        "failed": measured.get("failed", 0),
        "queries_before": measured["queries_before"], **{key: pair(key) for key in keys},
        "steady_state_qps": schedule.estimate.figures.throughput_qps if schedule else None,
        "load_bytes_per_s": None if measured["load_s"] is None else (
            measured["loaded_bytes"] / max(measured["load_s"], 1e-9)),
        "loaded_bytes": measured["loaded_bytes"], "operators": measured.get("operators"),
        "model_source": opened.files.served_by, "weights": job.run.weights,
        "ranks": schedule.estimate.num_devices if schedule else None, "dtype": opened.problem.dtype,
        "weight_dtype": opened.problem.weight_dtype,
        "date": datetime.now().astimezone().isoformat("T", "seconds"),
        "machine": {"device": cluster.device.name,
                    "threads_per_rank": threads_per_rank(job, opened.problem),
                    "system": f"{platform.system()} {platform.machine()}",
                    "python": platform.python_version(), "numpy": np.__version__},
        "stages": [{**stage, "kv_planned_bytes": planned.get(stage["stage"])}
                   for stage in measured["stages"]],
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    """Causes of the difference between a run's predicted and measured seconds: predicted, replayed
    with the run's lengths, replayed with its step times too, and measured (the rest: the head,
    messages, and ranks that wait for each other). `same_steps`: share of the replay's steps that
    had the recorded size."""

    predicted_s: float
    with_lengths_s: float
    with_times_s: float
    measured_s: float
    same_steps: float

    @property
    def sentence(self) -> str:
        """One sentence with the total difference in % and the part of each cause."""
        def change(to_s: float, from_s: float) -> str:
            return f"{100 * (to_s / from_s - 1):+.0f} %"

        total = self.measured_s / self.predicted_s - 1
        return (f"{abs(total):.0%} {'slower' if total > 0 else 'faster'} than predicted: output "
                f"lengths {change(self.with_lengths_s, self.predicted_s)} of the time, step times "
                f"{change(self.with_times_s, self.with_lengths_s)}, the rest "
                f"{change(self.measured_s, self.with_times_s)}")


def attribute(problem: Problem, timing: TimingSource, schedule: Schedule, output: Path,
              predicted_s: float) -> Attribution | None:
    """Attributes the duration of the run in `output` to its causes. Of several replicas the last to
    finish decides. Returns None for a run that was stopped or resumed, is longer than the log, has
    more queries than a prediction replays, or replicas of several shapes."""
    estimate = schedule.estimate
    if (problem.num_queries or 0) > MOST_PREDICTED or estimate.others:
        return None
    try:
        recordings = load_recordings(output, estimate.deployment)
        known = _answered_lengths(problem, schedule, sum(
            len(recording.queries) for recording in recordings))
        order = in_run_order(problem, estimate, known)
        replayer = Replayer(problem, timing, estimate.one_copy)
        parts = [_part(replayer, recording, order if len(recordings) == 1 else None, known)
                 for recording in recordings if len(recording.queries)]
    except (XgptError, OSError, ValueError, LookupError, TypeError, AttributeError,
            AssertionError):  # an explanation must not end a run, whatever its record holds
        return None
    return Attribution(
        predicted_s=predicted_s, with_lengths_s=max(part.own_s for part in parts),
        with_times_s=max(part.timed_s for part in parts), measured_s=recordings[0].wall_s,
        same_steps=sum(part.matched for part in parts) / max(sum(part.steps for part in parts), 1))


class _Part(NamedTuple):
    """Replayed seconds of one replica, with planned and with recorded step times, and counts of the
    replay's steps: of the recorded size, and all."""

    own_s: float
    timed_s: float
    matched: int
    steps: int


def _part(replayer: Replayer, recording: Recording, order: IntArray | None,
          known: QueryLengths) -> _Part:
    """Replays one replica's recording. `order`: of its queries, where the recording has another
    than the run. `known`: caps and forecasts of the job's queries, by which it admitted them."""
    rows = np.arange(len(recording.queries)) if order is None else order
    queries = replace(known.take(recording.queries[rows]), inputs=recording.inputs[rows],
                      outputs=recording.outputs[rows])
    own, clocks = replayer.run(queries), recording.clocks()
    timed = replayer.run(queries, clocks=clocks)
    return _Part(own.makespan_s, timed.makespan_s, sum(clock.num_matched for clock in clocks),
                 sum(clock.num_steps for clock in clocks))


def _answered_lengths(problem: Problem, schedule: Schedule, num_queries: int) -> QueryLengths:
    """Lengths as planned of the `num_queries` requests that a run answered. Raises XgptError where
    others can run."""
    known = job_lengths(problem, schedule.estimate)
    if known is None or len(known.inputs) != num_queries:
        raise XgptError(f"the run answered {num_queries} requests, others can run")
    return known


def learn(opened: OpenedJob, timing: TimingSource, schedule: Schedule,
          others_share: float | None) -> tuple[LearnedSteps, ...]:
    """Adds the step times of the run in the job's folder to the cached profile; returns what was
    added: nothing where the profile is not the cached one or the run was disturbed."""
    if not (isinstance(timing, ProfileTiming) and opened.is_local and opened.job.profile is None):
        return ()
    if others_share is not None and others_share >= NOTICEABLE_SHARE:
        return ()
    path = cached_profile_path(cache_dir() / "profiles", timing.profile.metadata)
    if not path.is_file():
        return ()
    found = learned_of(opened, timing.profile, schedule, opened.job.output / "steps.jsonl")
    try:
        if found:
            add(found, path)
        return found
    except OSError as error:  # the run is done, and stays so
        opened.tell.say(f"note: this run's steps are not added to the profile: {error}")
        return ()


def add(found: Sequence[LearnedSteps], path: Path) -> None:
    """Adds a run's step times to the profile at `path`, under its lock."""
    with changing(path.parent):
        known = load_profile(path)
        kept = [own for kind in KINDS for own in (
            *(own for own in known.learned if own.kind == kind),
            *(own for own in found if own.kind == kind))[-LEARNED_KEPT:]]
        save_profile(replace(known, learned=tuple(kept)), path)


def learned_of(opened: OpenedJob, profile: Profile, schedule: Schedule,
               steps: Path) -> tuple[LearnedSteps, ...]:
    """Compares the steps in the log `steps` with the profile's times: per kind of step, the factor
    and its spread on the slowest stage. Empty for replicas of several shapes."""
    if schedule.estimate.others:
        return ()
    own = ProfileTiming(replace(profile, learned=()))
    lengths, known = opened.problem.lengths, opened.problem.queries
    longest = max(lengths.inputs.max + lengths.outputs.max,
                  0 if known is None else int(known.reserves.max(initial=1)))
    ratios = Ratios(opened.problem, own, schedule.estimate, longest=longest)
    by_place: dict[tuple[int, str], list[Ratio]] = {}
    for line in steps.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row["kind"] not in KINDS:
            continue
        step = ReportedStep(
            row["kind"], row["queries"], row["tokens"], row["decoded"], row["context_tokens"],
            row["longest_context"], row["input_tokens"], row["end_s"] - row["start_s"])
        if (ratio := ratios.of(row["stage"], step)) is not None:
            by_place.setdefault((row["stage"], step.kind), []).append(ratio)
    found = []
    for kind in KINDS:
        stages = [taken[-_MOST_STEPS:] for (_, own_kind), taken in by_place.items()
                  if own_kind == kind and _tell(taken)]
        if not stages:
            continue
        slowest = max(stages, key=factor_of)
        if _is_passing(slowest):
            continue
        factor = factor_of(slowest)
        low, high = np.exp(np.quantile([own.log for own in slowest], (0.25, 0.75)))
        found.append(LearnedSteps(
            kind=kind, rows=float(np.median([own.rows for own in slowest])),
            factor=round(factor, 4), spread=round(float(high - low) / factor, 4),
            steps=len(slowest), date=date.today().isoformat()))
    return tuple(found)


def _tell(ratios: Sequence[Ratio]) -> bool:
    """Whether these steps are enough to predict others of their kind."""
    took_s = sum(own.expected_s * math.exp(own.log) for own in ratios)
    return len(ratios) >= LEAST_STEPS or (len(ratios) >= _FEW_STEPS and took_s >= LONG_S)


def _is_passing(ratios: Sequence[Ratio]) -> bool:
    """Whether these steps became slower or quicker while the run lasted."""
    third = len(ratios) // 3
    change = factor_of(ratios[-third:], 2 * _EXTREME) / factor_of(ratios[:third], 2 * _EXTREME)
    return not 1 / PASSING <= change <= PASSING


def factor_of(ratios: Sequence[Ratio], extreme: float = _EXTREME) -> float:
    """Ratio of measured to expected seconds, summed over these steps without the `extreme` share of
    them. A job's time is such a sum, in which long steps count most."""
    logs, expected_s = np.array([(own.log, own.expected_s) for own in ratios]).T
    low = np.quantile(logs, extreme / 2, method="lower")  # of a few steps all are kept
    high = np.quantile(logs, 1 - extreme / 2, method="higher")
    kept = (logs >= low) & (logs <= high)
    return float(np.sum(expected_s[kept] * np.exp(logs[kept])) / np.sum(expected_s[kept]))


def agreement_of(opened: OpenedJob, plan: RunPlan, run_file: Path,
                 lock: int) -> dict[str, Any] | None:
    """Counts of inputs, positions and agreeing tokens between int8 and the original weights, read
    from agreement.json, or measured first if it is not of this run; None for a run that does not
    quantize. Raises XgptError."""
    if plan.weight_dtype != INT8:
        return None
    path = plan.output / AGREEMENT_FILE
    known = read_object(path)
    if known.get("fingerprint") != plan.fingerprint:
        opened.tell.say(f"comparing {INT8} with {plan.dtype} on the job's own inputs")
        launcher_of(opened.job, opened.problem).run(
            RankProgram(module="xrunner.rank.agreement", argument=run_file, count=1,
                        inherited=(lock,)),
            watch=lambda: None)
        known = read_object(path)
    agreement = {key: known[key] for key in ("inputs", "positions", "agreeing")}
    said = agreement_words({"agreement": agreement, "weight_dtype": plan.weight_dtype,
                            "dtype": plan.dtype})
    assert said is not None, f"{agreement = }"
    opened.tell.say(said)
    return agreement
