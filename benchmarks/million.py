"""Memory that a long file of requests takes: `python benchmarks/million.py LINES [--stage intake]`.

Made requests of 24 tokens each, with ids, are read, hashed and spooled as by the launcher
(`intake`), and then taken up as by rank 0 (`rank`), without a model: queries through the supply,
results through the sink. Prints VmHWM of each stage beside that of a job of one line, each in a
process of its own."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

STAGES = ("intake", "rank")


def make(path: Path, lines: int) -> None:
    with path.open("w", encoding="utf-8") as file:
        for number in range(lines):
            file.write(json.dumps({"id": f"request-{number:012}", "prompt": f"{number:024}",
                                   "max_tokens": 8}) + "\n")


class Characters:
    """A token a character, for prompts of digits."""

    vocab_size = 256

    def tokenise(self, requests: Any) -> list[list[int]]:
        return [list(request.prompt.encode()) for request in requests]


def intake(folder: Path) -> None:
    import numpy as np

    from xgpt.core.request_files.files import RequestFiles
    from xgpt.core.spool import SpoolWriter
    from xrunner.io.intake import take_in

    spool = SpoolWriter()
    requests = take_in(RequestFiles(paths=(folder / "requests.jsonl",)), Characters(), spool)
    rows = np.arange(len(requests))
    spool.save(folder, np.stack([rows, requests.output_caps(8)], axis=1), 0)


def rank(folder: Path) -> None:
    """Every query is begun and done in its turn, 64 at a time."""
    from xrunner.engine.supply import FromSpool
    from xrunner.io.sink import RunSink
    from xrunner.plan import RunPlan
    from xrunner.query import FinishedQuery
    from xrunner.rank import order_of, read_work

    plan = RunPlan(name="toy", output=folder, model_dir=folder, model_name="toy", served_by="test",
                   requests="test", is_chat=False, max_tokens=8, dtype="float32",
                   weight_dtype="float32", seed=0, temperature=0.0, top_k=None, top_p=1.0,
                   ignore_eos=False, threads_per_rank=1, query_kv_tokens=64, shuffle_window=640)
    queries, _, before = read_work(plan)
    sink = RunSink(plan, num_queries=len(queries), before=before)
    waiting: list[Any] = []
    roster = SimpleNamespace(num_waiting=0)

    def submit(query: Any) -> bool:
        waiting.append(query)
        roster.num_waiting = len(waiting)
        return True

    head: Any = SimpleNamespace(roster=roster, submit=submit)
    supply = FromSpool(queries, order_of(len(queries), plan, before), len(queries), least=640)
    while True:
        supply.look(head)
        if not waiting:
            break
        for query in waiting[:64]:
            sink.finished(FinishedQuery(
                query=query, output_ids=(1, 2, 3), finish_reason="length", text="abc",
                encode_start_s=0.0, first_token_s=1.0, last_token_s=2.0))
        del waiting[:64]
        roster.num_waiting = len(waiting)
    assert supply.close(head)
    sink.close(1.0, "done")


def peak_bytes() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines()
                if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def measured(lines: int) -> dict[str, int]:
    """Bytes of each stage."""
    with tempfile.TemporaryDirectory() as name:
        make(Path(name) / "requests.jsonl", lines)
        return {stage: int(subprocess.run(
            [sys.executable, __file__, "--stage", stage, "--folder", name], check=True,
            capture_output=True, text=True).stdout) for stage in STAGES}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("lines", type=int, nargs="*")
    parser.add_argument("--stage", choices=STAGES)
    parser.add_argument("--folder", type=Path)
    asked = parser.parse_args()
    if asked.stage is not None:
        {"intake": intake, "rank": rank}[asked.stage](asked.folder)
        print(peak_bytes())
        return
    empty = measured(1)
    for lines in asked.lines:
        found = measured(lines)
        print(f"{lines:,} lines: " + ", ".join(
            f"{stage} {(found[stage] - empty[stage]) / 1e6:.0f} MB above one line's "
            f"{empty[stage] / 1e6:.0f} MB" for stage in STAGES), flush=True)


if __name__ == "__main__":
    main()
