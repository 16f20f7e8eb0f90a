"""The analytic roofline against operator times and latencies that others measured.

    python benchmarks/roofline_accuracy.py [--data ../shared/data] [--out benchmarks/results]

Errors are |predicted / measured - 1|. `uncalibrated` uses xprofiler/constants.py as it is;
`calibrated` fits it to eight points of the table, the same ones for every table, and is judged on
all the others. Which tables the constants were fit to is said in each row.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from calibrate import CalibrationPoint, Gemm, calibrate
from numpy.typing import NDArray

from xgpt.core import catalog
from xgpt.core.cluster import Link
from xgpt.core.model import ModelSpec
from xprofiler.importers import kernel_tables, vidur
from xprofiler.roofline import Roofline
from xprofiler.timing import MessageKind, Operator

DATA = Path(__file__).resolve().parent.parent.parent / "shared" / "data"
FloatArray = NDArray[np.float64]
GPT_20B = ModelSpec(name="gpt-20b", family="gpt2", num_layers=44, hidden_size=6144, num_heads=48,
                    vocab_size=51200, intermediate_size=24576)
DEVICES = {"a100": "A100-80", "a40": "A40", "h200": "H200"}
IN_SAMPLE_MODELS = ("Llama-2-7b-hf", "Llama-2-70b-hf")  # on A100 alone
GemmPoints = tuple[tuple[str, int, int], ...]
# (operator, tokens, tp_degree); a model measured at degree 1 alone takes that. These and the sizes
# of LINK_LAYOUTS["first"] were fixed before anything was calibrated; others were tried later, and
# `sensitivity_section` shows them.
GEMM_POINTS: GemmPoints = (
    ("mlp_up_proj", 1, 1), ("mlp_down_proj", 16, 8), ("attn_pre_proj", 64, 4),
    ("attn_post_proj", 128, 2), ("mlp_up_proj", 256, 4), ("mlp_down_proj", 512, 1),
    ("attn_pre_proj", 2048, 2), ("attn_post_proj", 4096, 8))
MID_TILE_ROWS = (1, 24, 88, 168, 328, 616, 1376, 2720)  # no multiples of a tile's 64 or 128 rows
MIB = 2**20
# Bytes of messages to calibrate with: where one degree was measured; where three were, at each;
# and besides at the largest. The nearest sizes measured are taken. None: the largest measured.
LINK_LAYOUTS: dict[str, tuple[tuple[float | None, ...], ...]] = {
    "first": ((2**17, 2**19, 2**20, 2**21, 2**23, 2**24, 2**25, 2**26),
              (2**17, 2**25), (2**20, 2**23)),
    "128 KiB to the largest": ((2**17, 2**19, 2**21, 2**22, 2**23, 2**25, 2**27, None),
                               (2**17, None), (2**20, 2**23)),
    "1 MiB to the largest": ((2**20, 2**21, 2**22, 2**23, 2**24, 2**25, 2**27, None),
                             (2**20, None), (2**22, 2**24)),
}


class Product(NamedTuple):
    """One measured matrix product [rows, k] x [k, n] of a model's layer."""

    operator: str
    tp_degree: int
    rows: int
    n: float
    k: float
    seconds: float


class Collective(NamedTuple):
    """One measured all-reduce within a node."""

    degree: int
    num_bytes: float
    seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if not (arguments.data / "vidur").is_dir():
        sys.exit(f"{arguments.data}: no measured data there (a folder with vidur/, "
                 "aiconfigurator/, fastertransformer/); give it with --data")
    text = report(arguments.data)
    print(text)
    if arguments.out is not None:
        path = arguments.out / f"roofline-{time.strftime('%Y-%m-%d')}.md"
        path.write_text(text + "\n", encoding="utf-8")


def report(data: Path) -> str:
    """The whole page."""
    sections = [gemm_section(data), all_reduce_section(data), sensitivity_section(data),
                gpt_section(data), gemm_grid_section(data), attention_section(data)]
    return "\n\n".join(["# The analytic roofline against public measurements", (
        "Median (and 90th percentile) of |predicted / measured - 1|. In-sample: the constants were "
        "fit to this table. The others took no part in the fit, but were in view while its form "
        "and rounding were chosen. Calibrated: fit to eight points, judged on all the others."
        ), *sections])


