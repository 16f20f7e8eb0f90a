"""One run of a schedule: files laid out, ranks started and watched, measured beside predicted."""

import json
import math
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from xgpt.app.agreement import agreement_of
from xgpt.app.allocation import in_allocation
from xgpt.app.checks import check_model, make_folder, refuse_what_cannot_run
from xgpt.app.deaths import Leg, run_through
from xgpt.app.finished import asked_of
from xgpt.app.guard import Guard
from xgpt.app.laid_out import on_ranks
from xgpt.app.learn import learn
from xgpt.app.messages import end_kept
from xgpt.app.metrics import write_metrics
from xgpt.app.no_answer import refuse_no_answer
from xgpt.app.opened import OpenedJob, open_job, refuse_if_none_can_run
from xgpt.app.plan import Plan, executable
from xgpt.app.resume import is_left_whole, take_over
from xgpt.app.run_files import RESULTS_FILE, is_told_done, kept
from xgpt.app.run_folder import (
    as_its_weights_were_held,
    going_on,
    make_room,
    plan_for_ranks,
    requests_of,
    with_what_was_read,
    write_job,
)
from xgpt.app.stall import StallWatch
from xgpt.app.telling import Teller, tell_run
from xgpt.app.timing import timing_of
from xgpt.app.troubles import troubles_told
from xgpt.app.watch import Rescheduler, decisions_with_phases, rescheduler_of
from xgpt.core.errors import InputError, Mistake, StoppedEarly, XgptError, wrong
from xgpt.core.job import Job
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate, Schedule
from xgpt.core.schedule_file import save_schedule
from xgpt.core.spool import num_queries
from xgpt.launch.contention import Contention
from xgpt.launch.launcher import RankProgram, allocation_here, launcher_of, ranks_per_node
from xgpt.launch.standby import Standby
from xgpt.report.lanes import EXPECTED_FILE, write_expected
from xgpt.report.run_charts import replay_lanes
from xgpt.report.table import paragraph
from xprofiler.interpolation import REFUSED_BEYOND
from xprofiler.profile_file import save_profile
from xprofiler.profile_timing import ProfileTiming
from xprofiler.timing import TimingSource
from xrunner.engines.engine import engine_of, program_of
from xrunner.io.beat import BEATS
from xrunner.io.intake import hand_on
from xrunner.io.launcher_link import ADJUST_FILE, OBSERVED_FILE
from xrunner.io.lock import output_lock
from xrunner.io.results import HELD_FILE
from xrunner.io.stop import StopRequest
from xrunner.plan import RunPlan, weights_key
from xscheduler.beginning import said_of
from xscheduler.evaluator import replays_of
from xsimulator.allocation import pool_layers
from xsimulator.replay.predict import JobPrediction, mean_of


def open_to_run(job: Job, tell: Teller, standby: Standby | None = None) -> OpenedJob:
    """The job with its model's files and an output folder. `standby`: may serve as its ranks.
    Raises InputError for one that cannot be run."""
    as_asked = job  # before an allocation says where it runs
    if job.slurm is not None and (allocation := allocation_here()) is not None:
        job = in_allocation(job, allocation, tell)
    refuse_what_cannot_run(job, tell)  # before a model is fetched for it
    opened = open_job(job, tell, "run")
    assert opened.files is not None, "fetched above"
    tell.say(f"model: {job.model}, served by {opened.files.served_by}")
    check_model(opened)
    make_folder(job)
    digests = () if opened.requests is None else opened.requests.file_digests
    return executable(as_its_weights_were_held(
        replace(opened, standby=standby, asked=asked_of(as_asked, digests))))


def to_run(opened: OpenedJob, schedule: Schedule, source: Path) -> Plan:
    """A schedule, from the file `source`, as the job's engine executes it. Raises InputError for
    one of another job, or that the engine does not execute."""
    opened = on_ranks(opened, schedule.estimate.num_devices)
    if schedule.fingerprint != opened.problem.fingerprint:
        raise wrong(source, "fingerprint", schedule.fingerprint,
                    f"this job's is {opened.problem.fingerprint}: another model, dtype or number "
                    "of ranks; find a schedule for this job with `xgpt schedule`")
    each = opened.problem.cluster.devices_per_node
    if schedule.estimate.others and ranks_per_node(schedule.estimate, each) is None:
        raise wrong(source, "others", len(schedule.estimate.others),
                    f"shapes of which every copy lies within a node of {each} devices, "
                    "or on whole nodes")
    if mistakes := list(_misfits(opened.problem, schedule.estimate, source)):
        raise InputError(mistakes)
    opened = executable(opened, schedule)
    return Plan(schedule=schedule, opened=opened, timing=timing_of(opened), horizon="job")


