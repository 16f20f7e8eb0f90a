"""Continues what an earlier command of the same job left, before anything is planned again: step
times and free memory, and so the plan, change from hour to hour. Where ranks finished after their
launcher was killed, all results exist without metrics.json: it is written, and nothing is run
again."""

import json
from pathlib import Path
from typing import Any

from xgpt.app.opened_job import OpenedJob, in_order_of
from xgpt.app.profile import timing_of
from xgpt.app.running.finished import refuse_no_answer
from xgpt.app.running.metrics import write_metrics
from xgpt.app.running.prepare import continued_plan, plan_for_ranks, requests_of
from xgpt.app.schedule import Plan, plan_from, with_ranks
from xgpt.app.tiers import with_measured_tiers
from xgpt.core.errors import InputError
from xgpt.core.policies import policy
from xgpt.core.schedule import Schedule
from xgpt.core.schedule_file import load_schedule
from xgpt.report.output import read_output
from xgpt.report.table import paragraph
from xgpt.requests.spool import num_queries
from xgpt.run_folder.files import RESULTS_FILE, fault_words, is_intact, job_facts
from xgpt.run_folder.state import State, state_left
from xprofiler.profile_file import load_profile
from xprofiler.profile_timing import ProfileTiming
from xprofiler.timing import TimingSource
from xrunner.backends.engine import engine_of
from xrunner.files.results import ResultWriter, answered, count_errors, count_results
from xrunner.files.runnable import save_runnable
from xrunner.files.sink import TIMES, Progress, percentiles_of, write_progress
from xrunner.plan import RunPlan, saved_fingerprint, with_earlier_limits
from xscheduler.evaluator import predict

ADOPTED = ("an earlier run answered every query, but some of its other files are missing or "
           "incomplete (its command was killed before it wrote them, or the disk was full): its "
           "results are used, and nothing is run again")
_FIGURES = ("wall_s", "throughput_qps", "output_tokens_per_s", "load_s", "loaded_bytes",
            "overhead_share")
KEEPS_SCHEDULE = ("the new schedule has no room for all requests of the unfinished run in this "
                  "folder: the run continues with the schedule that it started with")


def has_all_results(plan: RunPlan) -> bool:
    """Whether the output folder has all results of this job. First moves results that wait in
    held.jsonl, and are next, to results.jsonl. The caller holds the folder's lock."""
    output = plan.output
    results, total = output / "results.jsonl", num_queries(output)
    if not total or saved_fingerprint(output) != with_earlier_limits(plan).fingerprint or (
            answered(results).total < total):
        return False
    written = count_results(results)
    ResultWriter(results, first_index=written, model=plan.model_name).close()
    return count_results(results) == total


def _account(output: Path) -> dict[str, Any]:
    """The content of the run's measured.json; without one, the same keys computed from
    results.jsonl, with None for what only the run knew."""
    total = num_queries(output)
    known: dict[str, Any] = {
        "state": "done", "queries": total, "queries_before": 0, "queries_held": 0,
        "errors": count_errors(output / "errors.jsonl"), "changes": [], "stages": [],
        **dict.fromkeys(_FIGURES)}
    try:
        measured: dict[str, Any] = json.loads((output / "measured.json").read_text("utf-8"))
        if (measured["state"], measured["queries_before"] + measured["queries"]) == ("done", total):
            return {**known, **measured}
    except (OSError, ValueError, KeyError, TypeError):
        pass
    queries = read_output(output, 0).queries
    times_s = {name: queries.times(f"{name}_s") for name in TIMES}
    # without unknown times and those of queries that were refused or failed at once: see Tally
    return {**known, **percentiles_of({
        name: values[values > 0] for name, values in times_s.items()})}


