"""Jobs that the tests of whole commands write, and what they read of a run."""

import io
import json
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from xgpt.cli.main import main

SUPPORT = Path(__file__).parent  # where the scripts lie that ranks run
XGPT = [sys.executable, "-c", "from xgpt.__main__ import main; main()"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredToy:
    """What `xgpt profile --tp 1,2,3` of the toy llama on two ranks left: it went on
    after another, which was stopped."""

    job: Path
    profile: Path
    cache: Path  # $XDG_CACHE_HOME of its own, in which this profile alone lies
    done: subprocess.CompletedProcess[str]
    stopped: subprocess.CompletedProcess[str]
    kept: Path  # the profile as the stopped one left it


def write_job(folder: Path, model: Path, requests: list[dict[str, Any]], *, schedule: str,
              ranks: int) -> Path:
    """`schedule`: the keys of that section."""
    (folder / "requests.jsonl").write_text("".join(json.dumps(r) + "\n" for r in requests))
    job = folder / "job.yaml"
    job.write_text(f"""
model: {model}
cluster: local
workload:
  requests: requests.jsonl
  output_tokens: {{mean: 15, std: 8, max: 40}}
schedule: {{{schedule}}}
run: {{ranks: {ranks}, dtype: float32, threads_per_rank: 1}}
output: out
""")
    return job


def as_requests(queries: list[Any]) -> list[dict[str, Any]]:
    return [{"id": q.id, "tokens": list(q.input_ids), "max_tokens": q.max_new_tokens}
            for q in queries]


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def xgpt(*arguments: object) -> subprocess.CompletedProcess[str]:
    """What the command prints, and its exit code."""
    words, code = ["xgpt", *map(str, arguments)], 0
    printed, told = io.StringIO(), io.StringIO()
    with patch.object(sys, "argv", words), redirect_stdout(printed), redirect_stderr(told):
        try:
            main()
        except SystemExit as left:
            assert isinstance(left.code, int)
            code = left.code
    return subprocess.CompletedProcess(words, code, printed.getvalue(), told.getvalue())
