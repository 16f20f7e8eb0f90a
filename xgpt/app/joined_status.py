"""How a job is: what its files say, joined with what Slurm says of it, where it was handed in."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from xgpt.app.slurm_record import SlurmRecord, load_record
from xgpt.app.status import RunStatus, run_status
from xgpt.core.errors import XgptError
from xgpt.launch.slurm_queue import SlurmJob


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