def adopt_results(opened: OpenedJob, timing: TimingSource | None, schedule: Schedule | None,
              why: str = ADOPTED) -> dict[str, Any]:
    """Writes metrics.json of a run whose results are complete, and returns what `execute` would.
    `why`: reason to report; "" for none. `timing`, `schedule`: to predict the run by, if known."""
    output = opened.job.output
    if why:
        opened.tell.say(paragraph(why))
    measured, executed = _account(output), saved_schedule(output)
    prediction = None
    # by another schedule or other times it would not be the prediction of this run
    if executed and schedule and timing and measured["stages"] and (
            opened.problem.arrivals is None) and (
            engine_of(opened.job).is_predicted and _executed(executed) == _executed(schedule)):
        prediction = predict(opened.problem, timing, executed.estimate)
    metrics = write_metrics(opened, timing, executed, measured, prediction, others_cpu_share=None,
                            rescheduling=[])
    write_progress(output / "progress.json", Progress(
        state="done", total=measured["queries"] + measured["queries_before"],
        done=measured["queries"] + measured["queries_before"],
        output_tokens=measured.get("output_tokens") or 0, elapsed_s=measured["wall_s"] or 0.0,
        latency_p50_s=measured["latency_p50_s"], latency_p99_s=measured["latency_p99_s"],
        done_before=measured["queries_before"]))
    result = {**metrics, **job_facts(opened.job)}
    refuse_no_answer(output / RESULTS_FILE, result)
    return result


def saved_schedule(output: Path) -> Schedule | None:
    """The schedule in a run's folder; None without one that can be read."""
    try:
        return load_schedule(output / "schedule.json")
    except (InputError, OSError):
        return None


def _executed(schedule: Schedule) -> list[object]:
    """The stages, replicas, policy and variables of each replica shape, without the memory figures,
    which change from hour to hour."""
    return [(shape.deployment.stages, shape.deployment.replicas, shape.policy, *(
        getattr(shape.controls, name) for name in policy(shape.policy).variable_names))
        for shape in schedule.estimate.shapes]


def adopt_if_complete(opened: OpenedJob) -> dict[str, Any] | None:
    """Writes metrics.json where an earlier run left all results without it, and returns its
    content, without measuring, planning or running anything; None where there is something to run.
    Reports results that somebody else changed. The caller holds the folder's lock."""
    output = opened.job.output
    if (fault := fault_words(output)) is not None:
        opened.tell.say(paragraph(f"note: {fault}"))
    if state_left(output) is not State.COMPLETE:
        return None
    own, schedule = _schedule_of(opened) or (opened, None)
    requests, spool = requests_of(own)
    plan = with_earlier_limits(plan_for_ranks(own, schedule, requests))
    if not is_intact(output) and saved_fingerprint(output) == plan.fingerprint:
        save_runnable(requests, spool, plan, own.problem.model)
    return adopt_results(own, _times(own), schedule) if has_all_results(plan) else None


def keep_begun_schedule(opened: OpenedJob, plan: Plan) -> Plan:
    """Returns `plan`; or the plan of the job's unfinished run, where `plan` has no room for all of
    that run's requests and using it would mean to start from zero."""
    requests, _ = requests_of(plan.opened)
    own = plan_for_ranks(plan.opened, plan.schedule, requests)
    if continued_plan(own, plan.schedule) is not None:
        return plan
    if (begun := _schedule_of(opened)) is None:
        return plan
    opened.tell.say(paragraph(f"note: {KEEPS_SCHEDULE}"))
    return plan_from(opened, begun[1], opened.job.output / "schedule.json")


def _schedule_of(opened: OpenedJob) -> tuple[OpenedJob, Schedule] | None:
    """The job on the ranks of the schedule in its folder, and that schedule; None without one that
    this job can execute."""
    if (schedule := saved_schedule(opened.job.output)) is None:
        return None
    try:
        own = with_measured_tiers(opened, schedule.estimate)
        own = with_ranks(own, schedule.estimate.num_devices)
    except InputError:
        return None
    return (in_order_of(own, schedule), schedule) if (
        schedule.fingerprint == own.problem.fingerprint) else None


def _times(opened: OpenedJob) -> TimingSource | None:
    """The step times that the run was planned with; None where its folder has none."""
    if opened.job.profile is not None or not opened.is_local:
        return timing_of(opened)
    try:
        return ProfileTiming(load_profile(opened.job.output / "profile.json"))
    except (InputError, OSError):
        return None
