"""One run of a schedule: files laid out, ranks started and watched, measured beside predicted."""

from __future__ import annotations

import json
import platform
import textwrap
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from xgpt.app.attribution import attribute
from xgpt.app.intake import made
from xgpt.app.progress import tell_run
from xgpt.app.replays import replay_steady, steady_timeline
from xgpt.app.resume import TAKEN_OVER, account, is_left_whole
from xgpt.app.session import Session
from xgpt.app.telling import Teller
from xgpt.app.watch import Rescheduler, decisions_with_phases, rescheduler_of
from xgpt.core.errors import StoppedEarly, XgptError
from xgpt.core.job import Job
from xgpt.core.json_values import plain
from xgpt.core.policies import policy
from xgpt.core.requests import Requests
from xgpt.core.schedule import Schedule
from xgpt.core.schedule_file import load_schedule, save_schedule
from xgpt.core.spool import SpoolWriter, num_queries
from xgpt.launch.contention import Contention, in_words
from xgpt.launch.launcher import RankProgram, threads_per_rank
from xgpt.launch.rows import launcher_of
from xgpt.report.output import EXPECTED_TIMELINE
from xgpt.report.page import write_report
from xgpt.report.table import WIDTH, summary_table
from xprofiler.profile_file import save_profile
from xprofiler.profile_timing import ProfileTiming
from xprofiler.timing import TimingSource
from xrunner.checkpoint.random_model import write_random_model
from xrunner.engines.engine import engine_of
from xrunner.io.held import HELD_FILE
from xrunner.io.launcher_link import ADJUST_FILE, OBSERVED_FILE
from xrunner.io.lock import output_lock
from xrunner.io.prepare import hand_on
from xrunner.io.results import answered
from xrunner.plan import RunPlan, saved_fingerprint, write_atomically
from xrunner.rules.order import window_of
from xscheduler.beginning import said_of
from xscheduler.prediction import predict

STOP_FILE, RESULTS_FILE = "stop", "results.jsonl"


def execute(session: Session, timing: TimingSource, schedule: Schedule) -> dict[str, Any]:
    """Runs `schedule`; returns what metrics.json holds, and where the results are. Raises
    StoppedEarly after a polite stop, XgptError if another run is writing in the folder."""
    # held from the first file to the last: what the ranks read must be what was written here
    with output_lock(session.job.output) as lock:
        return _execute(session, timing, schedule, lock)


def _execute(session: Session, timing: TimingSource, schedule: Schedule,
             lock: int) -> dict[str, Any]:
    output = session.job.output
    requests, spool = _requests(session)
    plan = _plan(session, schedule, requests.digest)
    if is_left_whole(plan):
        return _take_over(session, timing, schedule)
    rescheduler = rescheduler_of(session, timing, schedule)
    if rescheduler is not None:
        plan = replace(plan, is_watched=True, slots=rescheduler.slots)
    _make_room(output, plan, session.tell)
    hand_on(requests, spool, plan, session.problem.model)
    save_schedule(schedule, output / "schedule.json")
    if isinstance(timing, ProfileTiming):
        save_profile(timing.profile, output / "profile.json")
    write_atomically(output / "job.json", json.dumps(plain(_job(session)), indent=1) + "\n")
    prediction, beginning = None, said_of(schedule)
    (output / EXPECTED_TIMELINE).unlink(missing_ok=True)
    if beginning is not None:  # what is expected of it is what the job is not left with
        session.tell.say(textwrap.fill(f"note: {beginning}", WIDTH))
    elif engine_of(session.job).is_predicted:  # else nothing is known of the engine's times
        prediction = predict(session.problem, timing, schedule.estimate)
        replayed, _ = replay_steady(session, timing, schedule.estimate)
        write_atomically(output / EXPECTED_TIMELINE,
                         steady_timeline(session, schedule.estimate, replayed).inline() + "\n")
    run_file = plan.save()
    contention = Contention()
    _start(session, schedule, run_file, lock, rescheduler)
    others_share = contention.others_share()
    measured = json.loads((output / "measured.json").read_text(encoding="utf-8"))
    metrics = _metrics(session, schedule, measured, prediction)
    metrics["others_cpu_share"] = others_share
    metrics["beginning"] = beginning
    metrics["rescheduling"] = [] if rescheduler is None else decisions_with_phases(
        rescheduler.decisions, measured["changes"])
    _explain(metrics, session, timing, schedule, measured, prediction)
    _write(metrics, output, session.tell)
    if measured["state"] == "stopped":
        raise _stopped(session, metrics, measured["queries_held"])
    return {**metrics, **_kept(session)}


def _take_over(session: Session, timing: TimingSource, schedule: Schedule) -> dict[str, Any]:
    """As `execute`, of results that are all there."""
    output = session.job.output
    session.tell.say(textwrap.fill(TAKEN_OVER, WIDTH))
    measured, executed = account(output), load_schedule(output / "schedule.json")
    is_same = (_executed(executed) == _executed(schedule)
               and engine_of(session.job).is_predicted)
    # of another schedule, or by other times, it would not be what this run was expected to take
    prediction = (predict(session.problem, timing, executed.estimate)
                  if is_same and measured["stages"] else None)
    metrics = _metrics(session, executed, measured, prediction)
    metrics |= {"others_cpu_share": None, "rescheduling": []}
    _explain(metrics, session, timing, executed, measured, prediction)
    _write(metrics, output, session.tell)
    return {**metrics, **_kept(session)}


