"""What Slurm is asked and told: hand in a script, how a job is, take a job back.

A job that waits or runs is known to squeue. One that has ended is known to sacct where the cluster
keeps accounts, and for some minutes to `scontrol show job`.
"""

import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from xgpt.core.errors import XgptError

_TIMEOUT_S = 60.0
_WAITING = ("PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD")
_ENDED = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL",
          "DEADLINE", "PREEMPTED", "REVOKED")
_NOTHING = ("", "None", "(null)", "N/A", "Unknown", "UNLIMITED", "Partition_Limit")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmJob:
    """What Slurm says of a job; None for what it does not. `state` is Slurm's word, in capitals."""

    state: str
    reason: str | None = None
    elapsed: str | None = None
    limit: str | None = None
    start: str | None = None
    nodes: str | None = None
    exit_code: str | None = None  # "75:0": of the script, and the signal that ended it

    @property
    def is_waiting(self) -> bool:
        return self.state in _WAITING

    @property
    def has_ended(self) -> bool:
        return self.state in _ENDED

    @property
    def is_at_work(self) -> bool:
        return not self.is_waiting and not self.has_ended


def hand_in(script: Path) -> tuple[str, str | None]:
    """Submits the script; the job's id and, in a federation, its cluster. Raises XgptError with
    what sbatch says."""
    # a shell within another allocation would pass that one's sizes on
    environment = {name: value for name, value in os.environ.items()
                   if not name.startswith("SLURM_") or name == "SLURM_CONF"}
    done = _call(["sbatch", "--parsable", str(script)], environment)
    if done is None:
        raise XgptError("there is no sbatch on this machine: submit from a login node of the "
                        "cluster (`--dry-run` shows the script anywhere)")
    if done.returncode != 0:
        raise XgptError(f"sbatch refused the job: {_said(done)}\nthe script: {script}")
    job_id, _, cluster = done.stdout.strip().splitlines()[-1].partition(";")
    return job_id, cluster or None


def ask(job_id: str, cluster: str | None = None) -> SlurmJob | None:
    """How the job is; None where Slurm does not know it any more. Raises XgptError where Slurm
    cannot be asked."""
    where = [] if cluster is None else [f"--clusters={cluster}"]
    queued = _call(["squeue", "--noheader", "--array", f"--jobs={job_id}",
                    "--format=%T|%r|%M|%l|%S|%N", *where])
    if queued is None:
        raise XgptError("Slurm cannot be asked on this machine: there is no squeue")
    if queued.returncode != 0 and "Invalid job id" not in queued.stderr:
        raise XgptError(f"squeue failed: {_said(queued)}")
    lines = [line for line in queued.stdout.splitlines() if line.count("|") == 5]
    if lines:
        state, reason, elapsed, limit, start, nodes = map(_value, lines[0].split("|"))
        return SlurmJob(state=state or "", reason=reason, elapsed=elapsed, limit=limit,
                        start=start, nodes=nodes)
    return _from_accounts(job_id, where) or _from_memory(job_id, where)


def take_back(job_id: str, cluster: str | None = None) -> None:
    """Cancels the job. Raises XgptError."""
    done = _call(["scancel", *([] if cluster is None else [f"--clusters={cluster}"]), job_id])
    if done is None or done.returncode != 0:
        raise XgptError("scancel failed: "
                        + ("there is none on this machine" if done is None else _said(done)))


def _from_accounts(job_id: str, where: Sequence[str]) -> SlurmJob | None:
    done = _call(["sacct", "--allocations", "--noheader", "--parsable2", f"--jobs={job_id}",
                  "--format=State,Reason,ElapsedRaw,Timelimit,Start,NodeList,ExitCode", *where])
    lines = [] if done is None or done.returncode != 0 else done.stdout.splitlines()
    if not lines:
        return None
    state, reason, elapsed, limit, start, nodes, code = map(_value, lines[-1].split("|"))
    return SlurmJob(state=(state or "").split()[0], reason=reason,  # "CANCELLED by 1000"
                    elapsed=None if elapsed is None else _clock(int(elapsed)), limit=limit,
                    start=start, nodes=nodes, exit_code=code)


def _from_memory(job_id: str, where: Sequence[str]) -> SlurmJob | None:
    done = _call(["scontrol", *where, "--oneliner", "show", "job", job_id])
    if done is None or done.returncode != 0:
        return None
    keys = ("JobState", "Reason", "RunTime", "TimeLimit", "StartTime", "NodeList", "ExitCode")
    fields = {key: _value(match[1]) for key in keys if (
        match := re.search(rf"(?:^|\s){key}=(\S*)", done.stdout)) is not None}
    return SlurmJob(
        state=fields.get("JobState") or "", reason=fields.get("Reason"),
        elapsed=fields.get("RunTime"), limit=fields.get("TimeLimit"), start=fields.get("StartTime"),
        nodes=fields.get("NodeList"), exit_code=fields.get("ExitCode"))


def _value(text: str) -> str | None:
    return None if text.strip() in _NOTHING else text.strip()


def _clock(seconds: int) -> str:
    return f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


def _call(command: Sequence[str], environment: dict[str, str] | None = None,
          ) -> subprocess.CompletedProcess[str] | None:
    """None where there is no such program. Raises XgptError where it does not answer."""
    try:
        return subprocess.run(command, capture_output=True, text=True, errors="replace",
                              stdin=subprocess.DEVNULL, timeout=_TIMEOUT_S, check=False,
                              env=environment)
    except FileNotFoundError:
        return None
    except subprocess.TimeoutExpired:
        raise XgptError(f"{command[0]} gave no answer within {_TIMEOUT_S:.0f} s") from None


def _said(done: subprocess.CompletedProcess[str]) -> str:
    return done.stderr.strip() or f"exit code {done.returncode}"
