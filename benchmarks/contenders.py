"""Who is compared: xgpt in several layouts, and the peers that are installed; one run of each.

A peer runs in an environment of its own (a driver of benchmarks/peers/), xgpt in this one.
"""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import floor
from workload import Query, write_job

from xgpt.core.system.machine import Contention

DRIVERS = Path(__file__).resolve().parent / "peers"
XGPT = [sys.executable, "-c", "from xgpt.cli.main import main; main()"]
LAYOUTS = {"xgpt, 1 rank x {threads} threads": {"ranks": 1},
           "xgpt, {threads} ranks x 1 thread": {"ranks": "{threads}"}}
QUIET_SHARE, LOOK_S = 0.03, 5.0
LIMIT_S = 1200.0  # of a command


class Peer(NamedTuple):
    name: str
    interpreter: str  # key of `interpreters`
    driver: str
    mode: str = "default"
    is_converted: bool = False  # its model lies in a folder of its own
    takes_t5: bool = False
    dtype: str | None = None  # None: the model's
    is_compiled: bool = False  # once, by its first run
    more: tuple[str, ...] = ()  # arguments of its driver


PEERS = (
    Peer("OpenVINO GenAI", "openvino", "run_openvino.py", is_converted=True),
    Peer("OpenVINO GenAI, float32", "openvino", "run_openvino.py", "f32", is_converted=True),
    Peer("vLLM, compiled", "vllm", "run_vllm.py", "compiled", is_compiled=True),
    Peer("vLLM, eager", "vllm", "run_vllm.py", "eager"),
    Peer("vLLM, compiled, float32", "vllm", "run_vllm.py", "compiled", dtype="float32",
         is_compiled=True),
    Peer("transformers, continuous", "transformers", "run_transformers.py", "continuous"),
    Peer("transformers, static", "transformers", "run_transformers.py", "static", takes_t5=True),
    Peer("CTranslate2", "ctranslate2", "run_ctranslate2.py", is_converted=True, takes_t5=True),
)


class FailedRun(Exception):
    """A contender ended with an error, or not at all."""


class Outcome(NamedTuple):
    """One run. `whole_s`: of the command, from its start to its end."""

    version: str
    run_s: float
    whole_s: float
    output_tokens: int
    is_exact: bool
    others_share: float


@dataclass(slots=True)
class Contender:
    """An engine in one way of running it. `run`: into a folder that is new for each run."""

    name: str
    run: Callable[[Path], Outcome]
    rounds: range  # in which it takes part; 0 is not counted
    is_xgpt: bool = False
    outcomes: list[Outcome] = field(default_factory=list)
    last: Path | None = None  # the folder of its last run

    def take(self, number: int, scratch: Path) -> None:
        """Its turn in this round, in a new folder of `scratch`."""
        folder = scratch / f"{re.sub(r'[^a-z0-9]+', '-', self.name.lower())}-{number}"
        folder.mkdir()
        outcome = self.run(folder)
        print(f"round {number}: {self.name}: {outcome}", flush=True)
        self.last = folder
        if number > 0:
            self.outcomes.append(outcome)

    @property
    def output(self) -> Path:
        """What the last run of xgpt has left."""
        assert self.is_xgpt and self.last is not None, f"{self.name = }"
        return self.last / "out"

    @property
    def tokens_per_s(self) -> float:
        return statistics.median(o.output_tokens / o.run_s for o in self.outcomes)