def _executed(schedule: Schedule) -> tuple[object, ...]:
    """What is executed. (The memory that there is to plan with changes from hour to hour.)"""
    controls, names = schedule.controls, policy(schedule.controls.policy).variable_names
    return schedule.deployment.stages, *(getattr(controls, name) for name in ("policy", *names))


def _explain(metrics: dict[str, Any], session: Session, timing: TimingSource, schedule: Schedule,
             measured: Mapping[str, Any], prediction: Any) -> None:
    # a replay of what was planned says nothing of a run that changed it
    why = None if prediction is None or measured["changes"] else attribute(
        session, timing, schedule, session.job.output, prediction.wall_s)
    metrics["attribution"] = None if why is None else {**asdict(why), "sentence": why.sentence}


def _write(metrics: dict[str, Any], output: Path, tell: Teller) -> None:
    """metrics.json, the report, and a summary."""
    write_atomically(output / "metrics.json", json.dumps(plain(metrics), indent=1) + "\n")
    write_report(output)
    tell.say(summary_table(metrics))
    if (warning := in_words(metrics["others_cpu_share"])) is not None:
        tell.say(f"note: {warning}")
    tell.say(f"report: {output / 'report.html'}")


def _stopped(session: Session, metrics: dict[str, Any], num_held: int) -> StoppedEarly:
    held = f" ({num_held} of them wait in {HELD_FILE} for one before them)" if num_held else ""
    stop = StoppedEarly(f"stopped after {metrics['queries']} queries{held}; the same command goes "
                        "on from there")
    stop.details = {**metrics, **_kept(session)}
    return stop


def _plan(session: Session, schedule: Schedule, digest: str) -> RunPlan:
    """`digest`: of the requests."""
    job, files = session.job, session.files
    assert files is not None, "a run needs the model's files"
    if job.run.weights == "random":
        write_random_model(files.directory, files.spec)
    query_tokens = schedule.estimate.deployment.group_kv_tokens
    most_input = schedule.estimate.deployment.encoding.kv_tokens
    # what no request needs decides nothing: a run may go on by another schedule
    if (longest := _longest(session)) is not None:
        query_tokens = min(query_tokens, longest.reserve_tokens)
        most_input = 0 if most_input >= longest.input_tokens else most_input
    return RunPlan(
        name=job.name, output=job.output, model_dir=files.directory, model_name=job.model,
        served_by=files.served_by, requests=f"{job.workload.requests or 'synthetic'} {digest}",
        is_chat=job.workload.chat, max_tokens=session.problem.default_max_tokens,
        dtype=session.problem.dtype, seed=job.run.seed, temperature=job.run.temperature,
        top_k=job.run.top_k, top_p=job.run.top_p, ignore_eos=job.run.ignore_eos,
        threads_per_rank=threads_per_rank(session.job, session.problem),
        query_kv_tokens=query_tokens, most_input_tokens=most_input, engine=job.run.engine,
        shuffle_window=window_of(job.adjustment.shuffle, schedule.estimate.figures.encode_batch),
        device_kind=session.problem.cluster.device.kind)


class _Longest(NamedTuple):
    """Tokens of the longest request that the model can answer."""

    input_tokens: int
    reserve_tokens: int


def _longest(session: Session) -> _Longest | None:
    """None where lengths are not known. The other requests become error records whatever the
    schedule is."""
    known = session.problem.queries
    if known is None:
        return None
    requests, inputs, reserves = session.requests, known.inputs, known.reserves
    assert requests is not None, "their lengths are known"
    least = inputs + np.maximum(requests.forced, 1)
    fits = least <= (session.problem.model.max_positions or np.inf)
    fits[list(requests.unusable)] = False
    return _Longest(int(inputs[fits].max(initial=1)), int(reserves[fits].max(initial=1)))


def _requests(session: Session) -> tuple[Requests, SpoolWriter]:
    if session.requests is None:
        return made(session.problem, session.job.run.seed)
    assert session.spool is not None, "a run has its requests at hand"
    return session.requests, session.spool


def _make_room(output: Path, plan: RunPlan, tell: Teller) -> None:
    """A stopped run of the same job goes on; any other results are kept under another name."""
    (output / STOP_FILE).unlink(missing_ok=True)
    for name in ("measured.json", "metrics.json", "steps.jsonl", "progress.json", ADJUST_FILE,
                 OBSERVED_FILE):
        (output / name).unlink(missing_ok=True)
    results = output / RESULTS_FILE
    before, total = answered(results), num_queries(output)
    if saved_fingerprint(output) == plan.fingerprint and (total is None or before.total < total):
        if before.total:
            tell.say(f"going on after the {before.total} queries an earlier run answered")
        return
    for path in (results, output / HELD_FILE):
        if path.is_file() and path.stat().st_size > 0:
            kept = _free_name(path)
            path.rename(kept)
            tell.say(f"results of an earlier run kept as {kept.name}")


