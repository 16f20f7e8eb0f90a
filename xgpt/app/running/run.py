"""Executes a schedule: prepares the run, starts the ranks, follows them, and writes the metrics."""

import json
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import astuple, replace
from functools import partial
from typing import Any

from xgpt.app.opened_job import OpenedJob, open_job, refuse_if_none_can_run
from xgpt.app.remote_jobs import in_allocation
from xgpt.app.running.deadlines import keep_start, refuse_expired, with_expiry
from xgpt.app.running.deaths import Leg, run_through
from xgpt.app.running.finished import job_identity, refuse_no_answer
from xgpt.app.running.follow import (
    Guard,
    Rescheduler,
    StallWatch,
    decisions_with_phases,
    rescheduler_of,
)
from xgpt.app.running.metrics import agreement_of, learn, write_metrics
from xgpt.app.running.predictions import arrival_times, predicted
from xgpt.app.running.prepare import (
    check_model,
    continued_plan,
    keep_earlier_results,
    make_folder,
    plan_for_ranks,
    refuse_what_cannot_run,
    requests_of,
    save_requests,
    with_begun_weight_dtype,
    with_weight_digests,
    write_job,
)
from xgpt.app.running.resume import adopt_results, has_all_results
from xgpt.app.schedule import Plan, executable
from xgpt.app.teller import KeptTeller, Teller, file_errors_named, tell_run
from xgpt.app.tiers import refuse_folder
from xgpt.core.errors import StoppedEarly, XgptError
from xgpt.core.schedule_file import save_schedule
from xgpt.core.system.machine import Contention
from xgpt.job.job import Job
from xgpt.launch.launcher import (
    RankProgram,
    allocation_here,
    launcher_of,
    rank_layout,
    threads_per_rank,
)
from xgpt.launch.standby import Standby
from xgpt.report.lanes import EXPECTED_FILE, write_expected
from xgpt.report.prefix_words import prefix_figures, prefix_lines
from xgpt.report.run_charts import replay_lanes
from xgpt.report.run_screen import begin_screen, machine_words
from xgpt.report.table import paragraph
from xgpt.report.words import counted
from xgpt.requests.spool import num_queries
from xgpt.run_folder.files import RESULTS_FILE, ending_recorded, job_facts
from xgpt.run_folder.state import State, state_left
from xprofiler.profile_file import save_profile
from xprofiler.profile_timing import ProfileTiming
from xrunner.backends.engine import engine_of
from xrunner.files.deaths import Deaths
from xrunner.files.expired import num_expired
from xrunner.files.heartbeat import HEARTBEATS
from xrunner.files.launcher_link import ADJUST_FILE, OBSERVED_FILE
from xrunner.files.lock import StopRequest, output_lock
from xrunner.files.results import HELD_FILE
from xrunner.files.sink import read_progress
from xrunner.offload.report import offload_figures
from xrunner.plan import RunPlan, weights_key
from xscheduler.fallback import initial_reason


def open_to_run(job: Job, tell: Teller, standby: Standby | None = None) -> OpenedJob:
    """Opens a job for a run: with its model's files and an output folder. `standby`: processes that
    can become its ranks. Raises InputError for a job that cannot be run."""
    as_asked = job  # before its allocation decides where it runs
    if job.slurm is not None and (allocation := allocation_here()) is not None:
        job = in_allocation(job, allocation, tell)
    refuse_what_cannot_run(job, tell)  # before a model is fetched for it
    opened = open_job(job, tell, "run")
    assert opened.files is not None, "fetched above"
    check_model(opened)
    make_folder(job)
    digests = () if opened.requests is None else opened.requests.file_digests
    return executable(with_begun_weight_dtype(
        replace(opened, standby=standby, asked=job_identity(as_asked, digests))))


@contextmanager
def locked_output(opened: OpenedJob) -> Iterator[tuple[OpenedJob, int]]:
    """Locks the job's output folder, and yields the job, whose messages are now also written there,
    and the lock. It is held during profiling, too, so that `xgpt status`, `top` and `stop` find the
    run. Raises XgptError if another run has the folder."""
    output, tell = opened.job.output, opened.tell
    with (file_errors_named(output), output_lock(output) as lock, ending_recorded(output),
          file_errors_named(output)):
        yield replace(opened, tell=KeptTeller(tell, output)), lock


def execute(plan: Plan) -> dict[str, Any]:
    """Runs the plan's schedule; returns the content of metrics.json and the path of the results.
    Raises StoppedEarly after a requested stop, XgptError if another run has the folder."""
    # locked from the first file to the last: ranks must read what was written here
    with locked_output(plan.opened) as (opened, lock):
        return Run(replace(plan, opened=opened), lock).execute()


