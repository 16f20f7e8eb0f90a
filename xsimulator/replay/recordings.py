"""A recorded run as a source of step times, to test the replay without errors of a timing source.

With the run's lengths, a replay of its schedule takes the same steps (the rules are the same), each
as long as it took in the run. Any difference of the makespans is due to the replay's model of a
pipeline."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from xgpt.core.deployment import Deployment
from xgpt.core.errors import XgptError
from xgpt.core.lengths import IntArray
from xgpt.requests.choices import parts
from xsimulator.replay.step_clock import StepSizes

_UNTIMED = frozenset({"cross_kv"})  # part of no step


class _RecordedStep(NamedTuple):
    """Kind and number of requests of a step, and its seconds on each stage of the pool."""

    kind: str
    queries: int
    seconds: list[float]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recording:
    """One replica's finished run: its requests in order, by index in the job, and its steps."""

    queries: IntArray
    inputs: IntArray  # [requests] tokens
    outputs: IntArray  # [requests] tokens
    pools: tuple[tuple[_RecordedStep, ...], ...]
    wall_s: float

    def clocks(self) -> list[RecordedClock]:
        """A clock for each pool, for one replay."""
        return [RecordedClock(pool) for pool in self.pools]


class RecordedClock:
    """Step times of one pool (see StepClock), taken from a record in order.

    A step of another size than recorded takes the time of the recorded step of its kind with the
    nearest size. (WAA's replay may hand a batch over one step earlier or later.)"""

    def __init__(self, steps: Sequence[_RecordedStep]) -> None:
        self._left = {kind: list(reversed([s for s in steps if s.kind == kind]))
                      for kind in {s.kind for s in steps}}
        self._all = {kind: list(of_kind) for kind, of_kind in self._left.items()}
        self.num_matched = 0  # steps of exactly the recorded size
        self.num_steps = 0

    def seconds(self, sizes: StepSizes) -> list[float]:
        """[stages] seconds of one step. Raises XgptError for a kind that the run lacks."""
        kind = "decode" if not sizes.spans else "mixed" if sizes.decoded else "encode"
        queries = sizes.encoded if kind == "encode" else sizes.decoded + sizes.encoded
        if kind not in self._all:
            raise XgptError(f"the replay takes a step of kind {kind!r}, the run took none")
        self.num_steps += 1
        left = self._left[kind]
        step = left.pop() if left else None
        if step is None or step.queries != queries:
            step = min(self._all[kind], key=lambda other: abs(other.queries - queries))
        else:
            self.num_matched += 1
        return list(step.seconds)


def load_recordings(folder: Path, deployment: Deployment) -> list[Recording]:
    """The recordings of a run's replicas from its output folder. Raises XgptError if the run was
    stopped or resumed, or its record is not complete."""
    measured = json.loads((folder / "measured.json").read_text(encoding="utf-8"))
    if measured["state"] != "done" or measured["queries_before"]:
        raise XgptError(f"{folder} does not hold the record of one whole run")
    results = [_Result.of(row) for line in _lines(folder / "results.jsonl")
               for row in parts(json.loads(line))]
    if not results:
        raise XgptError(f"{folder} holds no results")
    records = [json.loads(line) for line in _lines(folder / "steps.jsonl")]
    found = []
    for replica in range(deployment.replicas):
        first = replica * len(deployment.stages)
        steps = tuple(_steps(records, [first + stage.index for stage in pool.stages])
                      for pool in deployment.pools)
        own = [(place, result) for place, result in enumerate(results) if result.replica == replica]
        if deployment.replicas > 1:  # in the order of their start
            own.sort(key=lambda pair: pair[1].start_s)
        columns = np.array([(place, result.inputs, result.outputs) for place, result in own],
                           np.int64).reshape(-1, 3)
        found.append(Recording(queries=columns[:, 0], inputs=columns[:, 1], outputs=columns[:, 2],
                               pools=steps, wall_s=float(measured["wall_s"])))
    return found


def _steps(records: Sequence[Mapping[str, Any]],
           stages: Sequence[int]) -> tuple[_RecordedStep, ...]:
    columns = [[r for r in records if r["stage"] == stage and r["kind"] not in _UNTIMED]
               for stage in stages]
    if len({len(column) for column in columns}) != 1 or columns[0] and columns[0][0]["phase"] != 0:
        raise XgptError("steps.jsonl does not hold every step of the run: its log keeps the last "
                        "ones of a long run only")
    steps = []
    for row in zip(*columns, strict=True):
        assert len({(r["kind"], r["group"], r["phase"], r["iteration"]) for r in row}) == 1, (
            f"stages took different steps: {row}")
        steps.append(_RecordedStep(row[0]["kind"], row[0]["queries"],
                               [r["end_s"] - r["start_s"] for r in row]))
    return tuple(steps)


class _Result(NamedTuple):
    """Lengths, replica and start (seconds) of one request."""

    inputs: int
    outputs: int
    replica: int
    start_s: float

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> _Result:
        """The result in a line of an OpenAI batch response or of our own form. Raises XgptError for
        a failed request, whose tokens are not those of its steps."""
        own = line.get("xgpt", line)
        if line.get("error") is not None:
            raise XgptError(f"request {own['index']} failed: the run's steps are not those of its "
                            "results")
        if "response" in line:
            usage = line["response"]["body"]["usage"]
            lengths = usage["prompt_tokens"], usage["completion_tokens"]
        else:
            lengths = line["input_tokens"], line["output_tokens"]
        return cls(*lengths, own.get("replica", 0), own.get("encode_start_s", 0.0))


def _lines(path: Path) -> list[str]:
    # not splitlines(): an answer may hold what Unicode counts as the end of a line
    return [line for line in path.read_text(encoding="utf-8").split("\n") if line]

