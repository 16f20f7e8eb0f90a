"""Slurm jobs: the batch script, a pure function of the job and its plan; and calls that submit a
script, query a job and cancel it.

Every value from outside goes through `quoted`, whose form bash and sbatch's reader of `#SBATCH`
lines understand alike. It is the only such form: sbatch takes a backslash for an escape even
between single quotes, and a space for an end even behind a backslash.

squeue knows jobs that wait or run. sacct knows jobs that have ended, if the cluster keeps accounts;
`scontrol show job` knows them for some minutes.
"""

import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from xgpt.core.errors import EXIT_FAILED, EXIT_RESUMABLE, XgptError, wrong
from xgpt.job.sections import SlurmSpec

_SAFE = re.compile(r"[A-Za-z0-9_@%+=:,./-]+")
_IN_QUOTES = re.compile(r'([\\"$`])')
_IDLE = 2  # chosen: allocations in a row without an answer, after which the job ends
_KILLED_BY_WARNING = 128 + 10  # exit code: SIGUSR1 came before Python had a handler for it


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One job file of a batch job, its output folder, and its `--set`s. `planned`: what its ranks
    would be started by, where that is known."""

    job_file: Path
    output: Path
    overrides: tuple[str, ...] = ()
    planned: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchJob:
    """Values for a batch script; several tasks become an array. `time`: limit of the spec or from
    the plan; None: the partition's. `gpus_per_node`: as sbatch takes it."""

    name: str
    spec: SlurmSpec
    tasks: tuple[Task, ...]
    nodes: int
    ranks_each: int
    gpus_per_node: str | None
    time: str | None
    python: str

    @property
    def is_array(self) -> bool:
        return len(self.tasks) > 1


def quoted(text: str) -> str:
    """`text` quoted as one word for bash and for `#SBATCH` lines."""
    assert not re.search(r"[\n\r\0]", text), f"no word of one line: {text!r}"
    return text if _SAFE.fullmatch(text) else '"' + _IN_QUOTES.sub(r"\\\1", text) + '"'


def check_paths(job: BatchJob) -> None:
    """Raises InputError for a path that no script can hold, or that Slurm reads as a pattern."""
    for task in job.tasks:
        for path in (task.job_file, task.output):
            if re.search(r"[\n\r]", str(path)):
                raise wrong(task.job_file, "slurm", str(path), "a path without line breaks")
    if "\\" in str(job.tasks[0].output):
        raise wrong(job.tasks[0].job_file, "output", str(job.tasks[0].output),
                    "a path without a backslash: Slurm would look for its log elsewhere")


def render_sbatch(job: BatchJob) -> str:
    """The text of the batch script, which starts `xgpt submit` once on the first node."""
    return "\n".join(("#!/bin/bash", *_options(job), "", *_tasks(job), *_environment(job.spec),
                      _body(job.spec)))


def _options(job: BatchJob) -> list[str]:
    spec, folder = job.spec, str(job.tasks[0].output)
    log_name = "slurm-%A_%a.log" if job.is_array else "slurm-%j.log"
    at_once = "" if spec.at_once is None else f"%{spec.at_once}"
    own = {
        "job-name": job.name, "chdir": folder,
        "output": f"{folder.replace('%', '%%')}/{log_name}", "open-mode": "append",
        "array": f"0-{len(job.tasks) - 1}{at_once}" if job.is_array else None,
        "signal": f"B:USR1@{spec.warning_s}", **_place(spec),
        "dependency": spec.dependency, "nodes": job.nodes,
        "ntasks-per-node": job.ranks_each, "cpus-per-task": spec.cpus_per_task,
        "gpus-per-node": job.gpus_per_node, "mem": spec.mem, "time": job.time,
        "mail-type": ",".join(spec.mail_type) or None, "mail-user": spec.mail_user}
    flags = ["--requeue" if spec.requeue else "--no-requeue", *["--exclusive"] * spec.exclusive]
    lines = [f"--{name}={quoted(str(value))}" for name, value in own.items() if value is not None]
    return [f"#SBATCH {line}" for line in (*lines, *flags, *spec.extra)]


def _place(spec: SlurmSpec) -> dict[str, str | None]:
    return {name: getattr(spec, name)
            for name in ("partition", "account", "qos", "constraint", "reservation")}


def _tasks(job: BatchJob) -> list[str]:
    """Lines that set `output` and `submit`; in an array, those of this task."""
    if not job.is_array:
        return [*_task(job.python, job.tasks[0]), ""]
    cases = [f"{index})\n{textwrap.indent(chr(10).join(_task(job.python, task)), '    ')}\n    ;;"
             for index, task in enumerate(job.tasks)]
    return ["case $SLURM_ARRAY_TASK_ID in", *cases, "esac", ""]