# Matrix products of model layers (Vidur)


def gemm_section(data: Path) -> str:
    lines = ["## Matrix products of a layer, 1 to 4,096 tokens, TP 1 to 8 (Vidur)", "",
             "| GPU | model | operator | points | uncalibrated | calibrated | |",
             "|---|---|---|---|---|---|---|"]
    pooled: dict[str, list[FloatArray]] = defaultdict(list)
    for gpu in ("a100", "a40"):
        for path in layers_of(data, gpu):
            model = path.parent.name
            is_in = gpu == "a100" and model in IN_SAMPLE_MODELS
            products = read_products(path)
            plain, fitted = errors_of_products(gpu, products)
            for operator in (*vidur.GEMMS, "all"):
                of = np.array([operator in (p.operator, "all") for p in products])
                held = of & ~np.isnan(fitted)
                lines.append(f"| {gpu} | {model} | {operator} | {of.sum()} | {spread(plain[of])} | "
                             f"{spread(fitted[held])} | {'in-sample' if is_in else ''} |")
            groups = (f"{gpu}, all", f"{gpu}, " + ("in-sample" if is_in else "held out"))
            for group in groups:
                pooled[group].append(np.stack([plain, fitted]))
    for group, parts in pooled.items():
        plain, fitted = np.concatenate(parts, axis=1)
        lines.append(f"| **{group}** | all | all | {len(plain)} | **{spread(plain)}** | "
                     f"**{spread(fitted[~np.isnan(fitted)])}** | |")
    return "\n".join([*lines, "", across_models(data), "", by_degree(data)])


def errors_of_products(gpu: str, products: Sequence[Product], wanted: GemmPoints = GEMM_POINTS
                       ) -> tuple[FloatArray, FloatArray]:
    """Errors before and after calibration; NaN at the points calibrated with."""
    chosen = gemm_points(products, wanted)
    source = roofline(gpu)
    plain = product_errors(source, products)
    fitted = product_errors(calibrated(source, products, chosen), products)
    fitted[chosen] = np.nan
    return plain, fitted


def across_models(data: Path) -> str:
    """Eight points of one model, judged on the others of that GPU."""
    lines = ["Calibrated with the eight points of Llama-2-7b alone, over all other models:"]
    for gpu in ("a100", "a40"):
        tables = {path.parent.name: read_products(path) for path in layers_of(data, gpu)}
        own = tables.pop("Llama-2-7b-hf")
        changed = calibrated(roofline(gpu), own, gemm_points(own))
        others = [p for products in tables.values() for p in products]
        lines.append(f"{gpu} {spread(product_errors(changed, others))};")
    return " ".join(lines) + (" few points can lead away from constants that are near already, "
                              "as they do on A40.")


def by_degree(data: Path) -> str:
    lines = ["| uncalibrated, rows | TP 1 | TP 2 | TP 4 | TP 8 |", "|---|---|---|---|---|"]
    for gpu in ("a100", "a40"):
        products = [p for path in layers_of(data, gpu) for p in read_products(path)]
        errors = product_errors(roofline(gpu), products)
        for low, high in ((1, 16), (17, 128), (129, 512), (513, 4096)):
            cells = [spread(errors[[p.tp_degree == t and low <= p.rows <= high for p in products]])
                     for t in (1, 2, 4, 8)]
            lines.append(f"| {gpu}, {low} to {high} | {' | '.join(cells)} |")
    return "\n".join(lines)


def layers_of(data: Path, gpu: str) -> list[Path]:
    return sorted((data / "vidur" / "compute" / gpu).glob("*/*/mlp.csv"))


