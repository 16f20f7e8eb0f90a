"""State of a run, decided from the files of its folder, with the user's next step; and the state of
its Slurm job, if it was submitted."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from xgpt.core.errors import XgptError
from xgpt.core.system.whole_file import read_object
from xgpt.core.units import format_seconds
from xgpt.launch.slurm_jobs import SlurmJob
from xgpt.requests.spool import num_queries
from xgpt.run_folder.files import (
    METRICS_FILE,
    RESULTS_FILE,
    SlurmRecord,
    failure,
    load_record,
    whole_metrics,
)
from xrunner.files.expired import num_expired
from xrunner.files.heartbeat import RankState, of_replicas, read_heartbeats
from xrunner.files.lock import StopRequest, is_locked
from xrunner.files.results import Answered, answered, answered_by_last_line
from xrunner.files.sink import STARTING, Progress, read_progress

SILENT_S = 10.0  # chosen: a rank reports every second, unless it hangs


class State(StrEnum):
    """State of a run. `complete`: all results exist, but not all other files. `died`: no process
    works on it, and it did not end in good order."""

    NONE = "none"
    STARTING = "starting"
    RUNNING = "running"
    STOPPED = "stopped"
    DIED = "died"
    COMPLETE = "complete"
    DONE = "done"


# States that a run writes into progress.json itself.
_WRITTEN = {"starting": State.STARTING, "loading": State.STARTING, "running": State.RUNNING,
            "stopped": State.STOPPED}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """State and progress of a run for an onlooker. If no process works on it, `progress.done`
    counts the answers on the disk: in results.jsonl, and in held.jsonl those that wait for an
    earlier one."""

    state: State
    progress: Progress
    is_alive: bool | None  # whether a process works on it; None: unknown
    output: Path
    counted: Answered | None = None  # answers on the disk, if no process works on the run
    ranks: tuple[RankState, ...] = ()  # last report of each rank, if the run is alive

    @property
    def answered(self) -> Answered:
        """Answers on the disk; of results.jsonl, which can be long, only the end is read."""
        return self.counted or answered_by_last_line(self.output / RESULTS_FILE)

    @property
    def next_step(self) -> str | None:
        """Advice for the user on how to continue, in words; None if the run needs nothing."""
        if self.is_alive is False and self.state is State.COMPLETE:
            return ("all results are there, but the command was killed before it wrote "
                    "metrics.json and the report: the same command writes them, and runs nothing "
                    "again")
        if self.state not in (State.STOPPED, State.DIED):
            return None
        found = self.answered
        if self.state is State.STOPPED and (expired := num_expired(self.output)):
            return (f"{found.total or 'no'} results are in results.jsonl, and {expired} requests "
                    "expired at their deadlines (errors.jsonl); the same command runs them")
        kept = f"{found.written or 'no'} results are in results.jsonl"
        goes_on = "the same command goes on" + (" after them" if found.total else "")
        if found.held:
            kept += f" and {len(found.held)} in held.jsonl, until those before them are done"
        if self.state is State.STOPPED:
            return f"{kept}; {goes_on}"
        why = failure(self.output)
        if why is None:
            return ("no process works on it any more (it, or the machine, was killed): "
                    f"{kept}; {goes_on}")
        more = "" if "same command goes on" in why else f"; {goes_on}"
        return f"it failed: {why.rstrip('.')}" + (
            f". {kept[0].upper()}{kept[1:]}{more}" if found.total else "")


def run_status(output: Path) -> RunStatus:
    """The RunStatus of the folder `output`, for an onlooker: it does not read long files of
    results."""
    # in this order: a run that ends in between is done, not dead
    is_alive = is_locked(output)
    progress = read_progress(output / "progress.json")
    is_there = progress is not None or is_alive or (output / "run.json").is_file()
    progress = progress or STARTING
    state = _WRITTEN.get(progress.state)
    if is_alive is not False and state is not State.STOPPED:
        return RunStatus(state=state or _whole(output), progress=progress, is_alive=is_alive,
                         output=output, ranks=tuple(read_heartbeats(output)))
    found, total = answered_by_last_line(output / RESULTS_FILE), num_queries(output)
    if not is_there:
        state = State.NONE
    elif state is None:
        state = _whole(output)
    else:
        progress = replace(progress, done=found.total, total=total or progress.total)
        # the progress file may be lost; the results decide
        if found.written and found.written == total:
            state = _whole(output)
        elif state is not State.STOPPED:
            state = State.DIED
    return RunStatus(state=state, progress=replace(progress, state=state), is_alive=is_alive,
                     output=output, counted=found,
                     ranks=tuple(read_heartbeats(output)) if is_alive is not False else ())


def _whole(output: Path) -> State:
    return State.DONE if (output / METRICS_FILE).is_file() else State.COMPLETE


def state_left(output: Path) -> State:
    """State of the last run in the folder, for a caller that holds its lock: NONE without any
    answer, else STOPPED, COMPLETE or DONE. Checks every line of the results."""
    found, total = answered(output / RESULTS_FILE), num_queries(output)
    if not found.total:
        return State.NONE
    if total is None or found.total < total:
        return State.STOPPED
    # job.json must say what was run: another job in this folder must run
    is_told = whole_metrics(output) is not None and "model" in read_object(output / "job.json")
    return State.DONE if is_told else State.COMPLETE


def is_asked_to_stop(output: Path) -> bool:
    """Whether the run at work in the folder was asked to stop; requests to earlier runs do not
    count."""
    return StopRequest(output).is_made and is_locked(output) is not False


def has_begun(output: Path) -> bool:
    """Whether a run in the folder has anything to report: a schedule or results."""
    return any((output / name).is_file() for name in ("schedule.json", RESULTS_FILE))


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """State of a run and of its Slurm job. `record`: None if it was not submitted. `said`: Slurm's
    answer; None if Slurm forgot the job, or could not be asked, for the reason `trouble`."""

    run: RunStatus
    record: SlurmRecord | None = None
    said: SlurmJob | None = None
    trouble: str | None = None

    @property
    def state(self) -> str:
        """The state in a word: the run's own, unless Slurm knows better. Locks of a process on
        another node may be invisible here, and a job that waits has written nothing yet."""
        own = self.run.state
        is_whole = own in (State.COMPLETE, State.DONE)
        if self.said is None:
            return "unknown" if own is State.NONE else own
        if self.said.is_waiting:
            return "pending"
        if self.said.is_at_work:
            return own if is_whole or own is State.RUNNING else State.STARTING
        # a stop belongs to this job if its exit code says so, else to an earlier job
        is_older = self.said.state == "FAILED" and not (
            self.said.exit_code or "75:").startswith(("75:", "4:"))
        if is_whole or (own is State.STOPPED and not is_older):
            return own
        return State.DIED if self.said.state == "COMPLETED" else self.said.state.lower()

    @property
    def is_active(self) -> bool:
        """True while the job waits or runs."""
        if self.said is not None:
            return not self.said.has_ended
        return self.run.is_alive is True

    @property
    def in_words(self) -> str | None:
        """Slurm's state of the job, in a sentence; None if it was not submitted."""
        if self.record is None:
            return None
        who = f"Slurm: job {self.record.job_id}"
        if self.said is None:
            return f"{who}: {self.trouble or 'is not known any more'}"
        return f"{who} {_sentence(self.said)}"

    @property
    def cause(self) -> str | None:
        """The end of the Slurm log, if the job has ended without being done; else None."""
        if self.record is None or self.is_active or self.state in (
                State.STOPPED, State.COMPLETE, State.DONE):
            return None
        return self.record.end_of_log() or (
            f"nothing was written to {self.record.log}: do the nodes see this folder?")

    def to_dict(self) -> dict[str, Any] | None:
        """Slurm's state of the job, for `--json`; None if it was not submitted."""
        if self.record is None:
            return None
        return {"job_id": self.record.job_id, "cluster": self.record.cluster,
                "log": self.record.log, "trouble": self.trouble, "cause": self.cause,
                **({} if self.said is None else asdict(self.said))}


