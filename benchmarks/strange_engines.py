"""How far off are the common constants for an engine that nothing was measured of: the errors of
`UNCALIBRATED` (xprofiler/source_errors.py).

    python benchmarks/strange_engines.py [--data ../shared/data]

Whole runs that others published of five engines are computed with the common constants: static
batches (FasterTransformer), prompts and decode steps (vLLM of 2023: Splitwise's, DistServe's;
DistServe's engine, by its fitted coefficients), closed loops (vLLM, TensorRT-LLM, SGLang of today).
Engines count alike, versions of one share its weight, and so do the files of a version. Printed:
how far each is off; the likelihood of what the errors of `UNCALIBRATED` could be; and how often
a latency is within prediction and margin, for those of which all-reduces are a small part and for
the others. FasterTransformer's GPT-20B is the one that the skew of ranks was fitted to."""

from __future__ import annotations

import argparse
import csv
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from fit_engines import DATA

from xgpt.core import catalog
from xgpt.core.model import ModelSpec
from xprofiler.engines import engine_constants
from xprofiler.importers.distserve import read_coefficients
from xprofiler.made_sources import Raised
from xprofiler.roofline import Roofline
from xprofiler.source_errors import (
    UNCALIBRATED,
    GroupError,
    OperatorGroup,
    SourceErrors,
    sizes_of,
)
from xprofiler.timing import TimingSource
from xsimulator.compared_runs import LINKS, Shape, predicted, serving_points, static_batch_s

CONFIDENCES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
FREEDOM = 4  # of Student's distribution
FEW = 0.15  # all-reduces' share of a latency
DEGREES, BATCHES, INPUTS = (1, 2, 4, 8), (1, 2, 4, 8, 16, 32, 64, 128), (128, 256, 512, 1024)
MOST_ROWS = 8192
# (common to all steps; all-reduces: common, lean); their step as it is
TRIED = ((0.20, 0.30, 0.0), (0.10, 0.40, 0.0), (0.15, 0.40, 0.0), (0.05, 0.40, -0.5),
         (0.10, 0.40, -0.5), (0.12, 0.40, -0.5), (0.15, 0.40, -0.5), (0.15, 0.40, -0.3),
         (0.15, 0.50, -0.5), (0.20, 0.40, -0.5))


class Run(NamedTuple):
    """One latency: the logarithm of measured over computed, and what it is made of."""

    log: float
    shares: Mapping[OperatorGroup, float]
    sizes: float


class Runs(NamedTuple):
    """Those of one file and version. `weight`: of each of them, all engines' together being 1."""

    engine: str
    version: str
    runs: Sequence[Run]
    weight: float = 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=DATA)
    data = parser.parse_args().data
    if not (data / "distserve").is_dir():
        sys.exit(f"{data}: no measured data there; give its folder with --data")
    every = weighed(list(_all(data)))
    for engine, version, runs, weight in every:
        logs = np.array([run.log for run in runs])
        print(f"{engine} {version}: {len(runs)} runs, {weight * len(runs):.0%} of the weight, "
              f"mean log {logs.mean():+.2f}, deviation {logs.std():.2f}")
    print("\nerrors tried (common; all-reduces: common, lean), likelihood of a run (log), and kept "
          "of what is promised")
    print(" " * 45 + "".join(f"{confidence:>6.0%}" for confidence in CONFIDENCES))
    for common, own, lean in TRIED:
        step = UNCALIBRATED.groups[OperatorGroup.ALL_REDUCE].step
        errors = replace(UNCALIBRATED, common=common, groups={
            **UNCALIBRATED.groups, OperatorGroup.ALL_REDUCE: GroupError(own, step, lean)})
        name = f"{common:.2f}; {own:.2f}, {lean:+.2f} ({likelihood(errors, every):+.3f})"
        for words, is_few in (("all", None), ("few all-reduces", True), ("many", False)):
            print(f"{name:>28} {words:>15} " + "".join(
                f"{kept(errors, every, confidence, is_few=is_few):6.0%}"
                for confidence in CONFIDENCES))
            name = ""


def weighed(found: Sequence[Runs]) -> list[Runs]:
    """Engines alike; versions of one, and files of a version, share its weight."""
    engines = {own.engine for own in found}
    weights = []
    for own in found:
        versions = {other.version for other in found if other.engine == own.engine}
        files = [other for other in found if other[:2] == own[:2]]
        weights.append(1 / len(engines) / len(versions) / len(files) / len(own.runs))
    return [own._replace(weight=weight) for own, weight in zip(found, weights, strict=True)]


def likelihood(errors: SourceErrors, every: Sequence[Runs]) -> float:
    """Mean logarithm of a run's density."""
    from scipy.stats import t as student

    total = 0.0
    for own in every:
        logs, middles, spreads = np.array([
            (run.log, errors.lean(run.shares), errors.spread(run.shares, run.sizes))
            for run in own.runs]).T
        density = student.logpdf((logs - middles) / spreads, FREEDOM) - np.log(spreads)
        total += own.weight * float(density.sum())
    return total


