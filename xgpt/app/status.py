"""How far a run is, from the files it writes, and whether it is alive; and what Slurm says of its
job, where it was handed in."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from xgpt.app.messages import failure
from xgpt.app.place import SlurmRecord, load_record
from xgpt.app.run_files import RESULTS_FILE
from xgpt.app.stall import oldest_s
from xgpt.core.errors import XgptError
from xgpt.core.spool import num_queries
from xgpt.launch.slurm_jobs import SlurmJob
from xrunner.io.beat import RankState, read_beats
from xrunner.io.lock import is_locked
from xrunner.io.results import Answered, answered_by_last_line
from xrunner.io.sink import STARTING, Progress, read_progress


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """`progress.state` as the run wrote it, or "died": nobody works on it, and it did not end in
    good order; "done" whatever it wrote where all results are there. Of a run that ended before
    all was done, `progress.done` is what is on the disk: in
    results.jsonl and, done but with one before it that is not, in held.jsonl."""

    progress: Progress
    is_alive: bool | None  # None: cannot be told
    output: Path
    counted: Answered | None = None  # of one that ended before all was done: what is on the disk
    ranks: tuple[RankState, ...] = ()  # of a run that is alive: what each told last

    @property
    def answered(self) -> Answered:
        """What is on the disk, of which results.jsonl can be long: its end alone is read."""
        if self.counted is not None:
            return self.counted
        return answered_by_last_line(self.output / RESULTS_FILE)

    @property
    def silent_s(self) -> float | None:
        """Seconds since the last sign of life of the rank that gave none for longest."""
        return oldest_s(self.ranks)


def run_status(output: Path) -> RunStatus | None:
    """Reads how far the run is; None where no run has started."""
    # in this order: a run that ends in between is done, not dead
    is_alive = is_locked(output)
    progress_now = read_progress(output / "progress.json")
    if progress_now is None and not is_alive and not (output / "run.json").is_file():
        return None
    progress = progress_now or STARTING
    if is_alive is False and progress.state not in ("done", "stopped", "planned"):
        progress = replace(progress, state="died")
    counted = None
    if progress.state in ("died", "stopped"):
        counted = answered_by_last_line(output / RESULTS_FILE)
        progress = replace(progress, done=counted.total,
                           total=num_queries(output) or progress.total)
        # what says how far it is may be lost; its results decide
        if counted.written and counted.written == num_queries(output):
            progress = replace(progress, state="done")
    return RunStatus(progress=progress, is_alive=is_alive, output=output, counted=counted,
                     ranks=tuple(read_beats(output)) if is_alive is not False else ())


def how_to_go_on(status: RunStatus, output: Path) -> str | None:
    """What a person does next, in words; None where the run needs nothing."""
    state = status.progress.state
    if status.is_alive is False and 0 < status.progress.total <= status.progress.done and (
            not (output / "metrics.json").is_file()):
        return ("all results are there, but the command was killed before it wrote metrics.json "
                "and the report: the same command writes them, and runs nothing again")
    if state == "planned":
        return "its schedule is found; its ranks start in its turn, or by the same command"
    if state not in ("stopped", "died"):
        return None
    found = status.answered
    kept = f"{found.written or 'no'} results are in results.jsonl"
    goes_on = "the same command goes on" + (" after them" if found.total else "")
    if found.held:
        kept += f" and {len(found.held)} in held.jsonl, until those before them are done"
    if state == "stopped":
        return f"{kept}; {goes_on}"
    why = failure(output)
    if why is None:
        return ("no process works on it any more (it, or the machine, was killed): "
                f"{kept}; {goes_on}")
    more = "" if "same command goes on" in why else f"; {goes_on}"
    return f"it failed: {why.rstrip('.')}" + (
        f". {kept[0].upper()}{kept[1:]}{more}" if found.total else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """`run`: None where no run has started. `record`: None where the job was not handed in. `said`:
    None where Slurm knows the job no more or could not be asked, for the reason `trouble`."""

    run: RunStatus | None
    record: SlurmRecord | None = None
    said: SlurmJob | None = None
    trouble: str | None = None

    @property
    def state(self) -> str:
        """The run's own word, but where Slurm knows better: locks of another node's process may not
        be seen here, and a job that waits or begins has written nothing yet."""
        own = None if self.run is None else self.run.progress.state
        if self.said is None:
            return own or "unknown"
        if self.said.is_waiting:
            return "pending"
        if self.said.is_at_work:
            return own if own in ("loading", "running", "done") else "starting"
        # a stop is this job's own where its exit code says so; else one of an earlier job's
        is_older = self.said.state == "FAILED" and (self.said.exit_code or "75:")[:3] != "75:"
        if own == "done" or (own == "stopped" and not is_older):
            return own
        return "died" if self.said.state == "COMPLETED" else self.said.state.lower()

    @property
    def is_active(self) -> bool:
        """Whether it waits or works."""
        if self.said is not None:
            return not self.said.has_ended
        return self.run is not None and self.run.is_alive is True

    @property
    def in_words(self) -> str | None:
        """What Slurm says, in a sentence; None of a job that was not handed in."""
        if self.record is None:
            return None
        who = f"Slurm: job {self.record.job_id}"
        if self.said is None:
            return f"{who}: {self.trouble or 'is not known any more'}"
        return f"{who} {_sentence(self.said)}"

    @property
    def cause(self) -> str | None:
        """The end of the Slurm log, of a job that has ended without being done."""
        if self.record is None or self.is_active or self.state in ("done", "stopped"):
            return None
        return self.record.end_of_log() or (
            f"nothing was written to {self.record.log}: do the nodes see this folder?")

    def to_dict(self) -> dict[str, Any] | None:
        """What Slurm says, for `--json`; None of a job that was not handed in."""
        if self.record is None:
            return None
        return {"job_id": self.record.job_id, "cluster": self.record.cluster,
                "log": self.record.log, "trouble": self.trouble, "cause": self.cause,
                **({} if self.said is None else asdict(self.said))}


def job_status(output: Path, ask: Callable[[SlurmRecord], SlurmJob | None] = SlurmRecord.ask,
               ) -> JobStatus | None:
    """How the job is that writes into this folder; None where there has been none. `ask`: Slurm,
    about a job that was handed in."""
    record, said, trouble = load_record(output), None, None
    if record is not None:
        try:
            said = ask(record)
        except XgptError as error:
            trouble = str(error)
    run = run_status(output)  # after Slurm's word: a run that ends in between has written so
    if run is None and record is None:
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
