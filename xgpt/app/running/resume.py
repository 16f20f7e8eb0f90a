"""What an earlier command of the same job left decides before anything is planned anew: times and
the memory that is free change from hour to hour, and with them the plan. Of a run whose ranks came
to their end after their launcher was killed, all results are there and no metrics.json: they are
taken over, and nothing is run again."""

import json
from pathlib import Path
from typing import Any

from xgpt.app.opened import OpenedJob
from xgpt.app.profile import timing_of
from xgpt.app.running.finished import refuse_no_answer
from xgpt.app.running.metrics import write_metrics
from xgpt.app.running.prepare import going_on, plan_for_ranks, requests_of
from xgpt.app.schedule import Plan, on_ranks, to_run
from xgpt.core.errors import InputError
from xgpt.core.policies import policy
from xgpt.core.schedule import Schedule
from xgpt.core.schedule_file import load_schedule
from xgpt.report.output import read_output
from xgpt.report.table import paragraph
from xgpt.requests.spool import num_queries
from xgpt.run_folder.files import RESULTS_FILE, fault_words, is_intact, kept
from xgpt.run_folder.state import State, state_left
from xprofiler.profile_file import load_profile
from xprofiler.profile_timing import ProfileTiming
from xprofiler.timing import TimingSource
from xrunner.backends.engine import engine_of
from xrunner.files.results import ResultWriter, answered, count_errors, count_results
from xrunner.files.sink import TIMES, Progress, percentiles_of, write_progress
from xrunner.files.spooled_requests import save_runnable
from xrunner.plan import RunPlan, saved_fingerprint, with_earlier_limits
from xscheduler.evaluator import predict

TAKEN_OVER = ("every query was answered by an earlier run, and not all of its other files are as "
              "they should be (its command was killed before it wrote them, or the disk was full): "
              "these results are taken over, and nothing is run again")
_FIGURES = ("wall_s", "throughput_qps", "output_tokens_per_s", "load_s", "loaded_bytes",
            "overhead_share")
BY_WHAT_WAS_BEGUN = ("the schedule found now does not hold all requests of the run that is in the "
                     "folder, and not finished: it goes on by the schedule that it was begun with")


def is_left_whole(plan: RunPlan) -> bool:
    """Whether the folder holds all results of this very job. Those that are held but could be in
    results.jsonl are put there. For who has the folder's lock."""
    output = plan.output
    results, total = output / "results.jsonl", num_queries(output)
    if not total or saved_fingerprint(output) != with_earlier_limits(plan).fingerprint or (
            answered(results).total < total):
        return False
    written = count_results(results)
    ResultWriter(results, first_index=written, model=plan.model_name).close()
    return count_results(results) == total


def _account(output: Path) -> dict[str, Any]:
    """measured.json of the run, if it wrote one; else one of what results.jsonl tells, with None
    for what only the run knew."""
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
    # without those that are not told, and of who was refused, or failed at once: see Tally
    return {**known, **percentiles_of({
        name: values[values > 0] for name, values in times_s.items()})}


def take_over(opened: OpenedJob, timing: TimingSource | None, schedule: Schedule | None,
              why: str = TAKEN_OVER) -> dict[str, Any]:
    """What `execute` returns, of results that are all there; `why`: is told. `timing`, `schedule`:
    of which a prediction can be made, if any."""
    output = opened.job.output
    if why:
        opened.tell.say(paragraph(why))
    measured, executed = _account(output), schedule_there(output)
    prediction = None
    # of another schedule, or by other times, it would not be what this run was expected to take
    if executed and schedule and timing and measured["stages"] and (
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
    result = {**metrics, **kept(opened.job)}
    refuse_no_answer(output / RESULTS_FILE, result)
    return result


def schedule_there(output: Path) -> Schedule | None:
    """The schedule that a run left in its folder; None without one that can be read."""
    try:
        return load_schedule(output / "schedule.json")
    except (InputError, OSError):
        return None


def _executed(schedule: Schedule) -> list[object]:
    """What is executed. (The memory that there is to plan with changes from hour to hour.)"""
    return [(shape.deployment.stages, shape.deployment.replicas, shape.policy, *(
        getattr(shape.controls, name) for name in policy(shape.policy).variable_names))
        for shape in schedule.estimate.shapes]


def taken_over(opened: OpenedJob) -> dict[str, Any] | None:
    """What metrics.json holds of a job all of whose results are there, though not what is told of
    them: nothing is measured, planned or run again. None where there is something to run. Tells of
    results that somebody else changed. For who has the folder's lock."""
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
    return take_over(own, _times(own), schedule) if is_left_whole(plan) else None


def goes_on(opened: OpenedJob, plan: Plan) -> Plan:
    """The plan; or, of a job whose unfinished run has requests that it does not hold, the one that
    run was begun with. Not to go on by would be to begin from zero."""
    requests, _ = requests_of(plan.opened)
    if going_on(plan_for_ranks(plan.opened, plan.schedule, requests), plan.schedule) is not None:
        return plan
    if (begun := _schedule_of(opened)) is None:
        return plan
    opened.tell.say(paragraph(f"note: {BY_WHAT_WAS_BEGUN}"))
    return to_run(opened, begun[1], opened.job.output / "schedule.json")


def _schedule_of(opened: OpenedJob) -> tuple[OpenedJob, Schedule] | None:
    """The schedule that is in the job's folder, and the job on its ranks; None without one that
    this job can execute."""
    if (schedule := schedule_there(opened.job.output)) is None:
        return None
    try:
        own = on_ranks(opened, schedule.estimate.num_devices)
    except InputError:
        return None
    return (own, schedule) if schedule.fingerprint == own.problem.fingerprint else None


def _times(opened: OpenedJob) -> TimingSource | None:
    """Those that the run was planned with; None where it did not leave them."""
    if opened.job.profile is not None or not opened.is_local:
        return timing_of(opened)
    try:
        return ProfileTiming(load_profile(opened.job.output / "profile.json"))
    except (InputError, OSError):
        return None
