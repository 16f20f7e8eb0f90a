"""The roofline's all-reduce within a node against Vidur's and aiconfigurator's NCCL tables."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from calibrate import CalibrationPoint, calibrate
from roofline_errors import FloatArray, error, roofline, spread

from xgpt.core import catalog
from xgpt.core.cluster import Link
from xprofiler.importers import kernel_tables, vidur
from xprofiler.roofline import Roofline

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


class Collective(NamedTuple):
    """One measured all-reduce within a node."""

    degree: int
    num_bytes: float
    seconds: float


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
    table = vidur.read_messages(path, "all_reduce")
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