def read_products(path: Path) -> list[Product]:
    """The matrix products of one mlp.csv with up to 4,096 rows."""
    table = vidur.read_mlp(path)
    s, up = table.shape, 2 if table.shape.use_gated_mlp else 1
    shapes = {"attn_pre_proj": ("n", s.n_embd * (s.n_head + 2 * s.n_kv_head) // s.n_head),
              "attn_post_proj": ("k", s.n_embd),
              "mlp_up_proj": ("n", up * s.n_expanded_embd),
              "mlp_down_proj": ("k", s.n_expanded_embd)}  # the side that is split, and its size
    products = []
    for i in np.flatnonzero(table.tokens <= 4096):
        degree, rows = int(table.tp_degree[i]), int(table.tokens[i])
        for operator, (side, size) in shapes.items():
            n, k = (size / degree, s.n_embd) if side == "n" else (s.n_embd, size / degree)
            products.append(Product(operator, degree, rows, n, k,
                                    float(table.seconds[operator][i])))
    return products


def gemm_points(products: Sequence[Product], wanted: GemmPoints = GEMM_POINTS) -> list[int]:
    """Indices of the points wanted: the first row of each."""
    degrees = {p.tp_degree for p in products}
    index: dict[tuple[str, int, int], int] = {}
    for i, p in enumerate(products):
        index.setdefault((p.operator, p.rows, p.tp_degree), i)
    return [index[operator, rows, degree if degree in degrees else 1]
            for operator, rows, degree in wanted]


def calibrated(source: Roofline, products: Sequence[Product], chosen: Iterable[int]) -> Roofline:
    found = calibrate(source, [
        CalibrationPoint(timed=Gemm(p.n, p.k), x=p.rows, measured_s=p.seconds)
        for p in (products[i] for i in chosen)])
    return source.with_constants(found.constants)


def product_errors(source: Roofline, products: Sequence[Product]) -> FloatArray:
    n, k, rows, measured = (np.array([getattr(p, name) for p in products], float)
                            for name in ("n", "k", "rows", "seconds"))
    return error(source.kernels.gemm_s(rows, n, k), measured)


# All-reduce (Vidur, aiconfigurator's NCCL tables)


def all_reduce_section(data: Path) -> str:
    lines = [
        "## All-reduce within a node", "",
        "Collectives alone, without the synchronisation term. The ranks' times (where several are "
        "recorded) count by their median. Vidur's smallest messages scatter between 7 and 66 us "
        "(three repeats each, host launches included). Rows of several nodes are left "
        "out: their network is not named, and groups lie within a node.", "",
        "| node | link | degree | points | up to 1 MiB | above | all, uncalibrated | calibrated | "
        "|",
        "|---|---|---|---|---|---|---|---|---|"]
    pooled: dict[str, list[FloatArray]] = defaultdict(list)
    for name, gpu, link, note, points in all_reduce_tables(data):
        plain, fitted = errors_of_collectives(gpu, points, link)
        sizes = np.array([p.num_bytes for p in points])
        for degree in sorted({p.degree for p in points}):
            of = np.array([p.degree == degree for p in points])
            held = of & ~np.isnan(fitted)
            small, large = plain[of & (sizes <= MIB)], plain[of & (sizes > MIB)]
            lines.append(f"| {name} | {link.name} | {degree} | {of.sum()} | {spread(small)} | "
                         f"{spread(large)} | {spread(plain[of])} | {spread(fitted[held])} | "
                         f"{note} |")
        if name.startswith("Vidur"):
            pooled[gpu].append(np.stack([plain, fitted]))
    for gpu, parts in pooled.items():
        plain, fitted = np.concatenate(parts, axis=1)
        lines.append(f"| **Vidur {gpu}** | | all | {len(plain)} | | | **{spread(plain)}** | "
                     f"**{spread(fitted[~np.isnan(fitted)])}** | |")
    return "\n".join(lines)


def errors_of_collectives(gpu: str, points: Sequence[Collective], link: Link,
                          layout: str = "first") -> tuple[FloatArray, FloatArray]:
    """Errors before and after calibration; NaN at the points calibrated with."""
    source, chosen = roofline(gpu), link_points(points, layout)
    fit = calibrate(source, [CalibrationPoint(
        timed=link, x=points[i].num_bytes, tp_degree=points[i].degree,
        measured_s=points[i].seconds) for i in chosen])
    plain = collective_errors(source, points, link)
    fitted = collective_errors(source.with_constants(fit.constants), points, link)
    fitted[chosen] = np.nan
    return plain, fitted


def all_reduce_tables(data: Path) -> Iterable[tuple[str, str, Link, str, list[Collective]]]:
    """(name, gpu, link, part in the fit, points). Four GPUs in two NVLink pairs have PCIe between
    the pairs, and the slowest hop sets a ring's pace."""
    nvlink3, nvlink4, pcie = (catalog.link(n) for n in ("nvlink3", "nvlink4", "pcie4-x16"))
    network, nccl = data / "vidur" / "network", data / "aiconfigurator"
    pairs = read_vidur_all_reduce(network / "a100_pairwise_nvlink" / "all_reduce.csv")
    yield ("Vidur a100_dgx", "a100", nvlink3, "",
           read_vidur_all_reduce(network / "a100_dgx" / "all_reduce.csv"))
    yield ("Vidur a100_pairwise", "a100", nvlink3, "", [p for p in pairs if p.degree == 2])
    yield ("Vidur a100_pairwise", "a100", pcie, "", [p for p in pairs if p.degree == 4])
    yield ("Vidur a40", "a40", pcie, "four sizes a degree in-sample",
           read_vidur_all_reduce(data / "vidur" / "history" / "a40_all_reduce.csv"))
    yield ("NCCL a100", "a100", nvlink3, "in-sample",
           read_nccl(nccl / "a100_sxm_nccl_2.27.3.csv"))
    yield ("NCCL h200", "h200", nvlink4, "", read_nccl(nccl / "h200_sxm_nccl_2.29.2.csv"))


def read_vidur_all_reduce(path: Path) -> list[Collective]:
    """Groups that lie within one node; the median over the ranks."""
    table = vidur.read_all_reduce(path)
    inside = table.ranks == table.ranks_per_node
    return [Collective(*row) for row in zip(
        table.ranks[inside].tolist(), table.num_bytes[inside].tolist(),
        table.seconds[inside].tolist(), strict=True)]


def read_nccl(path: Path) -> list[Collective]:
    table = kernel_tables.read_nccl_all_reduce(path)
    return [Collective(*row) for row in zip(
        table.ranks.tolist(), table.num_bytes.tolist(), table.seconds.tolist(), strict=True)]


def link_points(points: Sequence[Collective], layout: str) -> list[int]:
    """Indices of the eight points of a layout."""
    degrees = sorted({p.degree for p in points})
    alone, at_each, besides = LINK_LAYOUTS[layout]
    sizes = alone if len(degrees) == 1 else at_each
    wanted = [(degree, size) for degree in degrees for size in sizes]
    if len(degrees) > 1:
        wanted += [(degrees[-1], size) for size in besides]
    largest = max(p.num_bytes for p in points)

    def nearest(degree: int, size: float) -> int:
        return min((i for i, p in enumerate(points) if p.degree == degree),
                   key=lambda i: abs(np.log(points[i].num_bytes / size)))

    return [nearest(degree, size or largest) for degree, size in wanted]


def collective_errors(source: Roofline, points: Sequence[Collective], link: Link) -> FloatArray:
    errors = np.empty(len(points))
    for degree in {p.degree for p in points}:
        of = np.array([p.degree == degree for p in points])
        sizes = np.array([p.num_bytes for p in points])[of]
        measured = np.array([p.seconds for p in points])[of]
        errors[of] = error(source.links.collective_s(sizes, degree, link), measured)
    return errors


# How much the choice of the eight points matters


def sensitivity_section(data: Path) -> str:
    lines = ["## Other choices of the eight points", "",
             "Calibrated errors over all of Vidur's tables of a GPU. The tables above use the "
             "first choice; the others were tried after it.", "",
             "| what | points | a100 | a40 |", "|---|---|---|---|"]
    mid = tuple((operator, rows, degree) for (operator, _, degree), rows
                in zip(GEMM_POINTS, MID_TILE_ROWS, strict=True))
    for name, wanted in (("first (powers of two)", GEMM_POINTS), ("between tiles", mid)):
        cells = []
        for gpu in ("a100", "a40"):
            cells.append(judged([errors_of_products(gpu, read_products(path), wanted)[1]
                                 for path in layers_of(data, gpu)]))
        lines.append(f"| products | {name} | {' | '.join(cells)} |")
    tables = [table for table in all_reduce_tables(data) if table[0].startswith("Vidur")]
    for layout in LINK_LAYOUTS:
        cells = [judged([errors_of_collectives(gpu, points, link, layout)[1]
                         for _, of, link, _, points in tables if of == gpu])
                 for gpu in ("a100", "a40")]
        lines.append(f"| all-reduce | {layout} | {' | '.join(cells)} |")
    return "\n".join(lines)


def judged(parts: Sequence[FloatArray]) -> str:
    errors = np.concatenate(parts)
    return spread(errors[~np.isnan(errors)])


# Whole model (FasterTransformer)


def gpt_section(data: Path) -> str:
    lines = ["## GPT-20B on A100 (FasterTransformer's guide)", "",
             "One static batch: encode, then output_len - 1 decode iterations. In-sample: "
             "synchronisation and step overhead, and see xprofiler/constants.py. "
             "Speed-up: over TP 1, median of the shapes that have both.", "",
             "| TP | shapes | error | worst | above 20 % | bias (median) | speed-up predicted | "
             "published | off by |", "|---|---|---|---|---|---|---|---|---|"]
    published = {
        (int(r["tp"]), int(r["batch_size"]), int(r["input_len"]), int(r["output_len"])):
            float(r["latency_ms"]) * 1e-3
        for r in rows_of(data / "fastertransformer" / "gpt_latency.csv")
        if r["model"] == "GPT-20B" and r["pp"] == "1" and r["oom"] == "0"}
    source = Roofline(GPT_20B, catalog.device("A100-80"), "float16")
    found = {shape: static_batch_s(source, *shape) for shape in published}
    for degree in (1, 2, 4, 8):
        shapes = [s for s in published if s[0] == degree]
        ratios = np.array([found[s] / published[s] for s in shapes])
        errors = np.abs(ratios - 1)
        both = [s for s in shapes if (1, *s[1:]) in published]
        ours, theirs = (float(np.median([times[1, *s[1:]] / times[s] for s in both]))
                        for times in (found, published))
        lines.append(f"| {degree} | {len(shapes)} | {spread(errors)} | {errors.max():.1%} | "
                     f"{(errors > 0.2).sum()} | {np.median(ratios) - 1:+.1%} | {ours:.2f} | "
                     f"{theirs:.2f} | {ours / theirs - 1:+.1%} |")
    return "\n".join(lines)


def static_batch_s(source: Roofline, tp_degree: int, batch: int, input_tokens: int,
                   output_tokens: int) -> float:
    """FasterTransformer's run of one batch without early termination."""
    model, link = GPT_20B, catalog.link("nvlink3")

    def layers_s(rows: float, attention_s: FloatArray) -> FloatArray:
        reduce_s = source.message_s(MessageKind.ALL_REDUCE, rows * model.hidden_size * 2, link,
                                    tp_degree=tp_degree)
        rest_s = source.operator_s(Operator.LAYER_REST, rows, tp_degree=tp_degree)
        seconds: FloatArray = model.num_layers * (rest_s + attention_s + 2 * reduce_s)
        return seconds

    encode_s = layers_s(batch * input_tokens, batch * source.operator_s(
        Operator.ENCODE_ATTENTION, input_tokens, batch, tp_degree=tp_degree))
    context = input_tokens + np.arange(1, output_tokens)
    decode_s = layers_s(float(batch), source.operator_s(
        Operator.DECODE_ATTENTION, batch, context, tp_degree=tp_degree))
    ends_s = (source.operator_s(Operator.HEAD, batch, tp_degree=tp_degree)
              + source.facts.step_overhead_s)
    return float(encode_s + decode_s.sum() + output_tokens * ends_s)


# Further checks: products on a grid of shapes, attention kernels (aiconfigurator, Vidur)


def gemm_grid_section(data: Path) -> str:
    lines = ["## Matrix products on a grid of shapes, up to 4,096 rows (aiconfigurator)", "",
             "| GPU | engine | points | uncalibrated | |", "|---|---|---|---|---|"]
    for gpu, engine, note in (
            ("a100", "vllm_0.14.0", "in-sample"), ("a100", "trtllm_1.0.0", "in-sample"),
            ("h200", "vllm_0.19.0", ""), ("h200", "trtllm_1.2.0rc5", "")):
        table = kernel_tables.read_gemm(data / f"aiconfigurator/{gpu}_sxm_{engine}_gemm.csv")
        errors = error(roofline(gpu).kernels.gemm_s(table.m, table.n, table.k), table.seconds)
        errors = errors[table.m <= 4096]
        lines.append(f"| {gpu} | {engine} | {len(errors)} | {spread(errors)} | {note} |")
    return "\n".join(lines)


def attention_section(data: Path) -> str:
    lines = [
        "## Attention kernels", "",
        "Head dimension 128. Left out: H200, prefill under vLLM 0.19 (up to 260 times the peak "
        "rate with grouped heads, and less time for more query heads), decode under TensorRT-LLM "
        "(reads from L2). Vidur's times include the reshapes around the kernel.", "",
        "| GPU | table | points | uncalibrated | bias (median) | |", "|---|---|---|---|---|---|"]
    for gpu, name, kind, note in (
            ("a100", "vllm_0.14.0", "context", "in-sample"),
            ("a100", "trtllm_1.0.0", "context", "in-sample"),
            ("h200", "trtllm_1.2.0rc5", "context", ""),
            ("a100", "vllm_0.14.0", "generation", "in-sample"),
            ("h200", "vllm_0.19.0", "generation", "")):
        path = data / f"aiconfigurator/{gpu}_sxm_{name}_{kind}_attention.csv"
        ratios = attention_ratios(gpu, path, is_prefill=kind == "context")
        lines.append(f"| {gpu} | {name} {kind} | {len(ratios)} | {spread(np.abs(ratios - 1))} | "
                     f"{np.median(ratios) - 1:+.1%} | {note} |")
    for kind, note in (("decode", "in-sample"), ("prefill", "table of 2024-05, unexplained")):
        ratios = vidur_attention_ratios(data, kind)
        lines.append(f"| a100 | Vidur {kind} | {len(ratios)} | {spread(np.abs(ratios - 1))} | "
                     f"{np.median(ratios) - 1:+.1%} | {note} |")
    return "\n".join(lines)


def attention_ratios(gpu: str, path: Path, *, is_prefill: bool) -> FloatArray:
    """predicted / measured of whole batches; the table's heads are those of one rank."""
    read = (kernel_tables.read_context_attention if is_prefill
            else kernel_tables.read_generation_attention)
    table = read(path)
    found = np.full(len(table.seconds), np.nan)
    heads = np.stack([table.num_heads, table.kv_heads])
    for query_heads, kv_heads in np.unique(heads, axis=1).T.tolist():
        of = (heads[0] == query_heads) & (heads[1] == kv_heads) & (table.head_dim == 128)
        source, queries, tokens = (roofline(gpu, query_heads, kv_heads),
                                   table.queries[of], table.tokens[of])
        found[of] = (queries * source.operator_s(Operator.ENCODE_ATTENTION, tokens, queries)
                     if is_prefill else
                     source.operator_s(Operator.DECODE_ATTENTION, queries, tokens))
    ratios: FloatArray = (found / table.seconds)[table.head_dim == 128]
    return ratios


def vidur_attention_ratios(data: Path, kind: str) -> FloatArray:
    """64 query and 8 key-value heads at degree 2; prefill without tokens cached before."""
    table = vidur.read_attention(data / "vidur/history/a100_attention_8192x64x8_tp2_20240508.csv")
    source = roofline("a100", table.n_head, table.n_kv_head)
    if kind == "decode":
        of = ~table.is_prefill
        found = source.operator_s(Operator.DECODE_ATTENTION, table.queries[of],
                                  table.cached_tokens[of], tp_degree=2)
    else:
        of = table.is_prefill & (table.cached_tokens == 0)
        found = source.operator_s(Operator.ENCODE_ATTENTION, table.new_tokens[of], 1, tp_degree=2)
    ratios: FloatArray = found / table.seconds[of]
    return ratios


def roofline(gpu: str, heads: int = 48, kv_heads: int | None = None) -> Roofline:
    """The catalog's GPU, with a model that has these heads of 128."""
    model = ModelSpec(name="heads", family="llama", num_layers=1, hidden_size=128 * heads,
                      num_heads=heads, num_kv_heads=kv_heads, vocab_size=32000,
                      intermediate_size=512 * heads)
    return Roofline(model, catalog.device(DEVICES[gpu]), "bfloat16")


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def error(predicted: FloatArray, measured: FloatArray) -> FloatArray:
    return np.abs(predicted / measured - 1)


def spread(errors: FloatArray) -> str:
    if len(errors) == 0:
        return "-"
    return f"{np.median(errors):.1%} ({np.quantile(errors, 0.9):.0%})"


if __name__ == "__main__":
    main()
