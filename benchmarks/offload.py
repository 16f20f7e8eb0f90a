"""Models larger than the memory: xgpt's blocks beside row order, accelerate and ZeRO-Inference,
each in a memory cgroup of one limit.

    python benchmarks/offload.py --config FILE --keep FOLDER [--part gain ...] [--only TEXT]
                                 [--first 0] [--rounds 2] [--out benchmarks/results]

The limit of a cgroup counts the page cache and everything else of a contender's processes. Before
each run the files of the model are dropped from the page cache. FILE says what is on this machine:

    interpreters: {accelerate: /opt/accelerate/bin/python, zero: /opt/deepspeed/bin/python}
    sharegpt: lengths.csv               # columns: input tokens, output tokens
    gain:
    - name: 1.7B, inputs of 64
      model: /opt/models/smollm2-1.7b   # benchmarks/random_checkpoint.py writes it
      group: 1GiB                       # limit of the cgroup
      memory: 760MiB                    # constraint.memory: the group's without the processes' own
      requests: 128
      inputs: 64
      outputs: 32
      batches: {ZeRO-Inference: 8}      # largest of each peer that survives (--part batches)
    lengths: {model: ..., group: ..., memory: ..., requests: 64, divisor: 8}
    bits: {model: ..., group: ..., memory: ..., requests: 8, inputs: 64, outputs: 8}
    placements:
    - {name: ..., model: ..., group: ..., memory: ..., requests: 32, inputs: 64, outputs: 16,
       schedule: {policy: ft, placement: {...}}, ranks: 1}

Outcomes are kept in FOLDER, and the page has all that are there. Round 0 is not counted: it
measures the profile and writes the weights file. A peer gets one batch, which is the shape that
suits it best: it pads to the longest input and runs to the longest output, and all are equal here.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from offload_page import BITS, MEMORY, PEERS, PLANNED, ROWS, page
from offload_runs import (
    Kept,
    Outcome,
    Place,
    Turn,
    equal_queries,
    run_peer,
    run_xgpt,
    sharegpt_queries,
)
from runner import options, write
from workload import Query

from xgpt.core.units import parse_bytes

MOST_BATCH = 64
ROW_REQUESTS = 8  # one device batch of row order: more of them have the same rate


def main() -> None:
    given = _arguments()
    bench = Bench(yaml.safe_load(given.config.read_text(encoding="utf-8")), given)
    parts = {"batches": bench.find_batches, "gain": bench.gain, "lengths": bench.lengths,
             "placements": bench.placements, "bits": bench.bits}
    for part in given.part:
        parts[part]()
    write("offload", page(bench.kept.all()), given.out)


def _arguments() -> argparse.Namespace:
    parser = options(__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--keep", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--part", action="append", default=[],
                        choices=("batches", "gain", "lengths", "placements", "bits"))
    parser.add_argument("--only", default="", help="loads and contenders whose names have this")
    parser.add_argument("--rounds", type=int, default=2, help="the last round")
    parser.add_argument("--first", type=int, default=0, help="the first round")
    return parser.parse_args()


class Bench:
    """The parts of the page, each of which adds to the outcomes."""

    def __init__(self, config: dict[str, Any], given: argparse.Namespace) -> None:
        self._config, self._keep, self._only = config, given.keep, given.only
        self._rounds = range(given.first, given.rounds + 1)
        self.kept = Kept(given.keep / "outcomes.jsonl")

    def find_batches(self) -> None:
        """The largest batch of each peer that survives, by doubling."""
        for load in self._config["gain"]:
            for name in PEERS:
                batch = 1
                while batch <= MOST_BATCH and self._is_wanted(load["name"], name):
                    turn = Turn(f"{load['name']}: batch {batch}", name, 0)
                    if self.kept.add(self._peer(load, batch, turn)).error:
                        break
                    batch *= 2

    def gain(self) -> None:
        """All contenders of each load in turns."""
        for load in self._config["gain"]:
            queries = equal_queries(load["requests"], load["inputs"], load["outputs"])
            contenders = {
                PLANNED: partial(self._xgpt, load, queries, {"policy": "ft"}),
                ROWS: partial(self._xgpt, load, queries[:ROW_REQUESTS], {
                    "policy": "ft", "placement": {"order": "row", "device_batch": 8}}),
                MEMORY: partial(self._xgpt, {**load, "group": None, "memory": None}, queries,
                                {"policy": "ft"})}
            for name, batch in load["batches"].items():
                contenders[name] = partial(self._peer, load, batch)
            for number in self._rounds:
                for name, run in contenders.items():
                    if self._is_wanted(load["name"], name) and (number or name not in PEERS):
                        self.kept.add(run(Turn(load["name"], name, number)))

    def lengths(self) -> None:
        """Both policies on lengths of a real distribution, in turns."""
        load = self._config["lengths"]
        queries = sharegpt_queries(Path(self._config["sharegpt"]), load["requests"],
                                   load["divisor"])
        for number in self._rounds:
            for policy in ("ft", "rra"):
                if self._is_wanted("lengths", policy):
                    self.kept.add(self._xgpt(load, queries, {"policy": policy},
                                             Turn("lengths", policy, number)))

    def bits(self) -> None:
        """Weights of 16 and of 4 bits in turns, with few requests, so that reading binds."""
        load = self._config["bits"]
        queries = equal_queries(load["requests"], load["inputs"], load["outputs"])
        for number in self._rounds:
            for bits in BITS:
                schedule = {"policy": "ft", "placement": {
                    "weight_bits": bits, **load.get("placement", {})}}
                self.kept.add(self._xgpt(load, queries, schedule,
                                         Turn("bits", f"{bits} bits", number)))

    def placements(self) -> None:
        """Fixed placements, each predicted and measured."""
        for load in self._config["placements"]:
            queries = equal_queries(load["requests"], load["inputs"], load["outputs"])
            for number in self._rounds:
                if self._is_wanted("placements", load["name"]):
                    self.kept.add(self._xgpt(load, queries, load["schedule"],
                                             Turn("placements", load["name"], number)))

    def _xgpt(self, load: dict[str, Any], queries: list[Query], schedule: dict[str, Any],
              turn: Turn) -> Outcome:
        return run_xgpt(self._place(load), queries, self._keep / "xgpt", turn,
                        schedule | load.get("more", {}), load.get("ranks", 1))

    def _peer(self, load: dict[str, Any], batch: int, turn: Turn) -> Outcome:
        interpreter, *command = PEERS[turn.name]
        return run_peer(
            self._place(load), equal_queries(batch, load["inputs"], load["outputs"]),
            self._keep / "peer", turn, [self._config["interpreters"][interpreter], *command],
            is_limited_later=interpreter == "zero")

    def _place(self, load: dict[str, Any]) -> Place:
        model = Path(load["model"])
        return Place(model=model, dtype=load.get("dtype", "bfloat16"), memory=load["memory"],
                     group_bytes=None if load["group"] is None else parse_bytes(load["group"]),
                     offload=(self._keep / f"{model.name}.offload").resolve())

    def _is_wanted(self, load: str, name: str) -> bool:
        return self._only in f"{load}: {name}"


if __name__ == "__main__":
    main()