def _task(python: str, task: Task) -> list[str]:
    words = [python, "-P", "-m", "xgpt.cli.main", "submit", str(task.job_file)]
    words += [word for override in task.overrides for word in ("--set", override)]
    planned = [f"# starts as planned now: {task.planned}"] if task.planned else []
    return [f"output={quoted(str(task.output))}", f"submit=({' '.join(map(quoted, words))})",
            *planned]


# The trap also fires inside sourced files, where only the end counts. Some versions of `module` end
# with 0 although there is no such module.
_CHECKED = f"""\
failed() {{  # what fails here ends the job
    local code=$? line=${{BASH_LINENO[0]}}
    [ ${{#FUNCNAME[@]}} -eq 2 ] || return 0
    echo "xgpt: the job ends, since line $line of slurm.sh failed with code $code:" >&2
    sed -n "$line{{s/^ */    /;p}}" "$0" >&2
    exit {EXIT_FAILED}
}}
load_module() {{
    local said code=0
    said=$(mktemp) && module load "$1" 2> "$said" || code=$?
    cat "$said" >&2
    ! grep -q "ERROR:" "$said" && rm "$said" && return "$code"
}}
trap failed ERR"""


def _environment(spec: SlurmSpec) -> list[str]:
    """Lines that load modules, activate the virtual environment and set variables."""
    lines = [f"load_module {quoted(name)}" for name in spec.modules]
    if spec.venv is not None:
        lines.append(f". {quoted(spec.venv + '/bin/activate')}")
    lines += [f"export {name}={quoted(value)}" for name, value in spec.env]
    lines += spec.prologue
    return [_CHECKED, *lines, "trap - ERR", "set +eu +o pipefail", ""] if lines else []


def _body(spec: SlurmSpec) -> str:
    return f"""\
# Slurm warns only this shell before the time limit. Then xgpt stops in good order (exit code \
{EXIT_RESUMABLE}).
# The job is requeued at most {spec.requeue} times. It ends if `xgpt stop` asked for the stop (by \
the file `stop`),
# or if {_IDLE} allocations in a row added no answer.

warned= told= xgpt=
warn() {{
    warned=yes
    [ -z "$xgpt" ] || [ -n "$told" ] || {{ told=yes; kill -USR1 "$xgpt"; }}
}}
trap warn USR1
answers() {{ wc -c "$output/results.jsonl" "$output/held.jsonl" 2>/dev/null | tail -n 1; }}
before=$(answers)

"${{submit[@]}}" &
xgpt=$!
[ -z "$warned" ] || warn
while kill -0 "$xgpt" 2>/dev/null; do wait "$xgpt"; done
wait "$xgpt"
code=$?

if [ -n "$warned" ] && [[ $code = {EXIT_RESUMABLE} || $code = {_KILLED_BY_WARNING} ]] \
&& [ ! -s "$output/stop" ]; then
    count="$output/slurm-requeued-$SLURM_JOB_ID"
    times=0 idle=0
    [ ! -s "$count" ] || read -r times idle < "$count"
    if [ "$(answers)" = "$before" ]; then idle=$((idle + 1)); else idle=0; fi
    if [ "$idle" -ge {_IDLE} ]; then
        echo "xgpt: {_IDLE} allocations in a row added no answer: not requeued. See above \
what took their time, or give slurm.time more"
        exit {EXIT_FAILED}
    fi
    if [ "$times" -lt {spec.requeue} ]; then
        echo "$((times + 1)) $idle" > "$count"
        echo "the time limit is near: back to the queue, time $((times + 1)) of {spec.requeue}"
        scontrol requeue "$SLURM_JOB_ID" && exit 0
    fi
    echo "the time limit is near: the same \\`xgpt submit\\` goes on from here"
fi
exit "$code"
"""


_TIMEOUT_S = 60.0
_TRIAL_S = 900.0  # chosen: of a task on each node, its wait in the queue included
_WAITING = ("PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD")
_ENDED = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL",
          "DEADLINE", "PREEMPTED", "REVOKED")
_NOTHING = ("", "None", "(null)", "N/A", "Unknown", "UNLIMITED", "Partition_Limit")


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """A job as Slurm reports it; None for fields that it does not. `state`: Slurm's word, in
    capitals."""

    state: str
    reason: str | None = None
    elapsed: str | None = None
    limit: str | None = None
    start: str | None = None
    nodes: str | None = None
    exit_code: str | None = None  # "75:0": the script's exit code, and the signal that ended it

    @property
    def is_waiting(self) -> bool:
        return self.state in _WAITING

    @property
    def has_ended(self) -> bool:
        return self.state in _ENDED

    @property
    def is_at_work(self) -> bool:
        return not self.is_waiting and not self.has_ended


