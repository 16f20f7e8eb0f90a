"""Jobs whose output lengths the launcher watches, and what their heads would write meanwhile."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from taken_as_true import timing_of

from xgpt.app.opened import OpenedJob, open_file
from xgpt.app.plan import executable
from xgpt.app.watch import Rescheduler, rescheduler_of
from xgpt.core.problem import resolve
from xgpt.core.schedule import Schedule
from xrunner.io.launcher_link import OBSERVED_FILE


def session_of(folder: Path, *, outputs: str = "{mean: 30, std: 15, max: 100}", bound: str = "6",
               schedule: str = "policy: rra, encode_chunk: 0", count: int = 3000, request: str = "",
               run: str = "") -> OpenedJob:
    lines = [f'{{"id": "q{i}", "tokens": {[7] * (20 + i % 40)}{request}}}' for i in range(count)]
    (folder / "requests.jsonl").write_text("\n".join(lines))
    path = folder / "job.yaml"
    path.write_text(f"model: opt-13b\ncluster: a40-4\n"
                    f"workload: {{requests: requests.jsonl, output_tokens: {outputs}, "
                    f"max_tokens: 200}}\nconstraint: {{latency_s: {bound}}}\n"
                    f"schedule: {{{schedule}}}\nrun: {{{run}}}\noutput: out\n")
    (folder / "out").mkdir(exist_ok=True)
    session = executable(open_file(path))
    assert session.requests is not None
    requests = replace(session.requests, are_tokenised=True)  # as of a run, which fetches the model
    problem = resolve(session.job, requests=requests)
    return replace(session, problem=replace(session.problem, queries=problem.queries))


def write_state(session: OpenedJob, lengths: Sequence[int], *, per_phase: int = 60,
                iterations: int = 10, phases: int = 16, first: int = 0) -> None:
    """As the head would, after so many phases of these outputs."""
    finished, active = [], []
    for index in range(min(per_phase * phases, len(lengths))):
        age = (phases - index // per_phase) * iterations
        is_done = lengths[index] <= age
        (finished if is_done else active).append(
            (first + index, 20 + index % 40, int(min(lengths[index], age))))
    (session.job.output / OBSERVED_FILE).write_text(json.dumps(
        {"first": first, "finished": finished, "active": active}))


def follow(session: OpenedJob, schedule: Schedule, num_queries: int | None = None,
           **changes: Any) -> Rescheduler:
    """`changes`: of the decider."""
    made = rescheduler_of(session, timing_of(session), schedule)
    assert made is not None
    made._waits = True
    decider = made.decider
    if num_queries is not None:
        decider.followed = replace(decider.followed, problem=replace(
            decider.followed.problem, num_queries=num_queries))
    for name, value in changes.items():
        setattr(decider, name, value)
    return made


def outputs_of(mean: float, std: float = 15.0, count: int = 3000, seed: int = 1) -> list[int]:
    drawn = np.random.default_rng(seed).normal(mean, std, count)
    return np.clip(np.rint(drawn), 1, 200).astype(int).tolist()
