"""One run of a schedule: files laid out, ranks started and watched, measured beside predicted."""

import json
import math
import shutil
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from xgpt.app.hand_in import in_allocation
from xgpt.app.opened import OpenedJob, open_job, refuse_if_none_can_run
from xgpt.app.running.finished import asked_of, refuse_no_answer
from xgpt.app.running.follow import (
    Guard,
    Rescheduler,
    StallWatch,
    decisions_with_phases,
    rescheduler_of,
)
from xgpt.app.running.metrics import learn, write_metrics
from xgpt.app.running.prepare import (
    as_its_weights_were_held,
    check_model,
    going_on,
    make_folder,
    make_room,
    plan_for_ranks,
    refuse_what_cannot_run,
    requests_of,
    with_what_was_read,
    write_job,
)
from xgpt.app.running.resume import is_left_whole, take_over
from xgpt.app.schedule import executable
from xgpt.app.telling import Teller, tell_run, troubles_told
from xgpt.core.errors import StoppedEarly, XgptError
from xgpt.core.job import Job
from xgpt.core.schedule import Schedule
from xgpt.core.schedule_file import save_schedule
from xgpt.core.spool import Spool, num_queries
from xgpt.core.units import INT8
from xgpt.core.whole_file import write_atomically
from xgpt.launch.contention import Contention
from xgpt.launch.launcher import RankProgram, ranks_per_node
from xgpt.launch.process import RanksFailed
from xgpt.launch.rows import launcher_of
from xgpt.launch.slurm import allocation_here
from xgpt.launch.standby import Standby
from xgpt.report.expected import EXPECTED_FILE, write_expected
from xgpt.report.table import paragraph
from xgpt.report.timeline import replay_lanes
from xgpt.report.words import agreement_words, counted
from xgpt.run_folder.files import DEATHS_FILE, RESULTS_FILE, end_kept, is_told_done, kept
from xprofiler.interpolation import REFUSED_BEYOND
from xprofiler.profile_file import save_profile
from xprofiler.profile_timing import ProfileTiming
from xprofiler.timing import TimingSource
from xrunner.engines.engine import engine_of, program_of
from xrunner.io.beat import BEATS
from xrunner.io.intake import hand_on, query_of
from xrunner.io.launcher_link import ADJUST_FILE, OBSERVED_FILE
from xrunner.io.lock import output_lock
from xrunner.io.results import HELD_FILE, ResultWriter, answered, count_results
from xrunner.io.stop import StopRequest
from xrunner.io.underway import read_underway
from xrunner.plan import AGREEMENT_FILE, RunPlan, weights_key
from xrunner.query import FinishedQuery
from xscheduler.beginning import said_of
from xscheduler.evaluator import replays_of
from xsimulator.replay.predict import JobPrediction, mean_of

SUSPECT = 2  # deaths at which a query was under way


class Leg(NamedTuple):
    """One start of the ranks. `aside`: queries that it leaves out; `alone`: the one that it is
    for, if it is for one."""

    aside: tuple[int, ...] = ()
    alone: int | None = None
    is_first: bool = True