def _free_name(path: Path) -> Path:
    """Of the time of its last line, and like no other's: earlier results are never written over."""
    stamp = datetime.fromtimestamp(path.stat().st_mtime).strftime("%Y%m%d-%H%M%S")
    free, count = path.with_name(f"{path.stem}-{stamp}{path.suffix}"), 1
    while free.exists():
        count += 1
        free = path.with_name(f"{path.stem}-{stamp}-{count}{path.suffix}")
    return free


def _start(session: Session, schedule: Schedule, run_file: Path, lock: int,
           rescheduler: Rescheduler | None) -> None:
    output, tell = session.job.output, session.tell

    def watch() -> None:
        tell_run(tell, output / "progress.json", schedule.bound.limit_s)
        if rescheduler is not None and rescheduler.update():
            tell.end_progress()  # what it has to say gets lines of its own
            tell.say(textwrap.fill(rescheduler.decisions[-1].sentence, WIDTH))

    ranks = RankProgram(module=engine_of(session.job).worker, argument=run_file,
                  count=sum(stage.tp_degree for stage in schedule.estimate.deployment.stages),
                  inherited=(lock,))
    try:
        launcher_of(session.job, session.problem).run(
            ranks, watch=watch, ask_to_stop=lambda: (output / STOP_FILE).touch())
        if not (output / "measured.json").is_file():
            raise StoppedEarly("ended before the run could stop in good order; what was done is "
                               "kept, and the same command goes on from there")
    except XgptError as error:
        error.details = _kept(session)
        raise
    finally:
        tell.end_progress()
        for name in (OBSERVED_FILE, ADJUST_FILE):
            (output / name).unlink(missing_ok=True)


def _kept(session: Session) -> dict[str, Any]:
    """What is known of a run that did not come to its end, by the keys of metrics.json."""
    output = session.job.output
    results = output / RESULTS_FILE
    return {"name": session.job.name, "engine": session.job.run.engine,
            "queries": answered(results).total, "queries_total": num_queries(output),
            "results": results}


def _metrics(session: Session, schedule: Schedule, measured: Mapping[str, Any],
             prediction: Any) -> dict[str, Any]:
    """metrics.json: every measured figure beside its prediction (None where there is none)."""
    # what was predicted is the whole job by one schedule: half of one, a resumed rest, or a job
    # whose schedule changed, measures something else
    is_whole = (measured["state"] == "done" and measured["queries_before"] == 0
                and not measured.get("changes"))

    def pair(key: str) -> dict[str, float | None]:
        expected = getattr(prediction, key, None) if is_whole else None
        return {"measured": measured.get(key), "predicted": expected}

    keys = ("throughput_qps", "output_tokens_per_s", "latency_p50_s", "latency_p99_s", "ttft_p50_s",
            "ttft_p99_s", "tpot_p50_s", "tpot_p99_s", "wall_s", "load_s", "overhead_share")
    cluster = session.problem.cluster
    assert session.files is not None
    return {
        "version": 1, "name": session.job.name, "status": measured["state"],
        "engine": session.job.run.engine,
        "queries": measured["queries_before"] + measured["queries"],
        "queries_held": measured["queries_held"], "errors": measured["errors"],
        "queries_before": measured["queries_before"], **{key: pair(key) for key in keys},
        "steady_state_qps": schedule.estimate.figures.throughput_qps,
        "load_bytes_per_s": None if measured["load_s"] is None else (
            measured["loaded_bytes"] / max(measured["load_s"], 1e-9)),
        **{key: measured[key] for key in (
            "loaded_bytes", "loaded_from_disk_bytes", "disk_bytes_per_s")},
        "model_source": session.files.served_by, "weights": session.job.run.weights,
        "ranks": cluster.num_devices,
        "dtype": session.problem.dtype,
        "date": datetime.now().astimezone().isoformat("T", "seconds"),
        "machine": {"device": cluster.device.name,
                    "threads_per_rank": threads_per_rank(session.job, session.problem),
                    "system": f"{platform.system()} {platform.machine()}",
                    "python": platform.python_version(), "numpy": np.__version__},
        "stages": measured["stages"],
    }


def _job(session: Session) -> dict[str, Any]:
    job = session.job
    return {"name": job.name, "model": job.model, "cluster": job.cluster,
            "workload": job.workload, "constraint": _constraint(job), "schedule": job.schedule,
            "adjustment": job.adjustment,
            "run": job.run, "output": job.output, "source": job.source}


def _constraint(job: Job) -> dict[str, Any]:
    """The constraint by the keys of a job file."""
    bound = job.constraint.latency
    own = {field.name: getattr(job.constraint, field.name) for field in fields(job.constraint)
           if field.name != "bounds"}
    return {"latency_s": bound.limit_s, "kind": bound.kind, "quantile": bound.quantile, **own}
