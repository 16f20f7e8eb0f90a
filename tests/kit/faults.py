"""Toy jobs as real commands with real ranks, and what can happen to them: for soak.py and for
tests."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SUPPORT = Path(__file__).resolve().parent
XGPT = [sys.executable, str(SUPPORT / "by_data_sheets.py")]
WAIT_S = 300.0  # for what must come; a loaded machine takes its time
CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32,
           "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
           "num_hidden_layers": 4, "vocab_size": 97, "max_position_embeddings": 128,
           "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
           "hidden_act": "silu"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToyJob:
    """A job in a folder of its own: `count` queries of 3 to 30 tokens, on random weights."""

    folder: Path
    schedule: str  # the keys of that section
    ranks: int = 1
    count: int = 300
    shared: int = 0  # tokens that every third query begins with
    run: str = ""  # more keys of the section run
    environ: Mapping[str, str] = field(default_factory=dict)
    prefix: tuple[str, ...] = ()  # before the command: nice, prlimit

    @property
    def output(self) -> Path:
        return self.folder / "out"

    @property
    def file(self) -> Path:
        return self.folder / "job.yaml"

    def write(self) -> "ToyJob":
        model = self.folder / "model"
        model.mkdir(parents=True, exist_ok=True)
        (model / "config.json").write_text(json.dumps(CONFIG))
        (self.folder / "requests.jsonl").write_text("".join(
            json.dumps({"id": f"q{i}", "tokens": [*range(6 + i % 3, 6 + i % 3 + self.shared),
                                                  7, 8, 9 + i % 80, i // 80],
                        "forced_tokens": 30 if i % 5 == 2 else 3 + i % 7}) + "\n"
            for i in range(self.count)))
        self.file.write_text(f"""
model: {model}
cluster: local
workload: {{requests: requests.jsonl, output_tokens: {{mean: 9, std: 8, max: 40}}, max_tokens: 40}}
schedule: {{{self.schedule}}}
run: {{ranks: {self.ranks}, dtype: float32, threads_per_rank: 1, weights: random{self.run}}}
output: out
""")
        return self

    def start(self) -> subprocess.Popen[str]:
        # what was begun with nohup is deaf to SIGHUP, and would leave that to its children
        words = ["env", "--default-signal=HUP", *self.prefix, *XGPT, "submit", str(self.file)]
        return subprocess.Popen([*words, "--json"],
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                start_new_session=True, env={**os.environ, **self.environ})

    def run_to_end(self) -> subprocess.CompletedProcess[str]:
        process = self.start()
        printed, told = process.communicate(timeout=2 * WAIT_S)
        return subprocess.CompletedProcess(process.args, process.returncode, printed, told)

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*XGPT, *words, str(self.file)], capture_output=True, text=True,
                              timeout=WAIT_S, check=False, env={**os.environ, **self.environ})

    def lines(self) -> dict[int, str]:
        """Query -> its line, in results.jsonl or held.jsonl, up to one that a power cut tore."""
        found: dict[int, str] = {}
        for name in ("held.jsonl", "results.jsonl"):
            path = self.output / name
            for line in path.read_text().splitlines(keepends=True) if path.is_file() else ():
                try:
                    found[json.loads(line)["index"]] = line
                except ValueError:
                    break
                if not line.endswith("\n"):
                    del found[json.loads(line)["index"]]
        return found

    def answers(self) -> list[tuple[str, tuple[int, ...]]]:
        """(id, tokens) of every line of results.jsonl, in their order."""
        rows = map(json.loads, (self.output / "results.jsonl").read_text().splitlines())
        return [(row["id"], tuple(row["output_ids"])) for row in rows]


def tree(pid: int) -> list[int]:
    """The process and all that it started."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return [pid]
    return [pid, *(one for child in children for one in tree(int(child)))]