def job_status(output: Path, ask: Callable[[SlurmRecord], SlurmJob | None] = SlurmRecord.ask,
               ) -> JobStatus | None:
    """The JobStatus of the job that writes into this folder; None if there was none. `ask`: asks
    Slurm about a submitted job."""
    record, said, trouble = load_record(output), None, None
    if record is not None:
        try:
            said = ask(record)
        except XgptError as error:
            trouble = str(error)
    run = run_status(output)  # after asking Slurm: a run that ends in between has written it
    if run.state is State.NONE and record is None:
        return None
    return JobStatus(run=run, record=record, said=said, trouble=trouble)


def _sentence(said: SlurmJob) -> str:
    where = f" on {said.nodes}" if said.nodes else ""
    took = f", {said.elapsed}" if said.elapsed else ""
    took += f" of {said.limit}" if said.elapsed and said.limit else ""
    if said.is_waiting:
        reason = f" ({said.reason})" if said.reason else ""
        start = f", starts about {said.start}" if said.start else ""
        return f"is {said.state.lower()}{reason}{start}"
    if not said.has_ended:
        return f"is {said.state.lower()}{where}{took}"
    code = f", exit code {said.exit_code}" if said.exit_code else ""
    reason = f" ({said.reason})" if said.reason and said.state != "COMPLETED" else ""
    return f"ended as {said.state}{reason}{code}{where}{took}"


def age_s(state: RankState, now: float | None = None) -> float | None:
    """Seconds since the rank's last report, by this machine's clock and the rank's; None for a rank
    of a run that has ended."""
    return None if state.at_s is None else max(
        (time.time() if now is None else now) - state.at_s, 0.0)


def oldest_s(states: Sequence[RankState]) -> float | None:
    """The longest `age_s` of these ranks; None without any."""
    return max((age for state in states if (age := age_s(state)) is not None), default=None)


def are_silent(states: Sequence[RankState]) -> bool:
    """Whether one of the ranks has not reported for SILENT_S."""
    return (oldest_s(states) or 0.0) > SILENT_S


def signs_of_life(states: Sequence[RankState], now: float | None = None) -> str | None:
    """A sentence about how long ago the ranks reported; None without ranks."""
    heard = [(age, state) for state in states if (age := age_s(state, now)) is not None]
    if not heard:
        return None
    (age, oldest), *others = sorted(heard, key=lambda one: -one[0])
    said = (f"last sign of life: {oldest.name} {format_seconds(round(age))} ago, "
            f"{oldest.doing}")
    return said + (f"; the others {format_seconds(round(others[0][0]))} ago or less" if others
                   else "")


def notes_of(states: Sequence[RankState]) -> str:
    """Words for what replicas do instead of steps, with their numbers where there are several."""
    replicas, by_note = of_replicas(states), dict[str, list[str]]()
    for replica in replicas:
        by_note.setdefault(replica.note, []).append(str(replica.replica))
    return "; ".join(note if not replicas[1:] else f"replica {', '.join(numbers)}: {note}"
                     for note, numbers in by_note.items() if note)