def _misfits(problem: Problem, estimate: Estimate, source: Path) -> Iterator[Mistake]:
    """What of a schedule that says it is of this problem cannot be: devices, layers, and copies
    that would have no share of the queries."""
    mistake, most = partial(Mistake, file=str(source), line=None), problem.cluster.num_devices
    if estimate.num_devices > most:
        yield mistake(key="deployment", value=estimate.num_devices,
                      allowed=f"on as many devices as the job has: {most}")
    for place, shape in enumerate(estimate.shapes):
        of = f"others[{place - 1}]." if place else ""
        for number, pool in enumerate(shape.deployment.pools):
            held = (sum(stage.num_layers for stage in pool.stages),
                    sum(stage.num_encoder_layers for stage in pool.stages))
            if held != (wanted := pool_layers(problem.model, pool.role)):
                yield mistake(key=f"{of}deployment.pools[{number}].stages", value=list(held),
                              allowed=f"decoder and encoder layers as the model has: {[*wanted]}")
        if estimate.others and not shape.figures.throughput_qps:
            yield mistake(key=f"{of}figures.throughput_qps", value=0,
                          allowed="more than 0: it says which copies get how many of the queries")


def execute(opened: OpenedJob, timing: TimingSource, schedule: Schedule) -> dict[str, Any]:
    """Runs `schedule`; returns what metrics.json holds, and where the results are. Raises
    StoppedEarly after a polite stop, XgptError if another run is writing in the folder."""
    # held from the first file to the last: what the ranks read must be what was written here
    output = opened.job.output
    with troubles_told(output), output_lock(output) as lock, end_kept(output), (
            troubles_told(output)):
        return execute_locked(opened, timing, schedule, lock)


def execute_locked(opened: OpenedJob, timing: TimingSource, schedule: Schedule,
                   lock: int) -> dict[str, Any]:
    """The same, of who holds the folder's lock."""
    output = opened.job.output
    requests, spool = requests_of(opened)
    plan = plan_for_ranks(opened, schedule, requests)
    if not is_told_done(output) and is_left_whole(plan):
        return take_over(opened, timing, schedule)
    plan = with_what_was_read(going_on(plan, schedule) or plan, opened.tell)
    rescheduler = rescheduler_of(opened, timing, schedule)
    if rescheduler is not None:
        plan = replace(plan, is_watched=True, slots=rescheduler.slots,
                       kv_tokens=rescheduler.kv_tokens, other_rooms=rescheduler.other_rooms)
    if StopRequest(output).is_made:  # while the job was profiled and planned
        stop = StoppedEarly("asked to stop before the ranks were started; the same command goes on")
        stop.details = kept(opened.job)
        raise stop
    make_room(output, plan, opened.tell, opened.job.results, spool)
    hand_on(requests, spool, plan, opened.problem.model)
    if not num_queries(output):  # the schedule holds none of them
        refuse_if_none_can_run(opened.job, requests, spool, plan, opened.problem.model)
    save_schedule(schedule, output / "schedule.json")
    if isinstance(timing, ProfileTiming):
        save_profile(timing.profile, output / "profile.json")
    write_job(opened)
    beginning, prediction = said_of(schedule), _predicted(opened, timing, schedule)
    run_file = plan.save()
    agreement = agreement_of(opened, plan, run_file, lock)
    standby = opened.standby
    contention = Contention(alive=lambda: () if standby is None else standby.processes)
    legs_s = list[float]()
    try:
        run_through(plan, partial(_start, opened, plan, schedule, lock, rescheduler, legs_s),
                    restarts=opened.job.run.restarts, tell=opened.tell)
    except XgptError as error:
        error.details = kept(opened.job)
        raise
    others_share = contention.others_share()
    if not (output / "measured.json").is_file() and is_left_whole(plan):  # the last was given up
        return take_over(opened, timing, schedule, why="")
    measured = json.loads((output / "measured.json").read_text(encoding="utf-8"))
    start_s = legs_s[0] - measured["wall_s"] if len(legs_s) == 1 else None
    metrics = write_metrics(
        opened, timing, schedule, measured, prediction, others_cpu_share=others_share,
        start_s=start_s, beginning=beginning, agreement=agreement,
        rescheduling=[] if rescheduler is None else decisions_with_phases(
            rescheduler.decisions, measured["changes"]))
    result = {**metrics, **kept(opened.job)}
    if measured["state"] == "done":
        _learn(opened, timing, schedule, others_share)
        refuse_no_answer(output / RESULTS_FILE, result)
    if measured["state"] == "stopped":
        held = measured["queries_held"]
        waiting = f" ({held} of them wait in {HELD_FILE} for one before them)" if held else ""
        stop = StoppedEarly(f"stopped after {metrics['queries']} queries{waiting}; the same "
                            "command goes on from there, and begins anew what was under way")
        stop.details = result
        raise stop
    return result


