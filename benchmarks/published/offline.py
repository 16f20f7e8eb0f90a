"""Offline maximum throughput that others published, beside the replay of the same job.

    trtllm-perf/offline_throughput.csv

All requests are there at the start and have equal lengths. The engine takes as many at a time as
its KV cache has room for, up to limits that the rows do not state: the number of requests that the
source prints for one engine, and the tokens of a step, of which the quickest of BUDGETS counts, as
for a plan of the job."""

import csv
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import nan
from pathlib import Path

import numpy as np

from published.compared import Compared
from xgpt.app.library import load
from xgpt.app.schedule import job_with_times
from xgpt.app.simulate import replayed
from xgpt.core import catalog
from xgpt.core.problem import Problem
from xgpt.core.units import FP8
from xprofiler.timing import TimingSource
from xsimulator.replay.records import ReplayResult
from xsimulator.replay.steady_state import SteadyFigures
from xsimulator.rough.formulas import fixed_estimate

ENGINE = "tensorrt-llm"
SOURCE = "TensorRT-LLM offline"
OPERATOR = "offline throughput"
POLICY = "sarathi"
MOST_ACTIVE = 4096  # requests: the overview's own printed engine
# Tokens of a step: the least that TensorRT-LLM's benchmark builds for, and the overview's engine
BUDGETS = (2048, 8192)


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineRow:
    """A measured job: `requests` of equal lengths on `tp` GPUs. `weights`: "fp8" or "16-bit", of
    weights and KV cache."""

    model: str
    gpu: str
    weights: str
    tp: int
    input_tokens: int
    output_tokens: int
    requests: int
    output_tokens_per_s: float

    @property
    def kind(self) -> str:
        return "mixtures" if catalog.model(self.model).decoder.experts else "dense"

    @property
    def measured_s(self) -> float:
        """Seconds of the job."""
        return self.requests * self.output_tokens / self.output_tokens_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineTimes:
    """Prediction of a job. `job_s`: its seconds; NaN where nothing fits. `steady_s`: the same at
    the rate of its middle, NaN without a steady state. `kv_tokens`: room of the KV cache."""

    job_s: float
    steady_s: float
    kv_tokens: int
    token_budget: int


NOTHING = OfflineTimes(job_s=nan, steady_s=nan, kv_tokens=0, token_budget=0)


def offline_rows(folder: Path) -> list[OfflineRow]:
    """Rows of offline_throughput.csv."""
    types = OfflineRow.__annotations__
    with (folder / "offline_throughput.csv").open(newline="", encoding="utf-8") as file:
        return [OfflineRow(**{name: of(row[name]) for name, of in types.items()})
                for row in csv.DictReader(file)]


@cache
def offline_times(row: OfflineRow, engine: str = ENGINE) -> OfflineTimes:
    """The replay of the job by the quickest of BUDGETS."""
    eight = {"weight_dtype": FP8, "kv_dtype": FP8} if row.weights == FP8 else {}
    opened, timing = job_with_times(load({
        "model": row.model, "cluster": f"{row.tp}x{row.gpu}", "plan": {"engine": engine},
        "run": eight, "workload": {
            "input_tokens": _exactly(row.input_tokens),
            "output_tokens": _exactly(row.output_tokens), "requests": {"count": row.requests}},
        "schedule": {"policy": POLICY, "tp_degree": row.tp, "tp_gpus": row.tp, "replicas": 1}}))
    found = [times for budget in BUDGETS if (
        times := _replayed(row, opened.problem, timing, budget)) is not None]
    return min(found, key=lambda times: times.job_s, default=NOTHING)


def _exactly(tokens: int) -> Mapping[str, int]:
    return {"mean": tokens, "std": 0, "max": tokens}


def _replayed(row: OfflineRow, problem: Problem, timing: TimingSource,
              budget: int) -> OfflineTimes | None:
    """None where the weights and one request do not fit beside a step of so many tokens."""
    estimate = fixed_estimate(POLICY, problem, timing, replace(
        problem.fixed, max_active=min(row.requests, MOST_ACTIVE), token_budget=budget,
        tp_gpus=row.tp if row.tp > 1 else 0))
    if not estimate.figures.fits:
        return None
    found: tuple[ReplayResult, SteadyFigures | None, float] = replayed(
        problem, timing, estimate, row.requests)
    result, steady, _ = found
    return OfflineTimes(
        job_s=result.makespan_s, kv_tokens=estimate.deployment.kv_tokens, token_budget=budget,
        steady_s=row.requests / steady.throughput_qps if steady else nan)


def of_offline(folder: Path) -> Iterator[Compared]:
    """Seconds of the jobs, by model and GPU, and number type of the weights."""
    groups: dict[tuple[str, str, str], list[OfflineRow]] = defaultdict(list)
    for row in offline_rows(folder):
        groups[row.kind, row.gpu, row.weights].append(row)
    for (kind, gpu, weights), own in groups.items():
        seconds = np.array([offline_times(row).job_s for row in own])
        known = np.isfinite(seconds)
        yield Compared(
            source=SOURCE, model=kind, gpu=gpu, engine=ENGINE,
            operator=f"{OPERATOR}, {kind}, {weights}", predicted_s=seconds[known],
            measured_s=np.array([row.measured_s for row in own])[known],
            skipped=int((~known).sum()), why="a model that is planned not to fit")
