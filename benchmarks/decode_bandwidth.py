"""How near a run's decode steps come to what the memory delivers: the bytes that each must read and
write (weights once, each query's entries) over the time it took, by the run's own record.

    python benchmarks/decode_bandwidth.py OUTPUT... --peak 3.9e12

A run's output folder has the record (steps.jsonl); `--peak` is what a read of this device's memory
reaches, in bytes a second: a profile has it.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from xgpt.core import catalog
from xgpt.core.model import ModelSpec
from xgpt.core.units import DTYPE_BYTES
from xprofiler.timing import Operator
from xprofiler.work import work

ALIKE = 0.1  # steps of a size that many tenths of the run's largest are told apart in the table


class DecodeStep(NamedTuple):
    queries: int
    num_bytes: float
    seconds: float


class Reached(NamedTuple):
    """Of all decode steps of a run together, and of its largest ones."""

    bytes_per_s: float
    largest_bytes_per_s: float
    median_queries: float


def decode_steps(output: Path, model: ModelSpec, dtype: str) -> Iterator[DecodeStep]:
    """Those of a run whose rank holds the whole model."""
    item_bytes = DTYPE_BYTES[dtype]
    for line in (output / "steps.jsonl").read_text(encoding="utf-8").splitlines():
        step = json.loads(line)
        if step["kind"] != "decode":
            continue
        queries, context = step["queries"], step["context_tokens"]
        layer, cached, head = (
            float(work(model, operator, queries, context, tp_degree=1,
                       item_bytes=item_bytes).num_bytes)
            for operator in (Operator.LAYER_REST, Operator.DECODE_ATTENTION, Operator.HEAD))
        yield DecodeStep(queries, model.num_layers * (layer + cached) + head,
                         step["end_s"] - step["start_s"])


def reached(steps: list[DecodeStep]) -> Reached:
    most = max(step.queries for step in steps)
    largest = [step for step in steps if step.queries >= (1 - ALIKE) * most]
    return Reached(_rate(steps), _rate(largest), statistics.median(s.queries for s in steps))


def _rate(steps: list[DecodeStep]) -> float:
    return sum(step.num_bytes for step in steps) / sum(step.seconds for step in steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("outputs", type=Path, nargs="+")
    parser.add_argument("--peak", type=float, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="bfloat16")
    arguments = parser.parse_args()
    for output in arguments.outputs:
        found = reached(list(decode_steps(output, catalog.model(arguments.model), arguments.dtype)))
        print(f"{output}: {found.bytes_per_s / 1e9:,.0f} GB/s in decode steps, "
              f"{found.bytes_per_s / arguments.peak:.0%} of what a read reaches; in the largest "
              f"ones {found.largest_bytes_per_s / arguments.peak:.0%}; {found.median_queries:g} "
              "queries in the median")


if __name__ == "__main__":
    main()