def kept(errors: SourceErrors, every: Sequence[Runs], confidence: float, *,
         is_few: bool | None = None) -> float:
    """Share of the latencies within prediction and margin: of all, of those with few all-reduces,
    or of the others."""
    of = [(run.log <= math.log(errors.factor(run.shares, confidence, run.sizes)), own.weight)
          for own in every for run in own.runs
          if is_few in (None, run.shares.get(OperatorGroup.ALL_REDUCE, 0.0) <= FEW)]
    return sum(weight for is_kept, weight in of if is_kept) / sum(weight for _, weight in of)


def _all(data: Path) -> Iterator[Runs]:
    yield Runs("fastertransformer", "5", list(_of_fastertransformer(data / "fastertransformer")))
    yield Runs("vllm", "2023", list(_of_splitwise(data / "splitwise-sim")))
    for engine, version in (("vllm", "2023"), ("distserve", "2024")):
        yield Runs(engine, version, list(_of_fits(
            data / "distserve" / f"profiler-a100-80g.{engine}.json")))
    rows: dict[str, list[Run]] = {}
    for point in serving_points(data / "silicon" / "serving_points.csv"):
        played = predicted(point, engine_constants(catalog.device(point.device)), 0.0)
        rows.setdefault(point.row, []).append(Run(
            float(np.log(point.latency_s / played.latency_s)), played.shares,
            sizes_of(point.input_tokens, point.output_tokens)))
    for row, runs in rows.items():  # a version's row is called after its engine: `vllm-0.12`
        yield Runs(re.sub(r"-[\d.]+$", "", row), row, runs)


def _of_fastertransformer(folder: Path) -> Iterator[Run]:
    for row in _rows(folder / "gpt_latency.csv"):
        if row["oom"] != "0" or row["pp"] != "1":
            continue
        heads, width = int(row["head_num"]), int(row["head_num"]) * int(row["size_per_head"])
        model = ModelSpec(name=row["model"], family="gpt2", num_layers=int(row["num_layers"]),
                          hidden_size=width, num_heads=heads, vocab_size=int(row["vocab_size"]),
                          intermediate_size=4 * width)
        shape = Shape(int(row["tp"]), int(row["batch_size"]), int(row["input_len"]),
                      int(row["output_len"]))
        yield _run(model, "A100-80", float(row["latency_ms"]) * 1e-3, (shape,), sizes_of(
            shape.input_tokens, shape.output_tokens))


def _of_splitwise(folder: Path) -> Iterator[Run]:
    """Prompts and decode steps of Llama-2-70B, of every repeat."""
    gpus = {"a100-80gb": "A100-80", "h100-80gb": "H100"}
    model = catalog.model("llama-2-70b")
    for row in _rows(folder / "perf_model.csv"):
        degree, batch, inputs = (int(row[key]) for key in (
            "tensor_parallel", "batch_size", "prompt_size"))
        if row["model"] != "llama2-70b" or row["hardware"] not in gpus or (
                degree == 2 and batch >= 32):
            continue
        gpu, context = gpus[row["hardware"]], inputs + int(row["token_size"]) // 2 - 1
        yield _run(model, gpu, float(row["prompt_time"]) * 1e-3,
                   (Shape(degree, batch, inputs, 1),), 1.0)
        yield _run(model, gpu, float(row["token_time"]) * 1e-3,
                   (Shape(degree, batch, context, 2), Shape(degree, batch, context, 1)), 1.0)


def _of_fits(path: Path) -> Iterator[Run]:
    """Prompts and decode steps of OPT-13B and 66B."""
    for name, fits in read_coefficients(path).items():
        model = catalog.model(name.split("/")[-1])
        for degree, fit in fits.items():
            if degree not in DEGREES or fit.refusal():
                continue
            for batch, tokens in ((b, n) for b in BATCHES for n in INPUTS):
                fixed_s, token_s, square_s = fit.prefill
                if batch * tokens <= MOST_ROWS:
                    yield _run(model, "A100-80",
                               fixed_s + batch * tokens * (token_s + square_s * tokens),
                               (Shape(degree, batch, tokens, 1),), 1.0)
                yield _run(model, "A100-80", fit.decode_s(batch, tokens),
                           (Shape(degree, batch, tokens, 2), Shape(degree, batch, tokens, 1)), 1.0)


def _run(model: ModelSpec, gpu: str, measured_s: float, shapes: Sequence[Shape],
         sizes: float) -> Run:
    """Of a batch, or of what the first takes more than the second."""
    source = Roofline(model, catalog.device(gpu), "float16")

    def seconds(timing: TimingSource) -> float:
        first, *less = (static_batch_s(timing, model, LINKS[gpu], shape) for shape in shapes)
        return first - sum(less)

    computed_s = seconds(source)
    shares = {group: (seconds(Raised(source, group, 2.0)) / computed_s - 1)
              for group in OperatorGroup}
    return Run(math.log(measured_s / computed_s), shares, sizes)


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


if __name__ == "__main__":
    main()