def below(pid: int) -> dict[str, list[int]]:
    """The processes that the command started: mpiexec, its proxies, ranks."""
    found: dict[str, list[int]] = {"mpiexec": [], "proxy": [], "rank": []}
    for one in tree(pid)[1:]:
        try:
            words = Path(f"/proc/{one}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"mpiexec" in words[0]:
            found["mpiexec"].append(one)
        elif b"hydra" in words[0]:
            found["proxy"].append(one)
        elif any(word in words for word in (b"xrunner.rank.worker", b"xrunner.rank.standby")):
            found["rank"].append(one)
    return found


def wait(is_so: Callable[[], Any], what: str, seconds: float = WAIT_S) -> Any:
    until = time.monotonic() + seconds
    while not (found := is_so()):
        assert time.monotonic() < until, f"not within {seconds:.0f} s: {what}"
        time.sleep(0.01)
    return found


def await_lines(job: ToyJob, process: subprocess.Popen[str], count: int) -> bool:
    """Whether so many results came; False where the command ended before."""
    results = job.output / "results.jsonl"

    def are_there() -> bool:
        return results.is_file() and results.read_bytes().count(b"\n") >= count

    wait(lambda: process.poll() is not None or are_there(), f"{count} results")
    return process.poll() is None


def await_metrics(job: ToyJob, process: subprocess.Popen[str]) -> bool:
    """Whether metrics.json came before the command's end."""
    metrics = job.output / "metrics.json"
    wait(lambda: process.poll() is not None or metrics.is_file(), "metrics.json")
    return process.poll() is None


def await_the_end(pids: list[int]) -> None:
    wait(lambda: not alive(pids), "all ends", 60)


def alive(pids: list[int]) -> list[int]:
    """Those of the processes that have not ended."""
    def lives(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
        except OSError:
            return False

    return [pid for pid in pids if lives(pid)]


# What can happen to a command at work, by name. Each is given the command's process and what it
# started, and returns whom it hit.
Fault = Callable[[ToyJob, subprocess.Popen[str], dict[str, list[int]], random.Random], str]


def _kill(kind: str) -> Fault:
    def fault(job: ToyJob, process: subprocess.Popen[str], own: dict[str, list[int]],
              chance: random.Random) -> str:
        pids = [process.pid] if kind == "launcher" else own[kind]
        if not pids:  # a rank alone needs no mpiexec
            return _kill("rank")(job, process, own, chance) if own["rank"] else "nobody"
        os.kill(chance.choice(pids), signal.SIGKILL)
        return kind

    return fault


def _signal(number: signal.Signals) -> Fault:
    def fault(job: ToyJob, process: subprocess.Popen[str], own: dict[str, list[int]],
              chance: random.Random) -> str:
        process.send_signal(number)
        return number.name

    return fault


def _stop(job: ToyJob, process: subprocess.Popen[str], own: dict[str, list[int]],
          chance: random.Random) -> str:
    job.command("stop")
    return "xgpt stop"


FAULTS: dict[str, Fault] = {
    "kill a rank": _kill("rank"), "kill the launcher": _kill("launcher"),
    "kill mpiexec": _kill("mpiexec"), "kill a proxy": _kill("proxy"), "xgpt stop": _stop,
    "SIGTERM": _signal(signal.SIGTERM), "SIGHUP": _signal(signal.SIGHUP),
    "SIGQUIT": _signal(signal.SIGQUIT), "SIGINT": _signal(signal.SIGINT),
    "SIGUSR1": _signal(signal.SIGUSR1)}


RRA = "policy: rra, encode_batch: 6, decode_iterations: 4, tp_degree: 1, replicas: 1"
TOGETHER_S = 10.0


def start(folder: Path, *, ranks: int = 2, count: int = 1500, after: int = 20,
          **more: Any) -> tuple[ToyJob, subprocess.Popen[str], dict[str, list[int]]]:
    """A job at work: (it, its command, what that started)."""
    job = ToyJob(folder=folder, schedule=RRA, ranks=ranks, count=count, **more).write()
    process = job.start()
    assert await_lines(job, process, after), process.communicate()
    return job, process, below(process.pid)


def end(process: subprocess.Popen[str], own: dict[str, list[int]]) -> dict[str, Any]:
    """What `--json` printed, once all are gone."""
    printed, told = process.communicate(timeout=200)
    wait(lambda: not alive([pid for pids in own.values() for pid in pids]), "all ends", TOGETHER_S)
    assert "Traceback" not in told, told
    facts: dict[str, Any] = json.loads(printed) if printed else {}
    return {**facts, "code": process.returncode, "told": told}
