"""Runs of a schedule that a test gives, on real ranks."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import toys
from plans import plan_of
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


def toy_plan(directory: Path, out: Path, *, query_kv_tokens: int, is_chat: bool = False) -> RunPlan:
    """What ranks are told of a toy, one thread each, whose answers are greedy."""
    return plan_of(out, directory, is_chat=is_chat, max_tokens=40, seed=0, temperature=0.0,
                   query_kv_tokens=query_kv_tokens)


def run(directory: Path, out: Path, requests: list[dict[str, Any]], ranks: int,
        **changes: Any) -> None:
    """The ranks alone, without the command around them. Copies of the model keep what they are
    dealt, so that each takes the steps of a replay of its own queries. `changes`: of the plan."""
    file = out.parent / "requests.jsonl"
    file.write_text("".join(json.dumps(request) + "\n" for request in requests))
    plan = replace(toy_plan(directory, out, query_kv_tokens=200), routing=FIXED, **changes)
    toys.write_spool(plan, file)
    LocalLauncher().run(RankProgram(module="xrunner.rank.worker", argument=plan.save(),
                                    count=ranks), watch=lambda: None)
