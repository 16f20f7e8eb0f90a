"""Measured closed loops, one's own or published, compared with their prediction.

A user's file has the columns model, device, engine, weight_dtype, tp_degree, concurrency,
input_tokens, output_tokens, ttft_ms and tpot_ms (docs/accuracy.md).

`choices` tests whether predictions choose the right one of several measured configurations under a
latency limit. A case is a workload (model, GPU, engine, dtype, input and output tokens) with at
least LEAST configurations (degree, concurrency), and one limit. Limits are geometric means of
neighbouring measured latencies at each of QUANTILES, and a tenth above the longest. The choice is
the highest predicted throughput per GPU whose predicted latency times the margin keeps the
limit."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from xgpt.core import catalog
from xgpt.core.catalog.releases import row_named
from xgpt.core.model import ModelSpec, kv_elements_of_rank, layer_params_of_rank
from xgpt.core.units import DTYPE_BYTES, FP8, WEIGHT_BYTES
from xprofiler.constants import RooflineConstants
from xprofiler.doubt import Cell, Doubt, doubt_of, shape_of
from xprofiler.importers.draft import Column, Fault, fail, read_table
from xprofiler.roofline import Roofline
from xsimulator.closed_loop import ClosedLoop, LoopTimes, StepSeconds, simulate_loop

LINKS = {"H100": "nvlink4", "H200": "nvlink4", "A100-80": "nvlink3"}
_COUNTS = ("tp_degree", "concurrency", "input_tokens", "output_tokens")
_TIMES = ("ttft_ms", "tpot_ms")
LEAST, QUANTILES = 4, (0.2, 0.4, 0.6, 0.8, 1.0)  # chosen
ABOVE = 1.1  # chosen: the last limit / the longest latency


class Errors(NamedTuple):
    """Statistics of |predicted / measured - 1|: mean, median, ninth decile and worst. bias: mean of
    predicted / measured - 1."""

    cases: int
    mean: float
    median: float
    bias: float
    p90: float
    worst: float


def errors_of(predicted_s: ArrayLike, measured_s: ArrayLike) -> Errors:
    """The statistics of pairs of predicted and measured seconds; NaN without any."""
    off = np.asarray(predicted_s, float) / np.asarray(measured_s, float) - 1
    if not len(off):
        return Errors(0, *(float("nan"),) * 5)
    size = np.abs(off)
    return Errors(cases=len(off), mean=float(size.mean()), median=float(np.median(size)),
                  bias=float(off.mean()), p90=float(np.quantile(size, 0.9)),
                  worst=float(size.max()))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingPoint:
    """One measured closed loop: configuration, workload, TTFT and TPOT in seconds."""

    source: str
    model: str
    device: str
    engine: str
    weight_dtype: str
    tp_degree: int
    concurrency: int
    input_tokens: int
    output_tokens: int
    ttft_s: float
    tpot_s: float
    shortest: float = 1.0  # lengths are drawn between this share of the stated ones and them
    cached: float = 0.0  # share of the inputs that the engine has in its cache from others
    version: str = ""  # of the engine

    @property
    def row(self) -> str:
        """Name of the catalog's entry for the engine, of this version if there is one."""
        try:
            return row_named(f"{self.engine}-{self.version}")
        except ValueError:
            return self.engine

    @property
    def latency_s(self) -> float:
        return self.ttft_s + self.tpot_s * (self.output_tokens - 1)

    @property
    def workload(self) -> tuple[str, ...]:
        """Key of the configurations that `choices` chooses among."""
        return (self.source, self.model, self.device, self.engine, self.weight_dtype,
                str(self.input_tokens), str(self.output_tokens))


def own_points(path: Path) -> list[ServingPoint]:
    """The measured loops in a user's file. Raises InputError with every mistake."""
    names = {"model": catalog.names("model"), "device": catalog.names("device"),
             "engine": catalog.names("engine")}
    table = read_table(path, [
        *(Column(key, "text", allowed=tuple(known)) for key, known in names.items()),
        Column("weight_dtype", "text", allowed=("", FP8), may_lack=True, default=""),
        *(Column(key, "count", least=1) for key in _COUNTS),
        *(Column(key, "ms") for key in _TIMES)], unused=".*")
    fail(path, [Fault(int(line), key, 0, "milliseconds above 0") for key in _TIMES
                for line in table.lines[table[key] == 0]])
    columns = [table[key].tolist() for key in (*names, "weight_dtype", *_COUNTS, *_TIMES)]
    fields = (*names, "weight_dtype", *_COUNTS, "ttft_s", "tpot_s")
    return [ServingPoint(source=path.stem, **dict(zip(fields, row, strict=True)))
            for row in zip(*columns, strict=True)]


