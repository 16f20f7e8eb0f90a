"""Runs of a schedule that a test gives, on real ranks: what starts them, waits for their results,
and finds one of them to kill."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import toys
from faults import below
from problems import as_given

from xgpt.core.controls import FIXED
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate
from xgpt.core.schedule_file import save_schedule
from xgpt.launch.launcher import LocalLauncher, RankProgram
from xrunner.plan import RunPlan


def given(estimate: Estimate, problem: Problem, path: Path) -> Path:
    save_schedule(as_given(problem, estimate), path)
    return path


def await_results(process: subprocess.Popen[str], results: Path, count: int) -> None:
    deadline = time.monotonic() + 200
    while not (results.is_file() and results.read_bytes().count(b"\n") >= count):
        assert process.poll() is None, process.stderr and process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def rank_of(command: int, rank: int) -> int:
    """The process of a rank, one of those that a command's process started."""
    found = [pid for pid in below(command)["rank"] if f"PMI_RANK={rank}".encode() in Path(
        f"/proc/{pid}/environ").read_bytes().split(b"\0")]
    assert len(found) == 1, f"{found = }"
    return found[0]


class GoneOn(NamedTuple):
    """A run of which a rank was killed, and which the same command then completed: how many lines
    were there in between, all lines, and what the command printed."""

    before: int
    results: list[dict[str, Any]]
    metrics: dict[str, Any]


def killed_and_gone_on(command: list[str], out: Path, environ: dict[str, str],
                       count: int) -> GoneOn:
    """Runs the command of a job of `count` queries named q0, q1 and so on, kills its rank 1 once
    twelve are done, and runs it again to its end. Asserts that the first ends with a message, and
    that the second goes on: every line is there once, in order, and those before are as they
    were."""
    begun = subprocess.Popen([*command, "--set", "run.restarts=0"], stdout=subprocess.DEVNULL,
                             stderr=subprocess.PIPE, text=True, env=environ)
    await_results(begun, out / "results.jsonl", 12)
    os.kill(rank_of(begun.pid, 1), signal.SIGKILL)
    _, messages = begun.communicate(timeout=60)
    assert begun.returncode == 1 and "Traceback" not in messages, messages
    before = (out / "results.jsonl").read_text().splitlines()
    assert 12 <= len(before) < count

    done = subprocess.run([*command, "--json"], capture_output=True, text=True, env=environ,
                          timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert "going on after the" in done.stderr
    after = (out / "results.jsonl").read_text().splitlines()
    assert after[:len(before)] == before
    results = [json.loads(line) for line in after]
    assert [row["id"] for row in results] == [f"q{i}" for i in range(count)]
    return GoneOn(len(before), results, json.loads(done.stdout))


def toy_plan(directory: Path, out: Path, *, query_kv_tokens: int, is_chat: bool = False) -> RunPlan:
    """What ranks are told of a toy, one thread each, whose answers are greedy."""
    return RunPlan(
        name="toy", output=out, model_dir=directory, model_name="toy", served_by="test",
        requests="test", is_chat=is_chat, max_tokens=40, dtype="float32", weight_dtype="float32",
        seed=0, temperature=0.0, top_k=None, top_p=1.0, ignore_eos=False, threads_per_rank=1,
        query_kv_tokens=query_kv_tokens)


def run(directory: Path, out: Path, requests: list[dict[str, Any]], ranks: int, *,
        routing: str = FIXED, watch: Callable[[], None] = lambda: None) -> None:
    """The ranks alone, without the command around them. `routing`: by default copies of the model
    keep what they are dealt, so that each takes the steps of a replay of its own queries. `watch`
    is called while they run."""
    file = out.parent / "requests.jsonl"
    file.write_text("".join(json.dumps(request) + "\n" for request in requests))
    plan = replace(toy_plan(directory, out, query_kv_tokens=200), routing=routing)
    toys.write_spool(plan, file)
    LocalLauncher().run(RankProgram(module="xrunner.rank.worker", argument=plan.save(),
                                    count=ranks), watch=watch)
