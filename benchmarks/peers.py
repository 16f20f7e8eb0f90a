"""xgpt beside the peers that are installed, in turns, on one workload; with the floor beside them,
and where xgpt's time goes.

    python benchmarks/peers.py --config FILE [--workload FILE] [--rounds 3] [--threads 2]
                               [--only NAME] [--queries N] [--out benchmarks/results]

Every query is there at the start and gives exactly its number of tokens (benchmarks/workload.py);
every engine gets the same threads. FILE says what is on this machine, for instance:

    interpreters:                       # each peer lives in an environment of its own
      openvino: /opt/peers/openvino/bin/python
      vllm: /opt/peers/vllm/bin/python
      transformers: /opt/peers/transformers/bin/python
      ctranslate2: /opt/peers/ctranslate2/bin/python
    models:
    - name: SmolLM2-135M
      dtype: bfloat16
      folder: /opt/models/smollm2-135m            # Hugging Face's layout
      openvino: /opt/models/smollm2-135m-openvino # converted, where the peer needs that
    xgpt:                                         # how it is run: keys of the job's section `run`
      "xgpt, 1 rank x 2 threads": {ranks: 1}
    once: [transformers]                          # too slow for every round
    peers: [OpenVINO GenAI, "vLLM, compiled"]     # only these of the rows below (default: all)

A peer that is not named there is left out. The drivers are in benchmarks/peers/; each says how its
model is converted. What a first run alone has to do (xgpt profiles, vLLM compiles) is done in an
uncounted one. Before every run the script waits until others use next to nothing of the cores.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
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

import account
import floor
import torch
import yaml
from workload import Query, read_or_draw, write_job, write_workload

from xgpt.launch.contention import Contention

DRIVERS = Path(__file__).resolve().parent / "peers"
XGPT = [sys.executable, "-c", "from xgpt.cli.main import main; main()"]
LAYOUTS = {"xgpt, 1 rank x {threads} threads": {"ranks": 1},
           "xgpt, {threads} ranks x 1 thread": {"ranks": "{threads}"}}
QUIET_SHARE, LOOK_S, PATIENCE_S, LIMIT_S = 0.03, 5.0, 7200.0, 1200.0


class Peer(NamedTuple):
    name: str
    interpreter: str  # key of `interpreters`
    driver: str
    mode: str = "default"
    is_converted: bool = False  # its model lies in a folder of its own
    takes_t5: bool = False
    dtype: str | None = None  # None: the model's
    is_compiled: bool = False  # once, by its first run


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


def main() -> None:
    arguments = _arguments()
    config = yaml.safe_load(arguments.config.read_text(encoding="utf-8"))
    queries = read_or_draw(arguments.workload)[:arguments.queries]
    quiet = Quiet(patience_s=0.0 if arguments.no_wait else PATIENCE_S)
    pages = [heading(queries, arguments)]
    with tempfile.TemporaryDirectory() as name:
        workload = Path(name) / "workload.jsonl"
        write_workload(queries, workload)
        for place, model in enumerate(config["models"]):
            if arguments.only in (None, model["name"]):
                scratch = Path(name) / str(place)
                scratch.mkdir()
                setting = Setting(model=model, queries=queries, workload=workload,
                                  threads=arguments.threads, scratch=scratch, quiet=quiet)
                pages.append(compare(setting, config, arguments.rounds))
                print(pages[-1], flush=True)
    if arguments.out is not None:
        path = arguments.out / f"peers-{processor_slug()}-{time.strftime('%Y-%m-%d')}.md"
        path.write_text("\n\n".join(pages) + "\n", encoding="utf-8")
        print(f"written: {path}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--workload", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", help="one model of the file")
    parser.add_argument("--queries", type=int, help="only the first so many, to try it out")
    parser.add_argument("--no-wait", action="store_true", help="for a quiet machine; to try it out")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def compare(setting: Setting, config: dict[str, Any], rounds: int) -> str:
    """All contenders of one model in turns; a section of the page."""
    contenders = [*_xgpt(setting, config, rounds), *_peers(setting, config, rounds)]
    machines: dict[torch.dtype, floor.Machine] = {}
    failed: list[str] = []
    for number in range(rounds + 1):
        for contender in [c for c in contenders if number in c.rounds]:
            setting.quiet.wait()
            try:
                contender.take(number, setting.scratch)
            except FailedRun as error:
                if contender.is_xgpt:
                    raise
                failed.append(f"{contender.name} is left out: {error}")
                print(failed[-1], flush=True)
                contenders.remove(contender)
        if number > 0:
            measure_machine(machines, contenders, setting)
    best = max((c for c in contenders if c.is_xgpt), key=lambda c: c.tokens_per_s)
    machine = machines[floor.model_of(best.output)[1]]
    setting.quiet.wait()
    return "\n".join([
        f"## {setting.model['name']}, {setting.model['dtype']}", "",
        *table(contenders, machines, best.tokens_per_s), "", *failed, f"{best.name}:", "",
        *floor.words(machine.floor(best.output)), "", *floor.rates(machine), "",
        *account.words(best.output, *account.account_of(best.output))])


def measure_machine(machines: dict[torch.dtype, floor.Machine], contenders: Sequence[Contender],
                    setting: Setting) -> None:
    """In every round, for each dtype that xgpt ran in: the best rates of all rounds count."""
    specs = dict(reversed(floor.model_of(c.output)) for c in contenders if c.is_xgpt)
    for dtype, spec in specs.items():
        setting.quiet.wait()
        now = floor.measure(spec, dtype, setting.threads)
        machines[dtype] = now.better(machines[dtype]) if dtype in machines else now


def _xgpt(setting: Setting, config: dict[str, Any], rounds: int) -> list[Contender]:
    contenders = []
    for name, given in setting.model.get("xgpt", config.get("xgpt", LAYOUTS)).items():
        keys = {k: setting.threads if v == "{threads}" else v for k, v in given.items()}
        if "ranks" in keys:
            keys.setdefault("threads_per_rank", max(setting.threads // keys["ranks"], 1))

        def run(folder: Path, keys: dict[str, Any] = keys) -> Outcome:
            job = write_job(folder, setting.queries, str(setting.model["folder"]),
                            {"dtype": setting.model["dtype"], **keys})
            found, whole_s, others = timed([*XGPT, "submit", str(job), "--json"])
            metrics = json.loads(found)
            results = floor.read_lines(folder / "out" / "results.jsonl")
            counts = [row["output_tokens"] for row in results]
            return Outcome(
                version="this commit", run_s=metrics["wall_s"]["measured"], whole_s=whole_s,
                output_tokens=sum(counts), others_share=others,
                is_exact=counts == [query.output_tokens for query in setting.queries])

        contenders.append(Contender(name.format(threads=setting.threads), run,
                                    range(rounds + 1), is_xgpt=True))
    return contenders


def _peers(setting: Setting, config: dict[str, Any], rounds: int) -> list[Contender]:
    model, interpreters = setting.model, config.get("interpreters") or {}
    is_t5 = "t5" in model["name"].lower()
    wanted, contenders = config.get("peers", [peer.name for peer in PEERS]), []
    if unknown := set(wanted) - {peer.name for peer in PEERS}:
        sys.exit(f"{unknown} are none of {[peer.name for peer in PEERS]}")
    for peer in [peer for peer in PEERS if peer.name in wanted]:
        folder = model.get(peer.interpreter if peer.is_converted else "folder")
        if peer.interpreter not in interpreters or folder is None or is_t5 > peer.takes_t5:
            continue
        command = [interpreters[peer.interpreter], str(DRIVERS / peer.driver), "--model",
                   str(folder), "--workload", str(setting.workload),
                   "--dtype", peer.dtype or model["dtype"],
                   "--threads", str(setting.threads), "--mode", peer.mode,
                   "--queries", str(len(setting.queries))]

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
    environment = dict(os.environ)
    if command[0] != sys.executable:  # another environment, which has nothing to do with ours
        environment.pop("PYTHONPATH", None)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          start_new_session=True, env=environment) as process:
        try:
            printed, complaints = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with the processes that it has started
            raise FailedRun(f"not done after {LIMIT_S:.0f} s") from None
    whole_s = time.perf_counter() - start
    if process.returncode != 0:
        raise FailedRun(f"exit code {process.returncode}: {complaints.strip()[-600:]}")
    return printed, whole_s, contention.others_share() or 0.0


def table(contenders: Sequence[Contender], machines: dict[torch.dtype, floor.Machine],
          best: float) -> list[str]:
    """`best`: tokens a second of the best of xgpt."""
    lines = ["| | output tokens/s | xgpt's best is | run (s) | whole command (s) | "
             "share of its floor | others |", "|---|---|---|---|---|---|---|"]
    for contender in sorted(contenders, key=lambda c: -c.tokens_per_s):
        outcomes = contender.outcomes
        run_s = statistics.median(o.run_s for o in outcomes)
        reached = ""
        if contender.is_xgpt:
            machine = machines[floor.model_of(contender.output)[1]]
            reached = f"{machine.floor(contender.output).total_s / run_s:.0%}"
        notes = "" if all(o.is_exact for o in outcomes) else ", NOT the tokens asked for"
        lines.append(
            f"| {contender.name} ({outcomes[0].version}){notes} | "
            f"{spread([o.output_tokens / o.run_s for o in outcomes], 0)} | "
            f"{best / contender.tokens_per_s:.2f} times | {spread([o.run_s for o in outcomes], 1)} "
            f"| {spread([o.whole_s for o in outcomes], 1)} | {reached} | "
            f"{max(o.others_share for o in outcomes):.0%} |")
    return lines


def spread(values: Sequence[float], digits: int) -> str:
    """Median and range."""
    return (f"**{statistics.median(values):.{digits}f}** ({min(values):.{digits}f} to "
            f"{max(values):.{digits}f})")


def heading(queries: Sequence[Query], arguments: argparse.Namespace) -> str:
    inputs = sum(len(query.input_ids) for query in queries)
    outputs = sum(query.output_tokens for query in queries)
    return (f"# xgpt beside its peers, {processor()}, {arguments.threads} threads\n\n"
            f"{time.strftime('%Y-%m-%d')}; {len(queries)} queries, {inputs:,} input and "
            f"{outputs:,} output tokens, greedy, all there at the start. Medians and ranges of "
            f"{arguments.rounds} rounds in turns, after one uncounted; torch {torch.__version__}, "
            f"Python {platform.python_version()}. The time of a run is without loading; that of "
            "the whole command, from its start to its end, with it. `others`: most that other "
            "processes used of the cores during a run.")


def processor() -> str:
    """Its name, and what decides how fast its products are."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    name = re.search(r"^model name\s*: (.*)$", text, re.M)
    flags = set(re.search(r"^flags\s*: (.*)$", text, re.M)[1].split())  # type: ignore[index]
    known = {"avx512f": "AVX-512", "avx512_bf16": "bf16", "amx_bf16": "AMX"}
    sets = ", ".join([word for flag, word in known.items() if flag in flags]
                     + [f"no {word}" for flag, word in known.items() if flag not in flags])
    cores = len(re.findall(r"^processor\s*:", text, re.M))
    return f"{cores} cores of {name[1] if name else platform.machine()} ({sets})"


def processor_slug() -> str:
    words = processor().split(" of ", 1)[1].split(" (")[0]
    text = re.sub(r"\(R\)|\(TM\)|Processor|CPU", "", words).lower()
    amx = "-amx" if "AMX" in processor() and "no AMX" not in processor() else ""
    return re.sub(r"[^a-z0-9]+", "-", text).strip("-") + amx


if __name__ == "__main__":
    main()
