"""Fits the constants of xgpt/core/catalog/engines.yaml.

    python benchmarks/fit_engines.py [--data ../shared/data] [--tables] [--runs]

`--tables`: kernels and collectives of each engine and GPU from its own tables (soft L1 of the
logarithms of predicted / measured), and how far off the constants of the other engine's table are
there (leave one table out). `--runs`: what no kernel's table shows (host, skew, launches between
kernels) from whole runs. Prints values for
the file; those of the runs are found with the file as it is, so run it after the tables."""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from published.compared import Compared, errors_of, joined
from published.left_out import FREED as FREED_HOST
from published.left_out import HostFit
from published.runs import of_fastertransformer, of_splitwise, serving_points
from published.tables import Timed, all_reduces, attention, launches, products
from scipy.optimize import least_squares

from xgpt.core import catalog
from xprofiler.constants import GPU, RooflineConstants, engine_constants
from xprofiler.importers import aiconfigurator
from xprofiler.timing import Operator

DATA = Path(__file__).resolve().parent.parent.parent / "shared" / "data"
# chosen: requests times key-value heads of decode attention that constants are fitted to, with the
# least mean error over the whole table of H200: fewer cannot keep the memory busy
LEAST_HEADS = 16
MOST = 2500  # points of a table that are fitted to, drawn with a fixed seed
TABLES = (("vllm", "A100-80", "a100_sxm_vllm_0.14.0"), ("vllm", "H200", "h200_sxm_vllm_0.19.0"),
          ("tensorrt-llm", "A100-80", "a100_sxm_trtllm_1.0.0"),
          ("tensorrt-llm", "H200", "h200_sxm_trtllm_1.2.0rc5"))
FREED = {
    "products": ("gemm_flops_share", "gemm_half_rows", "gemm_half_columns", "gemm_half_depth",
                 "gemm_bytes_share", "gemm_launch_s", "gemm_overlap"),
    "products fp8": ("fp8_flops_share", "fp8_half_rows", "fp8_half_columns", "fp8_half_depth",
                     "fp8_bytes_share", "fp8_overlap", "fp8_launch_s"),
    "prefill attention": ("encode_attention_flops_share", "encode_attention_half_tokens",
                          "encode_attention_tail_s", "encode_attention_launch_s"),
    "prefill launch": ("encode_attention_launch_s",),
    "decode attention": ("decode_attention_bytes_share", "decode_attention_item_s",
                         "decode_attention_launch_s")}
START = {"gemm_half_columns": 100.0, "gemm_half_depth": 100.0, "fp8_half_columns": 1000.0,
         "fp8_half_depth": 300.0, "fp8_bytes_share": 0.9, "fp8_overlap": 8.0,
         "decode_attention_item_s": 40e-9, "encode_attention_tail_s": 5e-9}
PULL = 0.1  # a factor e away from the start costs as much as a residual of 10 %
FASTER_TRANSFORMER = {
    "gemm_half_columns": 50.0, "gemm_half_depth": 50.0, "elementwise_launch_s": 2.8e-6,
    "gemm_launch_s": 4.4e-6, "decode_attention_launch_s": 14e-6, "decode_attention_item_s": 5e-9,
    "encode_attention_flops_share": 0.56, "encode_attention_half_tokens": 660.0,
    "elementwise_bytes_share": 0.5, "sampling_s": 30e-6, "step_overhead_s": 200e-6,
    "synchronisation_s 2": 34e-6, "synchronisation_s 4": 37e-6, "synchronisation_s 8": 43e-6}
