# owner tb
"""Whole commands with real ranks on toys, and what their folders hold."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import toys
from job_folder import SUPPORT, XGPT, read_lines
from replays import Steps, replayed, whole_steps

from xgpt.core.prefixes import Prefixes
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate
from xgpt.launch.launcher import find_mpiexec
from xrunner.query import PreparedQuery


def sets(*overrides: str) -> list[str]:
    return [word for override in overrides for word in ("--set", override)]


def call(*words: object, env: Mapping[str, str], code: int = 0, xgpt: Sequence[str] = XGPT,
         timeout_s: float = 280) -> subprocess.CompletedProcess[str]:
    """The command at its end, with that exit code."""
    done = subprocess.run([*xgpt, *map(str, words)], capture_output=True, text=True,
                          timeout=timeout_s, env={**env}, check=False)
    assert done.returncode == code, done.stderr
    return done


def said(done: subprocess.CompletedProcess[str]) -> str:
    """Standard error, whose lines are wrapped."""
    return " ".join(done.stderr.split())


def answered(out: Path, queries: Sequence[PreparedQuery], reference: Any) -> list[dict[str, Any]]:
    """The lines of results.jsonl: in the input's order, with the tokens of `generate`."""
    results = read_lines(out / "results.jsonl")
    assert [r["id"] for r in results] == [q.id for q in queries]
    assert {r["id"]: r["output_ids"] for r in results} == {
        q.id: toys.generate(reference, q) for q in queries}
    return results


def json_of(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def check_steps(out: Path, problem: Problem, shapes: Sequence[Estimate],
                queries: Sequence[PreparedQuery], results: Sequence[dict[str, Any]],
                prefixes: Prefixes | None = None) -> Steps:
    """Each copy, of these shapes, took the steps of a replay of the queries that it took, on all
    stages of its first pool. The steps. `prefixes`: that the queries share."""
    logged, found, first = read_lines(out / "steps.jsonl"), [], 0
    for copy, shape in enumerate(shapes):
        own = [r for r in results if r.get("replica", 0) == copy]
        if len(shapes) > 1:
            own.sort(key=lambda r: (r["encode_start_s"], r["index"]))
        assert len(own) > 5
        rows = np.array([r["index"] for r in own])
        (pool, *_) = replayed(problem, shape, [queries[row] for row in rows],
                              [r["output_tokens"] for r in own],
                              None if prefixes is None else prefixes[rows]).pools
        expected = whole_steps(pool)
        for stage in shape.deployment.pools[0].stages:
            assert [(s["kind"], s["group"], s["phase"], s["iteration"], s["queries"], s["tokens"])
                    for s in logged if s["stage"] == first + stage.index
                    and s["kind"] != "cross_kv"] == expected
        found += expected
        first += len(shape.deployment.stages)
    return found


def stopped_under_way(words: Sequence[object], results: Path, env: Mapping[str, str], *,
                      number: signal.Signals = signal.SIGINT, count: int = 12,
                      whom: Callable[[int], int] = lambda pid: pid, xgpt: Sequence[str] = XGPT,
                      ) -> tuple[subprocess.Popen[str], str, str]:
    """A command that got a signal once `count` results were there: (it, what it printed, what it
    said). `whom`: the process that gets it, by the command's."""
    process = subprocess.Popen([*xgpt, *map(str, words)], stdout=subprocess.PIPE, text=True,
                               stderr=subprocess.PIPE, env={**env})
    deadline = time.monotonic() + 200
    while not (results.is_file() and results.read_bytes().count(b"\n") >= count):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(whom(process.pid), number)
    return process, *process.communicate(timeout=120)


def injected(folder: Path, code: str, **environ: str) -> dict[str, str]:
    """Variables by which every Python of a job runs this code as it starts."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(code)
    path = [str(folder), *filter(None, [environ.pop("PYTHONPATH", os.environ.get("PYTHONPATH"))])]
    return {**environ, "PYTHONPATH": os.pathsep.join(path)}


def launched(folder: Path, cases: Sequence[dict[str, Any]], ranks: int = 4, timeout_s: float = 280,
             checks: Sequence[str] = ()) -> tuple[list[Any], str]:
    """What the ranks of one launch of runs_script.py answer to each of the cases, and what they
    print. `checks`: of ranks_script.py."""
    (folder / "cases.json").write_text(json.dumps(cases))
    done = subprocess.run(
        [find_mpiexec(), "-n", str(ranks), sys.executable, "-m", "mpi4py",
         str(SUPPORT / "runs_script.py"), str(folder / "cases.json"),
         str(folder / "answers.json"), *checks],
        capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    answers = json.loads((folder / "answers.json").read_text())
    assert len(answers) == len(cases)
    return answers, done.stdout
