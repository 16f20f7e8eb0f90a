"""The roofline's matrix products against those that Vidur measured of whole layers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from calibrate import CalibrationPoint, Gemm, calibrate
from roofline_errors import FloatArray, error, roofline, spread

from xprofiler.importers import vidur
from xprofiler.roofline import Roofline

IN_SAMPLE_MODELS = ("Llama-2-7b-hf", "Llama-2-70b-hf")  # on A100 alone
GemmPoints = tuple[tuple[str, int, int], ...]
# (operator, tokens, tp_degree); a model measured at degree 1 alone takes that. These and the sizes
# of roofline_collectives' first layout were fixed before anything was calibrated; others were tried
# later, and roofline_accuracy's `sensitivity_section` shows them.
GEMM_POINTS: GemmPoints = (
    ("mlp_up_proj", 1, 1), ("mlp_down_proj", 16, 8), ("attn_pre_proj", 64, 4),
    ("attn_post_proj", 128, 2), ("mlp_up_proj", 256, 4), ("mlp_down_proj", 512, 1),
    ("attn_pre_proj", 2048, 2), ("attn_post_proj", 4096, 8))


class Product(NamedTuple):
    """One measured matrix product [rows, k] x [k, n] of a model's layer."""

    operator: str
    tp_degree: int
    rows: int
    n: float
    k: float
    seconds: float


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
