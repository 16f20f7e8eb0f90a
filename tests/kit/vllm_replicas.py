# owner tb
"""Toy jobs of two replicas that vLLM executes, as real commands, and their processes."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import by_data_sheets
from faults import alive, tree, wait
from job_folder import as_requests
from mpi_runs import sets
from vllm_jobs import vllm_job

from xrunner.files.heartbeat import RankState, read_heartbeats
from xrunner.query import PreparedQuery

RANK, ENGINE = b"xrunner.backends.vllm.vllm_worker", b"xrunner.backends.vllm.engine_process"
STARTED: list[subprocess.Popen[bytes]] = []  # for a test that fails to end
WINDOW_S = 2.5  # in which each rank writes its heartbeat


class Processes(NamedTuple):
    """A replica's rank, and its engine's process (None: between two)."""

    rank: int
    engine: int | None


@dataclass(slots=True)
class ReplicaJob:
    """A job of two replicas, in a folder of its own, whose command is started again and again."""

    folder: Path
    file: Path
    environ: dict[str, str]
    overrides: tuple[str, ...] = ()
    process: Any = None
    seen: set[int] | None = None  # every process that its commands started, as far as looked at

    @property
    def output(self) -> Path:
        return self.folder / "out"

    def start(self) -> None:
        with (self.folder / "printed").open("w") as out, (self.folder / "told").open("w") as err:
            self.process = subprocess.Popen(
                [*by_data_sheets.COMMAND, "submit", str(self.file), "--json",
                 *sets(*self.overrides)], stdout=out, stderr=err, env=self.environ)
        STARTED.append(self.process)

    def end(self, timeout_s: float = 900) -> dict[str, Any]:
        """Returns the output of `--json`, the exit code and messages, once all has ended."""
        self.process.wait(timeout=timeout_s)
        printed, told = ((self.folder / name).read_text() for name in ("printed", "told"))
        wait(lambda: not self.left(), f"all ends: {self.left()}", 30)
        assert "Traceback" not in told, told
        facts = json.loads(printed) if printed else {}
        return {**facts, "code": self.process.returncode, "told": " ".join(told.split())}

    def left(self) -> list[int]:
        """Processes of this job that have not ended: those that were seen, and any that has a file
        of its folder open."""
        holders = set[int]()
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if any(os.readlink(file).startswith(f"{self.folder}/")
                       for file in (folder / "fd").iterdir()):
                    holders.add(int(folder.name))
        return sorted(holders | set(alive([*(self.seen or ())])))

    def processes(self) -> dict[int, Processes]:
        """Processes of each running replica."""
        found, below = {}, tree(self.process.pid)
        self.seen = {*(self.seen or ()), *below}
        for pid in below:
            if RANK in _words(pid) and (number := _rank_of(pid)) is not None:
                engines = [one for one in tree(pid)[1:] if ENGINE in _words(one)]
                found[number] = Processes(pid, engines[0] if engines else None)
        return found

    def lines(self) -> list[dict[str, Any]]:
        """Every whole line of results, and of those that wait for one before them."""
        found = []
        for name in ("held.jsonl", "results.jsonl"):
            with suppress(FileNotFoundError):
                text = (self.output / name).read_text()
                found += [json.loads(line) for line in text[:text.rfind("\n") + 1].splitlines()]
        return found

    def count(self) -> int:
        return len({line["index"] for line in self.lines()})

    def states(self) -> dict[int, RankState]:
        """The last heartbeat of each replica's rank."""
        return {state.rank: state for state in read_heartbeats(self.output)}

    def at_work(self) -> list[int]:
        """Replicas that take steps now, and have taken some since their engines started."""
        time.sleep(WINDOW_S)  # until what they did before is written
        before = self.states()
        time.sleep(WINDOW_S)
        return [rank for rank, state in self.states().items() if not state.note and
                rank in before and state.num_steps > before[rank].num_steps]

    def await_lines(self, more: int) -> bool:
        """Whether so many more lines came; False where the command ended before."""
        least = self.count() + more

        def is_so() -> bool:
            time.sleep(0.1)
            return self.process.poll() is not None or self.count() >= least

        wait(is_so, f"{least} results", 600)
        return self.process.poll() is None

    def messages(self) -> str:
        return " ".join((self.output / "messages.log").read_text().split())

    def answers(self) -> list[tuple[str, list[int]]]:
        """(id, tokens) of every line of results.jsonl, in their order."""
        rows = map(json.loads, (self.output / "results.jsonl").read_text().splitlines())
        return [(row["id"], row["output_ids"]) for row in rows]


def replica_job(folder: Path, model: Path, python: str, environ: dict[str, str],
                queries: list[PreparedQuery], schedule: str, *overrides: str) -> ReplicaJob:
    """`schedule`: its keys beside the two replicas."""
    folder.mkdir()
    file = vllm_job(folder, model, python, as_requests(queries), f"{schedule}, replicas: 2",
                    "ignore_eos: true, restarts: 20, ", ranks=2)
    return ReplicaJob(folder, file, environ, overrides)


def inject(job: ReplicaJob, kind: str, chance: random.Random) -> str:
    """Lets it happen to a job at work; returns what was hit, in words."""
    at_work = job.at_work() if kind == "stop an engine" else []
    found = job.processes()
    replica = chance.choice(at_work or sorted(found) or [0])
    own = found.get(replica)
    if kind == "kill the launcher":
        job.process.kill()
    elif own is None or (kind != "kill a rank" and own.engine is None):
        return ""  # between two
    else:
        whom = own.rank if kind == "kill a rank" else own.engine
        with suppress(ProcessLookupError):
            os.kill(whom or 0, signal.SIGSTOP if kind == "stop an engine" else signal.SIGKILL)
    return f"{kind}, replica {replica}"


def traces(pids: list[int]) -> set[Path]:
    """Files of shared memory and sockets that these processes have: what a kill may leave. MPICH's
    own are removed by a later start (tests/mpi/test_faults.py)."""
    found = set[Path]()
    inodes = set[str]()
    for pid in pids:
        with suppress(OSError):
            names = [os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir()]
            inodes |= {name[8:-1] for name in names if name.startswith("socket:[")}
            maps = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
            names += [line.split(maxsplit=5)[-1] for line in maps]
            found |= {Path(name) for name in names if name.startswith("/dev/shm/")
                      and "mpich" not in name and not name.endswith("(deleted)")}
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        words = line.split(maxsplit=7)
        if len(words) == 8 and words[6] in inodes and words[7].startswith("/"):
            found.add(Path(words[7]))
    return found


def _words(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []


def _rank_of(pid: int) -> int | None:
    with suppress(OSError):
        for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if entry.startswith(b"PMI_RANK="):
                return int(entry[9:])
    return None