SPLITWISE = {
    "step_overhead_s": 2e-3, "elementwise_launch_s": 3e-6, "gemm_launch_s": 5e-6,
    "encode_attention_flops_share": 0.5, "decode_attention_item_s": 10e-9,
    "decode_attention_launch_s": 14e-6, "synchronisation_s 2": 30e-6, "synchronisation_s 8": 40e-6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--tables", action="store_true")
    parser.add_argument("--runs", action="store_true")
    arguments = parser.parse_args()
    if not (arguments.data / "aiconfigurator").is_dir():
        sys.exit(f"{arguments.data}: no measured data there; give its folder with --data")
    if arguments.tables:
        fit_tables(arguments.data / "aiconfigurator")
    if arguments.runs:
        fit_runs(arguments.data)


Compare = Callable[[RooflineConstants | None], Compared]


def fit_tables(folder: Path) -> None:
    rng = np.random.default_rng(17)
    found: dict[tuple[str, str], dict[str, RooflineConstants]] = defaultdict(dict)
    compares: dict[tuple[str, str, str], Compare] = {}
    for engine, gpu, stem in TABLES:
        print(f"{engine} {catalog.device(gpu).generation}:")
        start = replace(engine_constants(catalog.device(gpu), engine), **START)
        for operator, compare in tables_of(folder, stem, engine, gpu, rng):
            constants = fitted(compare, start, FREED[operator])
            start = replace(start, **{n: getattr(constants, n) for n in FREED[operator]})
            found[operator, gpu][engine] = constants
            compares[operator, gpu, engine] = compare
            values = ", ".join(f"{n}: {getattr(constants, n):.4g}" for n in FREED[operator])
            print(f"    # {operator}: {words(compare(constants))}\n    {values}", flush=True)
        fit_links(folder, engine, gpu, stem)
    print("\nleave one table out: constants of the other engine on the same GPU")
    for (operator, gpu), by_engine in found.items():
        for engine in by_engine:
            for other, constants in by_engine.items():
                if other != engine:
                    print(f"  {operator}, {gpu}, {engine}'s table by {other}'s: "
                          f"{words(compares[operator, gpu, engine](constants))}")


def words(found: Compared) -> str:
    e = errors_of(found)
    return f"median {e.median:.1%}, mean {e.mean:.1%}, bias {e.bias:+.1%}, P90 {e.p90:.0%}"


def tables_of(folder: Path, stem: str, engine: str, gpu: str, rng: np.random.Generator
              ) -> list[tuple[str, Compare]]:
    """A table's points as a function of constants."""
    found: list[tuple[str, Compare]] = []
    for dtype, table in aiconfigurator.read_gemms(folder / f"{stem}_gemm.csv").items():
        rows = np.flatnonzero((table["m"] <= 8192) & (table["n"] >= 256) & (table["k"] >= 256))
        part = table.of(rng.choice(rows, min(MOST, len(rows)), replace=False))
        found.append(("products fp8" if dtype == "fp8" else "products", lambda c, d=dtype, p=part:
                      products(d, p, stem, Timed(gpu, engine, c))))
    for name, read, operator, key in (
            ("context", aiconfigurator.read_context_attention, Operator.ENCODE_ATTENTION,
             "prefill attention"),
            ("generation", aiconfigurator.read_generation_attention, Operator.DECODE_ATTENTION,
             "decode attention")):
        table = read(folder / f"{stem}_{name}_attention.csv")
        if key == "decode attention" and engine != "vllm":
            continue  # its blocks stay in the L2 cache
        if key == "prefill attention" and stem.startswith("h200_sxm_vllm"):
            key, table = "prefill launch", launches(table)
        if key == "decode attention":
            table = table.of(
                table["batch_size"] * table["num_key_value_heads"] >= LEAST_HEADS)
        rows = np.flatnonzero(table["head_dim"] == 128)
        part = table.of(rng.choice(rows, min(MOST, len(rows)), replace=False))
        found.append((key, lambda c, o=operator, p=part: attention(
            p, stem, Timed(gpu, engine, c), o)))
    return sorted(found, key=lambda item: list(FREED).index(item[0]))


def fitted(compare: Compare, start: RooflineConstants, names: Sequence[str]) -> RooflineConstants:
    """`start` with the constants of these names fitted."""
    logs = np.log([getattr(start, name) for name in names])
    upper = np.array([0.0 if name.endswith("share") else np.log(1e5) for name in names])
    lower = np.array([0.0 if name.endswith("overlap") else -30.0 for name in names])

    def at(x: NDArray[np.float64]) -> RooflineConstants:
        return replace(start, **dict(zip(names, np.exp(x).tolist(), strict=True)))

    def misses(x: NDArray[np.float64]) -> NDArray[np.float64]:
        found = compare(at(x))
        return np.log(found.predicted_s / found.measured_s)

    fit = least_squares(misses, np.clip(logs, lower + 1e-6, upper - 1e-6), bounds=(lower, upper),
                        loss="soft_l1", f_scale=0.1, max_nfev=60)
    return at(fit.x)


def fit_links(folder: Path, engine: str, gpu: str, stem: str) -> None:
    """The engine's own all-reduces over NVLink."""
    table = aiconfigurator.read_all_reduce(folder / f"{stem}_custom_allreduce.csv")
    start = GPU.nvlink
    x0 = np.log([4e-6, 0.05, 0.9, 20e-6, 0.6, 0.6, 0.6])

    def at(x: NDArray[np.float64]) -> RooflineConstants:
        v = np.exp(x).tolist()
        link = replace(start, launch_s=v[0], hop_share=v[1], small_ratio=v[2],
                       large_launch_s=v[3], all_reduce_shares=((2, v[4]), (4, v[5]), (8, v[6])))
        return replace(GPU, nvlink=link)

    def misses(x: NDArray[np.float64]) -> NDArray[np.float64]:
        found = all_reduces(table, stem, Timed(gpu, engine, at(x)))
        return np.log(found.predicted_s / found.measured_s)

    fit = least_squares(misses, x0, bounds=(-30.0, [-3, 3, 0.7, -3, 0, 0, 0]), loss="soft_l1",
                        f_scale=0.1, max_nfev=80)
    link = at(fit.x).nvlink
    shares = ", ".join(f"{d}: {s:.3g}" for d, s in link.all_reduce_shares)
    print(f"    # all-reduce: {words(all_reduces(table, stem, Timed(gpu, engine, at(fit.x))))}\n"
          f"    nvlink: {{launch_s: {link.launch_s:.3g}, hop_share: {link.hop_share:.3g}, "
          f"small_ratio: {link.small_ratio:.3g}, large_launch_s: {link.large_launch_s:.3g},\n"
          f"      all_reduce_shares: {{{shares}}}}}", flush=True)


def fit_runs(data: Path) -> None:
    """What whole runs show besides: of FasterTransformer, of Splitwise's Llama-2-70B (its BLOOM is
    held out), and of all serving engines together."""
    a100 = catalog.device("A100-80")
    fit_run("fastertransformer", engine_constants(a100), FASTER_TRANSFORMER, lambda c: list(
        of_fastertransformer(data / "fastertransformer", c)))
    fit_run("vllm-0.2", engine_constants(a100), SPLITWISE, lambda c: [
        part for part in of_splitwise(data / "splitwise-sim", c) if "bloom" not in part.model])
    points = serving_points(data / "silicon" / "serving_points.csv")
    found = HostFit(points).fitted(np.ones(len(points), bool))
    print("serving engines, all together\n    " + ", ".join(
        f"{name}: {value:.3g}" for name, value in zip(FREED_HOST, found, strict=True)))


def fit_run(engine: str, base: RooflineConstants, freed: Mapping[str, float],
            compare: Callable[[RooflineConstants], list[Compared]]) -> None:
    """`freed`: names and where the search starts; "synchronisation_s 4" is that of a degree. A weak
    pull to the start decides what the runs leave open."""
    logs = np.log(list(freed.values()))
    most = np.array([0.0 if "share" in name else np.inf for name in freed])

    def at(x: NDArray[np.float64]) -> RooflineConstants:
        values = dict(zip(freed, np.exp(x).tolist(), strict=True))
        by_degree = tuple((int(name.split()[1]), values.pop(name)) for name in freed
                          if name.startswith("synchronisation_s "))
        return replace(base, synchronisation_s=by_degree, **values)

    def misses(x: NDArray[np.float64]) -> NDArray[np.float64]:
        parts = compare(at(x))
        return np.concatenate([*(np.log(p.predicted_s / p.measured_s) for p in parts),
                               PULL * (x - logs)])

    fit = least_squares(misses, logs, bounds=(logs - 6, np.minimum(logs + 3, most)),
                        loss="soft_l1", f_scale=0.1, diff_step=0.03, max_nfev=15)
    values = ", ".join(f"{n}: {v:.3g}" for n, v in zip(freed, np.exp(fit.x), strict=True))
    print(f"{engine}: {words(joined(compare(at(fit.x))))}\n    {values}", flush=True)


if __name__ == "__main__":
    main()