class Deaths:
    """At which queries' work ranks died, of one job."""

    def __init__(self, plan: RunPlan) -> None:
        self._plan, self._path = plan, plan.output / DEATHS_FILE
        self._results = plan.output / "results.jsonl"
        self._counts = Counter[int](self._read())

    def next_leg(self) -> Leg | None:
        """What is to be run next; None where every query is answered."""
        done, total = answered(self._results), len(Spool(self._plan.output))
        if total and done.total >= total:
            return None
        # of few queries: no list of ten million
        suspects = sorted(query for query, count in self._counts.items() if count >= SUSPECT
                          and done.written <= query < total and query not in done.held)
        if not suspects or len(suspects) < total - done.total:
            return Leg(tuple(suspects))
        return Leg(tuple(suspects[1:]), alone=suspects[0])

    def record(self, leg: Leg, cause: str) -> str:
        """Takes note of a death; what comes of it, in words."""
        if leg.alone is not None:
            self._give_up(leg.alone, cause)
            return (f"query {leg.alone} was run alone, and its rank died again: it has an error "
                    "in the place of an answer")
        done = answered(self._results)
        underway = [query for query in read_underway(self._plan.output)
                    if query >= done.written and query not in done.held]
        self._counts.update(set(underway))
        suspects = sum(self._counts[query] >= SUSPECT for query in underway)
        write_atomically(self._path, json.dumps(
            {"fingerprint": self._plan.fingerprint, "deaths": dict(self._counts)}) + "\n")
        return "" if not suspects else (
            f"{counted(suspects, 'query')} under way at two deaths: left for the end, to run alone")

    def _give_up(self, query: int, cause: str) -> None:
        written = count_results(self._results)
        writer = ResultWriter(self._results, first_index=written, model=self._plan.model_name)
        writer.write(FinishedQuery(
            query=query_of(Spool(self._plan.output), self._plan, query), output_ids=(),
            finish_reason="error", text="", encode_start_s=0.0, first_token_s=0.0,
            last_token_s=0.0, error="ranks died three times at work on it, the last time alone: "
            + " ".join(cause.split())[-300:]))
        writer.close()

    def _read(self) -> dict[int, int]:
        try:
            saved = json.loads(self._path.read_text(encoding="utf-8"))
            if saved["fingerprint"] != self._plan.fingerprint:
                return {}
            return {int(query): int(count) for query, count in saved["deaths"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}


def run_through(plan: RunPlan, start: Callable[[Leg], None], *, restarts: int,
                tell: Teller) -> None:
    """Starts the ranks until every query is answered, or a stop was asked for. Raises what `start`
    raises, a rank's death only after so many `restarts`; a query that is run alone has its own."""
    deaths = Deaths(plan)
    leg, is_first = deaths.next_leg(), True
    while leg is not None:
        try:
            start(leg._replace(is_first=is_first))
        except RanksFailed as error:
            tell.end_progress()
            if error.is_told or (leg.alone is None and restarts == 0):
                raise _with_what_is_kept(error, plan) from None
            what = deaths.record(leg, str(error))
            if StopRequest(plan.output).is_made:
                raise StoppedEarly(f"{error}\nThe run was asked to stop meanwhile: "
                                   f"{_is_kept(plan)}, and the same command goes on from "
                                   "there") from None
            if leg.alone is None:
                restarts -= 1
            tell.say(f"{error}")
            tell.say(paragraph(f"note: {what + '. ' if what else ''}{_is_kept(plan)}; the ranks "
                               f"start again ({counted(restarts, 'more restart')} after this)"))
        else:
            if not leg.aside or StopRequest(plan.output).is_made:
                break
        leg, is_first = deaths.next_leg(), False
    if answered(plan.output / RESULTS_FILE).written == len(Spool(plan.output)):
        (plan.output / DEATHS_FILE).unlink(missing_ok=True)


def _with_what_is_kept(error: RanksFailed, plan: RunPlan) -> XgptError:
    text = str(error)
    if "the same command goes on" in text:
        return XgptError(text)
    goes_on = f"{_is_kept(plan)}; the same command goes on from there"
    return XgptError(f"{text}\n{paragraph(goes_on)}")


def _is_kept(plan: RunPlan) -> str:
    count = answered(plan.output / RESULTS_FILE).total
    return f"{counted(count, 'answer')} {'is' if count == 1 else 'are'} kept"


def agreement_of(opened: OpenedJob, plan: RunPlan, run_file: Path,
                 lock: int) -> dict[str, Any] | None:
    """What agreement.json holds, measured unless it is there of the same run; None for a run of the
    model's own type. Raises XgptError."""
    if plan.weight_dtype != INT8:
        return None
    path = plan.output / AGREEMENT_FILE
    if (known := _read(path)) is None or known["fingerprint"] != plan.fingerprint:
        opened.tell.say(f"comparing {INT8} with {plan.dtype} on the job's own inputs")
        launcher_of(opened.job, opened.problem).run(
            RankProgram(module="xrunner.agreement", argument=run_file, count=1, inherited=(lock,)),
            watch=lambda: None)
        known = _read(path)
        assert known is not None, f"{path} was just written"
    agreement = {key: known[key] for key in ("inputs", "positions", "agreeing")}
    said = agreement_words({"agreement": agreement, "weight_dtype": plan.weight_dtype,
                            "dtype": plan.dtype})
    assert said is not None, f"{agreement = }"
    opened.tell.say(said)
    return agreement


def _read(path: Path) -> dict[str, Any] | None:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content


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
