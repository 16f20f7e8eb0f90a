"""Host constants of serving engines, fitted to published closed loops, and the errors of runs that
were left out of the fit in whole groups.

The constants (FREED) are the same for all engines and GPUs. A request's time is nearly linear in
them, so a fit needs the slopes at the catalog's values alone. Predictions of what was left out are
simulated anew."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import least_squares

from published.compared import Compared
from published.offline import offline_rows, offline_times
from published.runs import model_of, of_fastertransformer, of_splitwise, simulated
from xgpt.core import catalog
from xgpt.core.lengths import BoolArray, FloatArray
from xgpt.core.units import FP8
from xprofiler.constants import engine_constants
from xprofiler.doubt import LEVELS, Cell, LevelName, level_between, shape_of
from xsimulator.closed_loop import LoopTimes
from xsimulator.measured_loops import ServingPoint, cell_of

# chosen: starts of the fit, in seconds, to which PULL draws
FREED = {"step_overhead_s": 300e-6, "elementwise_launch_s": 2.4e-6, "synchronisation_s": 4e-6,
         "fp8_launch_s": 4.5e-6}
PULL = 0.1  # chosen: a factor e away from the start costs as much as an error of 10 % of one run
SOFT = 0.1  # chosen: errors above it count linearly
_STEP = 0.3  # chosen: share by which a constant is raised for its slope
FAR = "engine and GPU"
# What is left out at a time, by the table that it is shown in
TABLES: dict[str, Callable[[ServingPoint], tuple[object, ...]]] = {
    "workload": lambda p: (p.row, p.device, p.model, p.weight_dtype, p.input_tokens,
                           p.output_tokens),
    "degree": lambda p: (p.row, p.tp_degree),
    "shape": lambda p: (p.model,),
    FAR: lambda p: (p.row, p.device)}
RELEASE = "tensorrt-llm-0.14"  # that ran the offline jobs
WORKLOAD = "workload"  # its cells stay measured: other workloads of them are fitted to


class LeftOut(NamedTuple):
    """A run predicted by constants fitted without its group. `log`: logarithm of measured over
    computed time. `fitted`: the same by constants fitted to all runs, and to this one too.
    `weight`: of the run among its level's. `run`: what was measured, where other tables have it."""

    table: str
    group: tuple[object, ...]
    level: LevelName
    log: float
    fitted: float
    weight: float = 1.0
    run: ServingPoint | None = None


@dataclass(frozen=True)
class HostFit:
    """Fits to some of `points`."""

    points: Sequence[ServingPoint]

    @cached_property
    def measured_s(self) -> FloatArray:
        return np.array([point.latency_s for point in self.points])

    @cached_property
    def start(self) -> FloatArray:
        """The catalog's values."""
        one = engine_constants(catalog.device(self.points[0].device), self.points[0].row)
        return np.array([one.step_overhead_s, one.elementwise_launch_s,
                         one.synchronisation_s[0][1], one.fp8_launch_s])

    @cached_property
    def start_s(self) -> FloatArray:
        return self._simulated_s(self.start)

    @cached_property
    def slopes(self) -> FloatArray:
        """[points, constants] seconds of a request per second of each constant."""
        return np.stack([
            (self._simulated_s(self.start * (1 + _STEP * (np.arange(len(FREED)) == place)))
             - self.start_s) / (_STEP * value) for place, value in enumerate(self.start)], axis=1)

    def _simulated_s(self, values: FloatArray) -> FloatArray:
        return np.array([with_host(point, values).latency_s for point in self.points])

    def fitted(self, used: BoolArray) -> FloatArray:
        """The constants fitted to the used points, in the order of FREED."""
        pulled = np.log([*FREED.values()])

        def misses(logs: FloatArray) -> FloatArray:
            seconds = self.start_s + self.slopes @ (np.exp(logs) - self.start)
            off = np.log(np.maximum(seconds, 1e-3 * self.start_s) / self.measured_s)[used]
            soft = np.sign(off) * SOFT * np.sqrt(2 * (np.sqrt(1 + (off / SOFT) ** 2) - 1))
            return np.concatenate([soft, PULL * (logs - pulled)])

        found: FloatArray = np.exp(least_squares(misses, pulled).x)
        return found


def with_host(point: ServingPoint, values: FloatArray) -> LoopTimes:
    """The point's times by other values of FREED."""
    host = dict(zip(FREED, values.tolist(), strict=True))
    own = replace(engine_constants(catalog.device(point.device), point.row), **{
        **host, "synchronisation_s": ((2, host["synchronisation_s"]),)})
    return simulated(point, own)


def predictions(points: Sequence[ServingPoint], table: str) -> dict[ServingPoint, LoopTimes]:
    """Each point's times by constants fitted without its group of the table."""
    fit, key = HostFit(points), TABLES[table]
    groups = defaultdict[tuple[object, ...], list[int]](list)
    for place, point in enumerate(points):
        groups[key(point)].append(place)
    found = {}
    for places in groups.values():
        values = fit.fitted(~np.isin(np.arange(len(points)), places))
        found |= {points[place]: with_host(points[place], values) for place in places}
    return found


def left_out(points: Sequence[ServingPoint], table: str,
             times: Mapping[ServingPoint, LoopTimes],
             fitted: Mapping[ServingPoint, LoopTimes]) -> Iterator[LeftOut]:
    """The errors of `predictions`, with the level of doubt that each point had. `fitted`: times by
    constants fitted to all points."""
    cells = {point: cell_of(point, model_of(point)) for point in points}
    key = TABLES[table]
    for point in points:
        measured = {cells[other] for other in points
                    if table == WORKLOAD or key(other) != key(point)}
        yield LeftOut(table, key(point), level_between(cells[point], measured),
                      *(float(np.log(point.latency_s / found[point].latency_s))
                        for found in (times, fitted)), run=point)