class Run:
    """One execution of a schedule in its job's folder, whose `lock` the caller holds."""

    def __init__(self, planned: Plan, lock: int) -> None:
        self.opened, self.timing, self.schedule = planned.opened, planned.timing, planned.schedule
        self.output, self.tell, self._lock = self.opened.job.output, self.opened.tell, lock
        self._requests, self._spool = requests_of(self.opened)
        refuse_folder(self.opened.job, self.schedule.estimate)
        self.plan = plan_for_ranks(self.opened, self.schedule, self._requests)
        self._legs_s = list[float]()  # duration of each start of the ranks
        self._deaths = Deaths(self.plan)
        self._num_told = len(self._deaths.engines)

    def execute(self) -> dict[str, Any]:
        """Runs all queries; returns the content of metrics.json and the path of the results. Raises
        StoppedEarly."""
        if state_left(self.output) is State.COMPLETE and has_all_results(self.plan):
            return adopt_results(self.opened, self.timing, self.schedule)
        self.prepare()
        try:
            run_through(self.plan, self.start, restarts=self.opened.job.run.restarts,
                        tell=self.tell)
        except XgptError as error:
            error.details = job_facts(self.opened.job)
            raise
        return self.close()

    def prepare(self) -> None:
        """Writes the files that ranks read, and predicts the run. Raises StoppedEarly where a stop
        was requested meanwhile."""
        opened, schedule, model = self.opened, self.schedule, self.opened.problem.model
        plan = with_weight_digests(continued_plan(self.plan, schedule) or self.plan, self.tell)
        if (own := rescheduler_of(opened, self.timing, schedule)) is not None:
            (slots, kv_tokens), *others = map(astuple, own.rooms)
            plan = replace(plan, is_watched=True, slots=slots, kv_tokens=kv_tokens,
                           other_rooms=tuple(others))
        self.plan, self._rescheduler = plan, own
        if StopRequest(self.output).is_made:  # while the job was profiled and planned
            raise _stopped("asked to stop before the ranks started; the same command goes on",
                           job_facts(opened.job))
        self._prediction, first, why = predicted(opened, self.timing, schedule)
        assert opened.files is not None, "a run needs the model's files"
        self.tell.say(begin_screen(
            opened.problem, schedule, self._prediction or why,
            model=f"{opened.job.model.rstrip('/').rpartition('/')[2]}, {opened.problem.dtype} "
                  f"({opened.files.served_by})",
            machine=machine_words(opened.problem, threads_per_rank(opened.job, opened.problem)),
            times=self.timing.provenance(), sharing=prefix_lines(
                opened.problem, schedule, self._prediction, self.timing)))
        is_continued = keep_earlier_results(self.output, plan, self.tell, opened.job.results,
                                            self._spool)
        expired = keep_start(opened)
        arrival_s = arrival_times(opened.job, opened.problem, schedule, len(self._requests.caps))
        if save_requests(opened, plan, schedule, self._requests, self._spool, arrival_s,
                         is_continued=is_continued):
            plan = self._with_clock(plan)
        if not num_queries(self.output):  # the schedule holds none of them
            refuse_if_none_can_run(opened.job, self._requests, self._spool, plan, model)
        self.plan = plan = with_expiry(opened, plan, expired)
        save_schedule(schedule, self.output / "schedule.json")
        if isinstance(self.timing, ProfileTiming):
            save_profile(self.timing.profile, self.output / "profile.json")
        write_job(opened)
        (self.output / EXPECTED_FILE).unlink(missing_ok=True)
        if first is not None:
            write_expected(self.output / EXPECTED_FILE, replay_lanes(first), first.times)
        self._agreement = agreement_of(opened, plan, plan.save(), self._lock)
        standby = opened.standby
        self._contention = Contention(alive=lambda: () if standby is None else standby.processes)

    def start(self, leg: Leg) -> None:
        """Starts the ranks, and follows them to their end. Raises StoppedEarly, XgptError."""
        # only the first start: observations before a death do not count for later ones
        own = self._rescheduler if leg.is_first else None
        plan = self.plan if leg.is_first else self._with_clock(self.plan)
        plan = replace(plan, aside=leg.aside, is_watched=own is not None,
                       restarts=leg.restarts)
        run_file, job, problem = plan.save(), self.opened.job, self.opened.problem
        (self.output / "measured.json").unlink(missing_ok=True)
        estimate, engine = self.schedule.estimate, engine_of(job)
        layout = rank_layout(estimate, problem.cluster.devices_per_node,
                             per_replica=engine.rank_per_replica)
        guard = Guard(self.output, None if not engine.tells_steps else StallWatch(
            self.output, ranks=layout["count"], limit_s=job.run.stall_timeout_s,
            step_s=estimate.figures.encode_s, leaves_engines=engine.rank_per_replica))
        program = RankProgram(
            module=engine.worker, argument=run_file, inherited=(self._lock,),
            standby=self.opened.standby, holds=weights_key(plan, self.schedule), **layout)
        begin_s = time.monotonic()
        try:
            launcher_of(job, problem).run(program, watch=partial(self.follow, guard, own),
                                          ask_to_stop=StopRequest(self.output).make)
            if not (self.output / "measured.json").is_file():
                raise StoppedEarly("ended before the ranks finished their steps; finished queries "
                                   "are kept, and the same command goes on from there")
        finally:
            self._legs_s.append(time.monotonic() - begin_s)
            self.tell.end_progress()
            with suppress(OSError):  # a folder that cannot be written to was reported already
                for name in (OBSERVED_FILE, ADJUST_FILE):
                    (self.output / name).unlink(missing_ok=True)
            shutil.rmtree(self.output / HEARTBEATS, ignore_errors=True)  # measured.json has it all

    def _with_clock(self, plan: RunPlan) -> RunPlan:
        """Returns `plan` with the clock of arrivals as the ranks' last start left it."""
        progress = read_progress(self.output / "progress.json")
        return replace(plan, clock_s=0.0 if progress is None else progress.clock_s)

    def follow(self, guard: Guard, rescheduler: Rescheduler | None) -> None:
        """Checks the ranks while they work; called often. Raises StoppedEarly, RanksHang or
        XgptError to end them."""
        guard.look()
        if engine_of(self.opened.job).rank_per_replica:
            self._deaths.read()
        for death in self._deaths.engines[self._num_told:]:
            self.tell.end_progress()
            self.tell.say(paragraph(
                f"note: the engine of replica {death.replica} died: {death.why}. Its "
                f"{counted(death.given_back, 'request')} went to others. It starts again while "
                "restarts are left (run.restarts)"))
        self._num_told = len(self._deaths.engines)
        tell_run(self.tell, self.output / "progress.json", self.schedule.bound.limit_s,
                 guard.silent)
        if rescheduler is not None and rescheduler.update():
            self.tell.detail(paragraph(rescheduler.decisions[-1].sentence))

    def close(self) -> dict[str, Any]:
        """Writes metrics.json and the report, and returns the metrics. Raises StoppedEarly where
        the ranks were stopped, XgptError where no query has an answer."""
        opened, account = self.opened, self.output / "measured.json"
        others_share = self._contention.others_share()
        if not account.is_file() and has_all_results(self.plan):  # the last got an error
            return adopt_results(opened, self.timing, self.schedule, why="")
        if not account.is_file():  # all others have expired
            total, expired = num_queries(self.output) or 0, num_expired(self.output)
            refuse_expired(opened, {"expired": expired}, {
                "queries": total - expired, "queries_total": total, **job_facts(opened.job)})
        measured = json.loads(account.read_text(encoding="utf-8"))
        decisions = [] if self._rescheduler is None else self._rescheduler.decisions
        learned = self._learned(others_share) if measured["state"] == "done" else ""
        metrics = write_metrics(
            opened, self.timing, self.schedule, measured, self._prediction, learned=learned,
            others_cpu_share=others_share, beginning=initial_reason(self.schedule),
            start_s=self._legs_s[0] - measured["wall_s"] if len(self._legs_s) == 1 else None,
            agreement=self._agreement,
            **prefix_figures(opened.problem, measured, self._prediction),
            **offload_figures(measured, self.schedule),
            rescheduling=decisions_with_phases(decisions, measured["changes"]))
        result = {**metrics, **job_facts(opened.job)}
        if measured["state"] == "done":
            refuse_no_answer(self.output / RESULTS_FILE, result)
        refuse_expired(opened, measured, result)
        if measured["state"] == "stopped":
            held = measured["queries_held"]
            waiting = f" ({held} of them wait in {HELD_FILE} for one before them)" if held else ""
            raise _stopped(f"stopped after {metrics['queries']} queries{waiting}; the same "
                           "command goes on from there, and restarts unfinished queries", result)
        return result

    def _learned(self, others_share: float | None) -> str:
        """Adds the step times of a complete run to the profile; returns words for what was
        added."""
        if not engine_of(self.opened.job).tells_steps or not (learned := learn(
                self.opened, self.timing, self.schedule, others_share)):
            return ""
        factors = ", ".join(f"{own.kind} {own.factor:.2f} x" for own in learned)
        return (f"this run was added to the profile, and the next plan uses it (steps by kind: "
                f"{factors} the profile's time)")


def _stopped(why: str, details: Mapping[str, Any]) -> StoppedEarly:
    stop = StoppedEarly(why)
    stop.details = details
    return stop