def submit_script(script: Path) -> tuple[str, str | None]:
    """Submits the script: (the job's id, its cluster in a federation or None). Raises XgptError
    with sbatch's message."""
    # a shell within another allocation would pass on that one's sizes
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


def query_job(job_id: str, cluster: str | None = None) -> SlurmJob | None:
    """The job's present state; None if Slurm does not know it any more. Raises XgptError if Slurm
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
        return _job(lines[0].split("|"))
    done = _call(["sacct", "--allocations", "--noheader", "--parsable2", f"--jobs={job_id}",
                  "--format=State,Reason,Elapsed,Timelimit,Start,NodeList,ExitCode", *where])
    lines = [] if done is None or done.returncode != 0 else done.stdout.splitlines()
    return _job(lines[-1].split("|")) if lines else _from_memory(job_id, where)


def ask_tasks(spec: SlurmSpec | None, nodes: int, gpus_per_node: str | None,
              words: Sequence[str]) -> dict[str, str]:
    """Runs this Python with `words` in a task on each of so many nodes, within this allocation or
    in one of its own. Returns the last line of each by node, or of its errors. Raises XgptError
    where Slurm does not run them all."""
    spec = spec or SlurmSpec()
    own = {**_place(spec), "gpus-per-node": gpus_per_node, "time": "10"}
    options = ["--overlap"] if "SLURM_JOB_ID" in os.environ else [
        *(f"--{name}={value}" for name, value in own.items() if value is not None),
        *(word for option in spec.extra for word in shlex.split(option))]
    python = sys.executable if spec.venv is None else f"{spec.venv}/bin/python"
    program = " ".join(map(quoted, (*spec.container, python, *words)))
    script = "\n".join(['echo "$SLURMD_NODENAME"', *_environment(spec), f"exec {program}"])
    done = _call(["srun", "--label", "--mpi=none", f"--nodes={nodes}", f"--ntasks={nodes}",
                  "--ntasks-per-node=1", *options, "bash", "-c", script], limit_s=_TRIAL_S)
    if done is None:
        raise XgptError("there is no srun on this machine: ask from a login node of the cluster")
    lines, errors = (re.findall(r"^ *(\d+): (.*)$", text, re.M)
                     for text in (done.stdout, done.stderr))
    names, last, failed = dict[str, str](), dict(lines), dict(errors)
    for task, line in sorted(lines, key=lambda own: int(own[0])):
        names.setdefault(task, line)
    if len(names) < nodes:
        raise XgptError(f"Slurm ran {len(names)} of {nodes} tasks: {_said(done)}")
    return {name: failed.get(task, "ended without a word") if last[task] == name else last[task]
            for task, name in names.items()}


def cancel_job(job_id: str, cluster: str | None = None) -> None:
    """Cancels the job. Raises XgptError with scancel's message."""
    done = _call(["scancel", *([] if cluster is None else [f"--clusters={cluster}"]), job_id])
    if done is None or done.returncode != 0:
        raise XgptError("scancel failed: "
                        + ("there is none on this machine" if done is None else _said(done)))


def _from_memory(job_id: str, where: Sequence[str]) -> SlurmJob | None:
    done = _call(["scontrol", *where, "--oneliner", "show", "job", job_id])
    if done is None or done.returncode != 0:
        return None
    keys = ("JobState", "Reason", "RunTime", "TimeLimit", "StartTime", "NodeList", "ExitCode")
    fields = dict(reversed(re.findall(r"(?:^|\s)(\w+)=(\S*)", done.stdout)))  # the first counts
    return _job([fields.get(key, "") for key in keys])


def _job(values: Sequence[str]) -> SlurmJob:
    """The SlurmJob of values in the order of its fields; a state may be "CANCELLED by 1000"."""
    known = [None if text.strip() in _NOTHING else text.strip() for text in values]
    return SlurmJob((known[0] or "").partition(" ")[0], *known[1:])


def _call(command: Sequence[str], environment: dict[str, str] | None = None,
          limit_s: float = _TIMEOUT_S) -> subprocess.CompletedProcess[str] | None:
    """The finished call of a program; None if there is no such program. Raises XgptError if it does
    not answer."""
    try:
        return subprocess.run(command, capture_output=True, text=True, errors="replace",
                              stdin=subprocess.DEVNULL, timeout=limit_s, check=False,
                              env=environment)
    except FileNotFoundError:
        return None
    except subprocess.TimeoutExpired:
        raise XgptError(f"{command[0]} gave no answer within {limit_s:.0f} s") from None


def _said(done: subprocess.CompletedProcess[str]) -> str:
    return done.stderr.strip() or f"exit code {done.returncode}"