def of_bloom(compared: Sequence[Compared]) -> Iterator[LeftOut]:
    """The decode steps of BLOOM on Splitwise's engine, which was fitted to Llama-2-70B alone."""
    for part in compared:
        if part.model.startswith("bloom") and part.operator == "decode step":
            yield from (LeftOut("shape", (part.model,), "neighbour", float(log), float(log))
                        for log in np.log(part.measured_s / part.predicted_s))


def of_engines(folder: Path, points: Sequence[ServingPoint]) -> Iterator[LeftOut]:
    """The errors of five engines by the common constants, as if nothing of them were known. Each
    engine weighs the same. `folder`: of all measurements."""
    logs = defaultdict[str, list[float]](list)
    for point in points:
        common = engine_constants(catalog.device(point.device))
        logs[point.engine].append(np.log(
            point.latency_s / simulated(point, common).latency_s))
    common = engine_constants(catalog.device("A100-80"))
    for part in (*of_fastertransformer(folder / "fastertransformer", common),
                 *of_splitwise(folder / "splitwise-sim", common)):
        if part.operator in ("static batch", "decode step"):
            logs[part.engine] += np.log(part.measured_s / part.predicted_s).tolist()
    for engine, own in logs.items():
        yield from (LeftOut("engine", (engine,), LEVELS[-1], float(log), float(log), 1 / len(own))
                    for log in own)


def of_jobs(folder: Path, measured: Collection[Cell]) -> Iterator[LeftOut]:
    """The errors of offline jobs, to which nothing was fitted. `folder`: of all measurements."""
    for row in offline_rows(folder / "trtllm-perf"):
        job_s = offline_times(row).job_s
        if np.isfinite(job_s):
            cell = Cell(RELEASE, row.gpu, shape_of(catalog.model(row.model)),
                        FP8 if row.weights == FP8 else "", row.tp)
            log = float(np.log(row.measured_s / job_s))
            yield LeftOut(FAR, (RELEASE, row.kind, row.gpu), level_between(cell, measured), log,
                          log)


def level_rows(errors: Sequence[LeftOut], confidences: Sequence[float]
               ) -> dict[LevelName, dict[str, object]]:
    """The catalog's figures of each level: number of errors, their mean size, bias and quantiles,
    and the mean size where they were fitted to. A level is never surer than a nearer one."""
    found: dict[LevelName, dict[str, object]] = {}
    least, typical = np.full(len(confidences), -np.inf), 0.0
    for name in LEVELS:
        own = [one for one in errors if one.level == name]
        if not own:
            continue
        logs, weights = np.array([one.log for one in own]), [one.weight for one in own]
        off, fitted = np.exp(-logs) - 1, np.exp(-np.array([one.fitted for one in own])) - 1
        least = np.maximum(quantiles(logs, weights, confidences), least)
        typical = max(float(np.average(np.abs(off), weights=weights)), typical)
        found[name] = {"cases": len(logs), "mean": round(typical, 4),
                       "fitted": round(float(np.average(np.abs(fitted), weights=weights)), 4),
                       "bias": round(float(np.average(off, weights=weights)), 4), "quantiles": [
                           [c, round(q, 4)] for c, q in zip(confidences, least.tolist(),
                                                             strict=True)]}
    return found


def quantiles(logs: ArrayLike, weights: ArrayLike, chances: ArrayLike) -> FloatArray:
    """The weighted quantiles."""
    found: FloatArray = np.quantile(logs, chances, weights=weights, method="inverted_cdf")
    return found


def promised(errors: Sequence[LeftOut], table: str, confidence: float
             ) -> dict[tuple[tuple[object, ...], LevelName], float]:
    """{(group of the table, level): logarithm of the limit promised to its runs, over their
    computed time}, by the errors of the level without those of the group's runs in any table. Like
    the margin (xprofiler.doubt), a limit is never below the computed time, and that at 0.5."""
    own, limits = [one for one in errors if one.table == table], {}
    for group, level in {(one.group, one.level) for one in own}:
        runs = {one.run for one in own if one.group == group} - {None}
        others = [one.log for one in errors if one.level == level and one.run not in runs and (
            one.table, one.group) != (table, group)]
        limits[group, level] = max(float(np.quantile(others, confidence)), 0.0) * (confidence > 0.5)
    return limits


def kept(errors: Sequence[LeftOut], table: str, confidences: Sequence[float]
         ) -> list[tuple[float, float]]:
    """(confidence promised, share of the table's runs that kept it)."""
    shares = []
    for confidence in confidences:
        limits = promised(errors, table, confidence)
        shares.append((confidence, float(np.mean([
            one.log <= limits[one.group, one.level] for one in errors if one.table == table]))))
    return shares


def cell_rows(cells: Sequence[Cell]) -> list[dict[str, object]]:
    """The catalog's list of measured cells: a row for each engine, GPU, shape and dtype."""
    rows = defaultdict[tuple[object, ...], set[int]](set)
    for cell in cells:
        rows[cell.engine, cell.gpu, cell.shape, cell.weights].add(cell.tp_degree)
    return [{"engine": engine, "gpu": gpu, "shape": list(shape), "weights": weights,
             "tp_degrees": sorted(degrees)}
            for (engine, gpu, shape, weights), degrees in sorted(rows.items())]
