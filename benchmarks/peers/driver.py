"""What the peers' drivers share: their arguments, the queries, and the line that they end with.

A driver runs in its peer's own environment, so this needs the standard library alone. Every query
is there at the start and gives exactly its number of tokens, greedily, whatever the model says of
the end of a sequence.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class Query(NamedTuple):
    input_ids: list[int]
    output_tokens: int
    samples: int  # drawn where there are several
    targets: int  # the last so many inputs are scored, and nothing is written

    @property
    def given_tokens(self) -> int:
        return self.targets or self.output_tokens * self.samples


class Arguments(NamedTuple):
    model: str  # folder
    queries: list[Query]
    dtype: str
    threads: int
    mode: str  # which of the peer's ways of running it
    is_cached: bool  # whether prefixes are kept
    kv_tokens: int | None  # room of the KV cache


def read_arguments(modes: Sequence[str] = ("default",)) -> Arguments:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, help="folder")
    parser.add_argument("--workload", type=Path, required=True,
                        help='lines {"input_ids": [...], "output_len": N}')
    parser.add_argument("--queries", type=int, help="only the first so many")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--mode", choices=modes, default=modes[0])
    parser.add_argument("--caching", action="store_true", help="keep prefixes")
    parser.add_argument("--kv-tokens", type=int, help="room of the KV cache")
    given = parser.parse_args()
    rows = [json.loads(line) for line in given.workload.open(encoding="utf-8")]
    queries = [Query(row["input_ids"], row["output_len"], row.get("samples", 1),
                     row.get("targets", 0)) for row in rows[:given.queries]]
    return Arguments(given.model, queries, given.dtype, given.threads, given.mode,
                     given.caching, given.kv_tokens)


class Report:
    """Times loading from its making until `begin`, and the run from there to `end`."""

    def __init__(self) -> None:
        self._made = time.perf_counter()

    def begin(self) -> None:
        self._begun = time.perf_counter()

    def end(self, version: str, queries: Sequence[Query], counts: Sequence[int]) -> None:
        """Prints the line. `counts`: tokens that came, query by query."""
        run_s = time.perf_counter() - self._begun
        wanted = [query.given_tokens for query in queries]
        print(json.dumps({
            "version": version, "load_s": self._begun - self._made, "run_s": run_s,
            "output_tokens": sum(counts), "is_exact": list(counts) == wanted}), flush=True)
