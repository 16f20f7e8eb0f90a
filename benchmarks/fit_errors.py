"""How far off computed times are, by group of operators: the `errors` of
xgpt/core/catalog/engines.yaml.

    python benchmarks/fit_errors.py [--data ../shared/data] [--of xgpt]

From each engine's own tables (`--of`: with another engine's constants on them): of the logarithms
of measured over computed time the scale that is common to a shape's sizes, and that of its single
sizes. A scale is the median distance from the median over that of Student's distribution of four
degrees of freedom, so tables' few wild points do not decide it. Of products a shape is four that
are drawn, as a layer has; of attention its heads; of all-reduces the degree. What is common to all
steps is what makes latencies of the serving points' half `fit` likeliest, with the groups as the
catalog has them; so is the number of degrees of freedom."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from fit_engines import DATA, TABLES

from xgpt.core import catalog
from xgpt.core.lengths import FloatArray
from xprofiler.compared_tables import HEAD_DIM, Timed, all_reduces, attention
from xprofiler.engines import engine_errors
from xprofiler.importers import kernel_tables
from xprofiler.source_errors import UNCALIBRATED, SourceErrors, sizes_of
from xprofiler.timing import Operator
from xsimulator.compared_runs import (
    ServingPoint,
    predicted,
    serving_points,
)

QUARTILE = 0.741  # of Student's distribution of four degrees of freedom
LAYERS, MATRICES = 200, 4  # drawn, with a fixed seed
FREEDOM = (3, 4, 5, 8, 1000)
COMMON = (0.0, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--of", default=None)
    arguments = parser.parse_args()
    if not (arguments.data / "aiconfigurator").is_dir():
        sys.exit(f"{arguments.data}: no measured data there; give its folder with --data")
    for engine, gpu, stem in TABLES:
        print(f"{arguments.of or engine} on {stem}:")
        of = Timed(gpu, arguments.of or engine)
        for name, shapes, logs in table_logs(arguments.data / "aiconfigurator", stem, engine, of):
            common, step, bias = scales(shapes, logs)
            print(f"  {name}: [{common:.3f}, {step:.3f}], median {bias:+.3f}, {len(logs)} points")
    points = serving_points(arguments.data / "silicon" / "serving_points.csv")
    fit_common([point for point in points if point.is_fitted])


def scales(shapes: FloatArray, logs: FloatArray) -> tuple[float, float, float]:
    """(common to a shape's sizes, of single sizes, median). `shapes`: [points] a shape's number."""
    middle = {shape: float(np.median(logs[shapes == shape])) for shape in np.unique(shapes)}
    within = logs - np.array([middle[shape] for shape in shapes])
    medians = np.array(list(middle.values()))
    return (float(np.median(np.abs(medians - np.median(medians)))) / QUARTILE,
            float(np.median(np.abs(within))) / QUARTILE, float(np.median(logs)))


def table_logs(folder: Path, stem: str, engine: str, of: Timed
               ) -> Iterator[tuple[str, FloatArray, FloatArray]]:
    """Each usable table: its group's name, [points] the shape's number, and the logarithm of
    measured over computed."""
    gemms = kernel_tables.read_gemms(folder / f"{stem}_gemm.csv")["bfloat16"]
    yield "products", *layer_logs(gemms, of)
    for name, read, operator, key in (
            ("context", kernel_tables.read_context_attention, Operator.ENCODE_ATTENTION,
             "encode_attention"),
            ("generation", kernel_tables.read_generation_attention, Operator.DECODE_ATTENTION,
             "decode_attention")):
        if (name == "generation" and engine != "vllm") or (
                name == "context" and stem.startswith("h200_sxm_vllm")):
            continue  # not usable: xprofiler/compared_tables.py says why
        table = read(folder / f"{stem}_{name}_attention.csv")
        shapes, logs = [], []
        heads = np.stack([table.num_heads, table.kv_heads])
        known = table.head_dim == HEAD_DIM
        for number, pair in enumerate(np.unique(heads[:, known], axis=1).T):
            rows = np.flatnonzero(known & (heads == pair[:, None]).all(axis=0))
            part = replace(table, **{n: getattr(table, n)[rows] for n in (
                "queries", "tokens", "num_heads", "kv_heads", "head_dim", "seconds")})
            found = attention(part, stem, of, operator)
            logs.append(np.log(found.measured_s / found.predicted_s))
            shapes.append(np.full(len(logs[-1]), number))
        yield key, np.concatenate(shapes), np.concatenate(logs)
    table = kernel_tables.read_custom_all_reduce(folder / f"{stem}_custom_allreduce.csv")
    shapes, logs = [], []
    for degree in np.unique(table.ranks):
        own = np.flatnonzero(table.ranks == degree)
        found = all_reduces(replace(table, **{n: getattr(table, n)[own] for n in (
            "ranks", "num_bytes", "seconds", "kernel")}), stem, of)
        logs.append(np.log(found.measured_s / found.predicted_s))
        shapes.append(np.full(len(logs[-1]), degree))
    yield "all_reduce", np.concatenate(shapes), np.concatenate(logs)


def layer_logs(table: kernel_tables.GemmTable, of: Timed) -> tuple[FloatArray, FloatArray]:
    """Four products of the table, drawn, at every number of rows that all of them have."""
    found = of.roofline().kernels.layer_product_s(table.m, table.n, table.k)
    place = {key: at for at, key in enumerate(zip(
        table.m.tolist(), table.n.tolist(), table.k.tolist(), strict=True))}
    large = (table.n >= 1024) & (table.n <= 2**16) & (table.k >= 1024)
    sides = np.unique(np.stack([table.n[large], table.k[large]], axis=1), axis=0)
    rng = np.random.default_rng(17)
    shapes, logs = [], []
    for number in range(LAYERS):
        chosen = sides[rng.choice(len(sides), MATRICES, replace=False)].tolist()
        for rows in np.unique(table.m[table.m <= 8192]).tolist():
            at = [place.get((rows, *side)) for side in chosen]
            if None not in at:
                shapes.append(number)
                logs.append(float(np.log(table.seconds[at].sum() / found[at].sum())))
    return np.array(shapes), np.array(logs)


def fit_common(points: Sequence[ServingPoint]) -> None:
    """Log-likelihoods of latencies by what is common to all steps and the degrees of freedom."""
    from scipy.stats import t as student

    played = {point: predicted(point) for point in points}
    logs = np.array([np.log(point.latency_s / played[point].latency_s) for point in points])
    print("\ncommon to all steps: log-likelihood of the half `fit` by degrees of freedom")
    print("  common  " + "".join(f"{freedom:>8}" for freedom in FREEDOM))
    for common in COMMON:
        spread = np.array([
            replace(errors_of(point), common=common).spread(
                played[point].shares, sizes_of(point.input_tokens, point.output_tokens))
            for point in points])
        likely = [(student.logpdf(logs / spread, freedom) - np.log(spread)).sum()
                  for freedom in FREEDOM]
        print(f"  {common:6.2f}  " + "".join(f"{value:8.1f}" for value in likely))


def errors_of(point: ServingPoint) -> SourceErrors:
    found = engine_errors(catalog.device(point.device), point.row)
    assert found is not UNCALIBRATED, point.row
    return found


if __name__ == "__main__":
    main()