class Quiet(NamedTuple):
    """Lets a run begin when others leave the cores alone."""

    patience_s: float  # 0: no waiting

    def wait(self) -> None:
        """Returns once they have for LOOK_S seconds."""
        start = time.monotonic()
        while (waited_s := time.monotonic() - start) < self.patience_s:
            contention = Contention()
            time.sleep(LOOK_S)
            if (share := contention.others_share() or 0.0) < QUIET_SHARE:
                return
            print(f"waiting: others use {share:.0%} of the cores ({waited_s:.0f} s)", flush=True)
        if self.patience_s:
            sys.exit(f"others did not leave the cores alone for {self.patience_s:.0f} s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all contenders of a model are given."""

    model: dict[str, Any]
    queries: list[Query]
    workload: Path
    threads: int
    scratch: Path
    quiet: Quiet


def xgpt_contenders(setting: Setting, config: dict[str, Any], rounds: int) -> list[Contender]:
    contenders = []
    for name, given in setting.model.get("xgpt", config.get("xgpt", LAYOUTS)).items():
        keys = {k: setting.threads if v == "{threads}" else v for k, v in given.items()}
        if "ranks" in keys:
            keys.setdefault("threads_per_rank", max(setting.threads // keys["ranks"], 1))

        def run(folder: Path, keys: dict[str, Any] = keys) -> Outcome:
            return run_xgpt(setting, folder, keys)

        contenders.append(Contender(name.format(threads=setting.threads), run,
                                    range(rounds + 1), is_xgpt=True))
    return contenders


def run_xgpt(setting: Setting, folder: Path, keys: dict[str, Any],
             sections: dict[str, Any] | None = None) -> Outcome:
    """`keys` of the job's section `run`; `sections`: others."""
    job = write_job(folder, setting.queries, str(setting.model["folder"]),
                    {"dtype": setting.model["dtype"], **keys}, sections or {})
    found, whole_s, others = timed([*XGPT, "submit", str(job), "--json"])
    results = floor.read_lines(folder / "out" / "results.jsonl")
    counts = [len(row.get("logprobs") or ()) if "continuation_ids" in row
              else row["output_tokens"] for row in results]
    return Outcome(
        version="this commit", run_s=json.loads(found)["wall_s"]["measured"], whole_s=whole_s,
        output_tokens=sum(counts), others_share=others,
        is_exact=counts == [query.targets or query.output_tokens
                            for query in setting.queries for _ in range(query.samples)])


def peer_contenders(setting: Setting, config: dict[str, Any], rounds: int,
                    peers: Sequence[Peer] = PEERS) -> list[Contender]:
    model, interpreters = setting.model, config.get("interpreters") or {}
    is_t5 = "t5" in model["name"].lower()
    wanted, contenders = config.get("peers", [peer.name for peer in peers]), []
    if unknown := set(wanted) - {peer.name for peer in peers}:
        sys.exit(f"{unknown} are none of {[peer.name for peer in peers]}")
    for peer in [peer for peer in peers if peer.name in wanted]:
        folder = model.get(peer.interpreter if peer.is_converted else "folder")
        if peer.interpreter not in interpreters or folder is None or is_t5 > peer.takes_t5:
            continue
        command = [interpreters[peer.interpreter], str(DRIVERS / peer.driver), "--model",
                   str(folder), "--workload", str(setting.workload),
                   "--dtype", peer.dtype or model["dtype"],
                   "--threads", str(setting.threads), "--mode", peer.mode,
                   "--queries", str(len(setting.queries)), *peer.more]

        def run(_folder: Path, command: list[str] = command) -> Outcome:
            found, whole_s, others = timed(command)
            said = json.loads(next(line for line in found.splitlines()
                                   if line.startswith('{"version"')))
            return Outcome(
                version=said["version"], run_s=said["run_s"], whole_s=whole_s,
                output_tokens=said["output_tokens"], is_exact=said["is_exact"],
                others_share=others)

        last = 1 if peer.interpreter in (config.get("once") or ()) else rounds
        contenders.append(Contender(peer.name, run, range(0 if peer.is_compiled else 1, last + 1)))
    return contenders


def timed(command: Sequence[str]) -> tuple[str, float, float]:
    """(what it printed, seconds of the whole command, others' share of the cores meanwhile)"""
    contention, start = Contention(), time.perf_counter()
    environment, folder = dict(os.environ), None
    if command[0] != sys.executable:  # another environment, which has nothing to do with ours
        environment.pop("PYTHONPATH", None)
        # Python looks into the folder it is started in: transformers took kernels.py beside this
        # file for the package of that name, and vLLM did not start
        folder = tempfile.gettempdir()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          start_new_session=True, env=environment, cwd=folder) as process:
        try:
            printed, complaints = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with the processes that it has started
            raise FailedRun(f"not done after {LIMIT_S:.0f} s") from None
    whole_s = time.perf_counter() - start
    if process.returncode != 0:
        raise FailedRun(f"exit code {process.returncode}: {complaints.strip()[-600:]}")
    return printed, whole_s, contention.others_share() or 0.0
