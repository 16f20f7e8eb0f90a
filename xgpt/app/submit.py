"""Plans and runs jobs. Several run one after another, by the same ranks as long as they have the
same weights; the failure of one does not stop the others."""

import atexit
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xgpt.app.opened_job import open_job
from xgpt.app.remote_jobs import shared_folders
from xgpt.app.running.finished import finished_result
from xgpt.app.running.prepare import refuse_what_no_machine_runs
from xgpt.app.running.resume import adopt_if_complete, keep_begun_schedule
from xgpt.app.running.run import Run, locked_output, open_to_run
from xgpt.app.schedule import Plan, plan_from, plan_job
from xgpt.app.teller import Teller
from xgpt.core.errors import EXIT_RESUMABLE, DeadlinePassed, StoppedEarly, XgptError, refuse, wrong
from xgpt.core.schedule_file import load_schedule
from xgpt.core.system.machine import why_no_torch
from xgpt.job.job import LOCAL_CLUSTER, Job
from xgpt.launch.standby import Standby
from xgpt.launch.stop_signals import stopping_in_order
from xgpt.report.table import WIDTH, schedule_table, shown
from xrunner.backends.engine import engine_of
from xrunner.checkpoint.source import cache_dir
from xrunner.files.lock import StopRequest
from xrunner.ops import build

_GRACE_S = 1.0  # for the compiler to delete its files


def submit(job: Job, tell: Teller, standby: Standby | None = None) -> dict[str, Any]:
    """Profiles, plans and runs the job, unless all its results exist; returns the content of
    metrics.json. `standby`: processes that can become its ranks. Raises StoppedEarly where it was
    asked to stop."""
    begin_compiling(job)
    with stopping_in_order(), locked_output(open_to_run(job, tell, standby)) as (opened, lock):
        if (found := adopt_if_complete(opened)) is not None:
            return found
        plan = keep_begun_schedule(opened, plan_job(opened))
        opened.tell.detail(schedule_table(plan.schedule))
        return Run(plan, lock).execute()


def planned(job: Job, tell: Teller) -> Plan:
    """The plan by which `submit` would run the job, as far as this machine can make it."""
    return plan_job(open_job(job, tell, "lengths"))


def run(job: Job, tell: Teller, standby: Standby | None = None,
        schedule_file: Path | None = None) -> dict[str, Any]:
    """Runs the job as `submit`, by the schedule of a file, by default the one in its output folder.
    """
    with stopping_in_order(), locked_output(open_to_run(job, tell, standby)) as (opened, lock):
        if (found := adopt_if_complete(opened)) is not None:
            return found
        path = schedule_file or opened.job.output / "schedule.json"
        if schedule_file is None and not path.exists():
            raise wrong(path, "schedule", None, "this job has none yet: `xgpt submit` plans and "
                        "runs it, and `--schedule FILE` runs one of `xgpt schedule --out FILE`")
        plan = plan_from(opened, load_schedule(path), path)
        return Run(plan, lock).execute()


@dataclass(slots=True, kw_only=True)
class JobTurn:
    """One job of several. `state`: not started, done, already done, failed or stopped; `facts`: its
    `--json` object."""

    job: Job
    state: str = "not started"
    error: XgptError | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    def take(self, tell: Teller, ranks: Standby, *, is_again: bool) -> bool:
        """Runs the job, unless it is done; returns False where the other jobs must not run."""
        try:
            found = finished_result(self.job, tell, is_again=is_again)
            self.facts = found or submit(self.job, tell, ranks)
            self.state = "already done" if found else "done"
        except XgptError as error:
            self.state = "stopped" if isinstance(error, StoppedEarly) else "failed"
            self.error = error
            self.facts = {"name": self.job.name, **error.details, "exit_code": error.exit_code,
                          "message" if self.state == "stopped" else "error": str(error)}
            if self.state == "stopped":  # `xgpt stop` names one job; a signal is for all
                return isinstance(error, DeadlinePassed) or StopRequest(
                    self.job.output).is_by_user
            tell.say(f"error: {error}")
        return True

    def to_dict(self) -> dict[str, Any]:
        return {"output": self.job.output, "name": self.job.name, **self.facts,
                "status": self.state}

    @property
    def line(self) -> str:
        """One line with the job's name, state and number of answers."""
        facts, line = self.facts, f"{self.job.name}: {self.state}"
        if facts.get("queries") is not None:
            line += f", {facts['queries']} of {facts.get('queries_total', facts['queries'])}"
        why = f": {self.error}" if self.state == "failed" else ""
        return textwrap.shorten(f"{line} ({shown(self.job.output)}){why}", 4 * WIDTH,
                                placeholder=" ...")


class SomeJobsUnfinished(XgptError):
    """Some jobs failed or were stopped. Has the exit code of the first of them."""

    def __init__(self, turns: Sequence[JobTurn]) -> None:
        left = [turn for turn in turns if not turn.state.endswith("done")]
        code = next((turn.error.exit_code for turn in left if turn.error), EXIT_RESUMABLE)
        again = "; the same command goes on with the rest" if code == EXIT_RESUMABLE else ""
        super().__init__(f"{len(left)} of {len(turns)} jobs did not finish{again}")
        self.exit_code = code
        self.details = {"jobs": [turn.to_dict() for turn in turns]}


def submit_all(jobs: Sequence[Job], tell: Teller, *, is_again: bool = False) -> dict[str, Any]:
    """Plans and runs the jobs that are not done, one after another, prints a line for each at the
    end, and returns the `--json` object. Raises InputError for jobs that share a folder or cannot
    be executed, SomeJobsUnfinished where one failed or all were stopped."""
    refuse(shared_folders(jobs))
    for job in jobs:
        refuse_what_no_machine_runs(job)
    turns, ranks = [JobTurn(job=job) for job in jobs], Standby(say=tell.say)
    try:
        with stopping_in_order():
            for number, turn in enumerate(turns, start=1):
                tell.say(f"\n== job {number} of {len(turns)}: {turn.job.name}")
                if not turn.take(tell, ranks, is_again=is_again):
                    break
    except (KeyboardInterrupt, StoppedEarly):
        pass  # the state of the others stays "not started"
    finally:
        ranks.dismiss()
        tell.say("")
        for turn in turns:
            tell.say(turn.line)
    if any(not turn.state.endswith("done") for turn in turns):
        raise SomeJobsUnfinished(turns)
    return {"jobs": [turn.to_dict() for turn in turns]}


def begin_compiling(job: Job) -> subprocess.Popen[bytes] | None:
    """Starts the process that compiles the native operators, if they are missing; their first user
    waits for it (xrunner.ops.build.why_not_native). It ends with this command. Returns None where
    the job needs none."""
    if job.cluster != LOCAL_CLUSTER or why_no_torch("cpu") is not None or (
            engine_of(job).identity is not None):
        return None
    return start_compiling(cache_dir() / "native")


def start_compiling(cache: Path) -> subprocess.Popen[bytes]:
    """Starts the compiling process for the folder `cache`. A process, not a thread, since a command
    that fails at once would wait for a thread's compiler. It ends with this process, even if that
    is killed."""
    process = subprocess.Popen(
        [sys.executable, "-I", build.__file__, str(cache), str(os.getpid())],
        start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL)
    atexit.register(_end, process)
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the process and its compilers, which delete their files."""
    if process.poll() is not None:
        return
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
            return