def predicted(point: ServingPoint, constants: RooflineConstants | None = None,
              model: ModelSpec | None = None) -> LoopTimes:
    """Mean TTFT, TPOT and latency of a point by simulation. constants, model: replace those of the
    point's engine and of the catalog. The KV cache has the type of the weights, as
    engines serve fp8 checkpoints."""
    row, model = catalog.engine(point.row), model or catalog.model(point.model)
    device, kv_dtype = catalog.device(point.device), point.weight_dtype if row.fp8_cache else ""
    timing = Roofline(model, device, "bfloat16", constants, engine=point.row,
                      weight_dtype=point.weight_dtype, kv_dtype=kv_dtype)
    link = catalog.link(LINKS.get(point.device, "pcie4-x16-p2p"))
    held, entries = (WEIGHT_BYTES[name or "bfloat16"] for name in (point.weight_dtype, kv_dtype))
    weights = (model.num_layers * layer_params_of_rank(model, point.tp_degree) * held
               + DTYPE_BYTES["bfloat16"] * (
                   model.embedding_params + model.head_params) / point.tp_degree)
    share, taken = row.memory_share, weights + row.reserve_gb * 1e9
    room = share * (device.memory_bytes - taken) if row.of_free else (
        share * device.memory_bytes - taken)
    per_token = model.num_layers * kv_elements_of_rank(model, point.tp_degree) * entries
    return simulate_loop(ClosedLoop(
        concurrency=point.concurrency, input_tokens=point.input_tokens,
        output_tokens=point.output_tokens, step_tokens=row.step_tokens, mixes=row.mixes,
        kv_tokens=max(room, 0.0) / per_token, shortest=point.shortest, cached=point.cached),
        StepSeconds(model, timing, link, "bfloat16", point.tp_degree))


def fitted_factor(points: Sequence[ServingPoint], times: Mapping[ServingPoint, LoopTimes], *,
                  typical: float, scatter: float) -> tuple[float, float, float]:
    """(Factor on computed times, mean error of latencies without it, and by the factor of the other
    points.) Few points must not be followed too closely: a factor of exp(`typical`), the error of
    such times before, costs as much as an error of `scatter`, which single points keep."""
    logs = np.log([point.latency_s / times[point].latency_s for point in points])
    weight = (scatter / typical) ** 2
    left = logs - (logs.sum() - logs) / (len(logs) - 1 + weight)
    factor = float(np.exp(logs.sum() / (len(logs) + weight)))
    before, after = (float(np.mean(np.abs(np.expm1(-one)))) for one in (logs, left))
    return factor, before, after


def doubt_about(point: ServingPoint, model: ModelSpec | None = None) -> Doubt:
    """The doubt about a point's predicted times. `model`: replaces the catalog's."""
    return doubt_of(cell_of(point, model or catalog.model(point.model)))


def cell_of(point: ServingPoint, model: ModelSpec) -> Cell:
    """The conditions of the point."""
    return Cell(point.row, point.device, shape_of(model), point.weight_dtype, point.tp_degree)


def share_kept(points: Sequence[ServingPoint], times: Mapping[ServingPoint, LoopTimes],
               factor_of: Callable[[ServingPoint], float]) -> float:
    """Share of the measured latencies that are at most prediction x factor; NaN without points."""
    kept = [point.latency_s <= times[point].latency_s * factor_of(point) for point in points]
    return float(np.mean(kept)) if kept else float("nan")


class Choices(NamedTuple):
    """Shares of the cases: no choice possible; limit exceeded (of the choices made); the measured
    best chosen. regret: mean share of the best throughput that choices within the limit lose."""

    cases: int
    none: float
    broken: float
    exact: float
    regret: float


def choices(points: Sequence[ServingPoint], times: Mapping[ServingPoint, LoopTimes],
            margin_of: Callable[[ServingPoint], float]) -> Choices:
    """Outcome of all cases, as shares. margin_of: safety margin of a point, a factor."""
    workloads: dict[tuple[str, ...], list[ServingPoint]] = defaultdict(list)
    for point in points:
        workloads[point.workload].append(point)
    cases = none = broken = exact = 0
    regrets = []
    for own in workloads.values():
        if len(own) < LEAST:
            continue
        latencies = sorted(point.latency_s for point in own)
        latencies.append(ABOVE**2 * latencies[-1])
        for quantile in QUANTILES:
            at = int(np.ceil(quantile * len(own))) - 1
            bound_s = float(np.sqrt(latencies[at] * latencies[at + 1]))
            cases += 1
            best = max((p for p in own if p.latency_s <= bound_s),
                       key=lambda p: throughput(p, p.latency_s))
            within = [p for p in own if times[p].latency_s * margin_of(p) <= bound_s]
            if not within:
                none += 1
                continue
            chosen = max(within, key=lambda p: throughput(p, times[p].latency_s))
            exact += chosen is best
            if chosen.latency_s > bound_s:
                broken += 1
            else:
                regrets.append(1 - throughput(chosen, chosen.latency_s)
                               / throughput(best, best.latency_s))
    answers = max(cases - none, 1)
    return Choices(cases, none / max(cases, 1), broken / answers, exact / max(cases, 1),
                   float(np.mean(regrets)) if regrets else float("nan"))


def throughput(point: ServingPoint, latency_s: float) -> float:
    """Requests per second and GPU of a closed loop with this mean latency."""
    return point.concurrency / latency_s / point.tp_degree
