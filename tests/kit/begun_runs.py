"""A job of random weights whose ranks work in the test's process, to be stopped and gone on with; a
test may change what WORKLOAD, RUN, CONSTRAINT and POLICIES say in it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import faults
from problems import TakenAsTrue

from xgpt.app.opened_job import OpenedJob, open_file
from xgpt.app.schedule import executable
from xgpt.cli.terminal import Terminal
from xprofiler.roofline import Roofline

CONFIG = {**faults.CONFIG, "num_hidden_layers": 2}
COUNT = 24
WORKLOAD = {"requests": "requests: requests.jsonl"}
RUN = {"dtype": "dtype: float32"}
CONSTRAINT = {"limits": ""}
POLICIES = {"rra": "encode_batch: 3, decode_iterations: 4, shuffle: 12",
            "waa-c": "encode_batch: 3", "orca": "max_active: 5", "ft": "encode_batch: 6",
            "vllm": "max_active: 5, token_budget: 32"}
Run = Callable[..., dict[str, Any]]


def opened(folder: Path, policy: str = "rra", ranks: int = 1) -> OpenedJob:
    (folder / "job.yaml").write_text(f"""
model: {folder / "model"}
cluster: local
workload: {{{WORKLOAD["requests"]}, output_tokens: {{mean: 9, std: 8, max: 40}}, max_tokens: 40}}
schedule: {{policy: {policy}, {POLICIES[policy]}}}
{CONSTRAINT["limits"]}
run: {{ranks: {ranks}, {RUN["dtype"]}, threads_per_rank: 1, weights: random}}
output: out
""")
    (folder / "out").mkdir(exist_ok=True)
    return executable(open_file(folder / "job.yaml", (), Terminal(), "run"))


def roofline(session: OpenedJob) -> Roofline:
    problem = session.problem
    return TakenAsTrue(problem.model, problem.cluster.device, problem.dtype)


def lines(path: Path) -> dict[int, str]:
    """Query -> its line."""
    found = path.read_text().splitlines() if path.is_file() else []
    return {json.loads(line)["index"]: line for line in found}