def _learn(opened: OpenedJob, timing: TimingSource, schedule: Schedule,
           others_share: float | None) -> None:
    """Adds what a whole run took to the profile."""
    if engine_of(opened.job).tells_steps and (
            learned := learn(opened, timing, schedule, others_share)):
        opened.tell.say("profile: this run's steps are added to it, " + ", ".join(
            f"{own.kind} x {own.factor:.2f}" for own in learned))


def _predicted(opened: OpenedJob, timing: TimingSource,
               schedule: Schedule) -> JobPrediction | None:
    """What the run is expected to measure, one replay of it left in the folder; None where what is
    expected is not what the job is left with, or nothing is known of the engine's times."""
    expected = opened.job.output / EXPECTED_FILE
    expected.unlink(missing_ok=True)
    if (beginning := said_of(schedule)) is not None:
        opened.tell.say(paragraph(f"note: {beginning}"))
        return None
    if not engine_of(opened.job).is_predicted:
        return None
    problem, estimate = opened.problem, schedule.estimate
    replayed = replays_of(problem, timing, estimate)
    if replayed is None:
        return None
    first = next(replayed.results)
    prediction = mean_of(chain([first], replayed.results), replayed.num_queries) if (
        first.is_timed) else None
    if prediction is None or not math.isfinite(prediction.wall_s):
        opened.tell.say(paragraph(
            f"note: nothing is predicted of this run: it may take steps of more than "
            f"{REFUSED_BEYOND:g} times the sizes that were measured (`xgpt profile JOB` "
            "measures more)"))
        return None
    if replayed.is_whole:  # some of many queries have other curves than all
        write_expected(expected, replay_lanes(first), first.times)
    return prediction


def _start(opened: OpenedJob, plan: RunPlan, schedule: Schedule, lock: int,
           rescheduler: Rescheduler | None, legs_s: list[float], leg: Leg) -> None:
    """`legs_s`: is told how long the ranks were there."""
    output, tell = opened.job.output, opened.tell
    if not leg.is_first:  # what was observed before a death is not what is observed now
        rescheduler = None
    plan = replace(plan, aside=leg.aside, is_watched=rescheduler is not None)
    run_file = plan.save()
    (output / "measured.json").unlink(missing_ok=True)
    figures, engine = schedule.estimate.figures, engine_of(opened.job)
    command = program_of(opened.job, engine.worker, run_file)
    count = 1 if command else schedule.estimate.num_devices  # of our own processes
    guard = Guard(output, None if not engine.tells_steps else StallWatch(
        output, ranks=count, limit_s=opened.job.run.stall_timeout_s,
        step_s=figures.encode_s))

    def watch() -> None:
        guard.look()
        tell_run(tell, output / "progress.json", schedule.bound.limit_s, guard.silent)
        if rescheduler is not None and rescheduler.update():
            tell.end_progress()  # what it has to say gets lines of its own
            tell.say(paragraph(rescheduler.decisions[-1].sentence))

    program = RankProgram(
        module=engine.worker, argument=run_file, inherited=(lock,), command=command,
        standby=opened.standby, holds=weights_key(plan, schedule),
        count=count, per_node=ranks_per_node(
            schedule.estimate, opened.problem.cluster.devices_per_node))
    begin_s = time.monotonic()
    try:
        launcher_of(opened.job, opened.problem).run(
            program, watch=watch, ask_to_stop=StopRequest(output).make)
        if not (output / "measured.json").is_file():
            raise StoppedEarly("ended before the run could stop in good order; what was done is "
                               "kept, and the same command goes on from there")
    finally:
        legs_s.append(time.monotonic() - begin_s)
        tell.end_progress()
        with suppress(OSError):  # of a folder that cannot be written to, what ended the run says so
            for name in (OBSERVED_FILE, ADJUST_FILE):
                (output / name).unlink(missing_ok=True)
        shutil.rmtree(output / BEATS, ignore_errors=True)  # measured.json has it all
