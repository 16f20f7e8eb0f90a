"""Published throughput of FlexGen on one T4 and on four, beside the terms of placed steps.

    python benchmarks/flexgen.py [--out benchmarks/results]

Rows are those of Tables 2, 3 and 5 of the paper (arXiv:2303.06865): inputs of 512 tokens, outputs
of 32. Rates are the constants of `published/flexgen/flexgen.json`. *c* is the share of a layer's
terms that nothing overlaps: a layer takes (1 - c) of its longest term and c of their sum. No memory
is looked at. Three numbers were fitted to rows of this page: c, the disk's rate, and the rate of
entries up. So the first eight rows are no test of the form, and the others are one in part."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from runner import about, options, table, today, write

from xgpt.core import catalog
from xgpt.core.constraint import latency_constraint
from xgpt.core.controls import FixedSchedule
from xgpt.core.deployment import StageAssignment
from xgpt.core.lengths import joint_empirical
from xgpt.core.model import ModelSpec
from xgpt.core.placement import Placement, Shares
from xgpt.core.problem import Problem
from xprofiler.importers import import_folder
from xprofiler.profile_timing import ProfileTiming
from xprofiler.roofline import Roofline
from xsimulator.layer_times import LayerTimes
from xsimulator.placed import PlacedSteps

CONSTANTS = Path(__file__).resolve().parent / "published" / "flexgen"
INPUT, OUTPUT, FITTED = 512, 32, 8
DEVICE, HOST, DISK = (1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)
MIXED, HALVES = (0.2, 0.8, 0.0), (0.0, 0.5, 0.5)


class Row(NamedTuple):
    """A published row: tokens/s, model, requests of a device batch, device batches, and where
    weights and entries lie. `decoded`: of decoding alone. `stages`: devices, as many inner
    blocks."""

    name: str
    published: float
    model: str
    batch: int
    count: int
    weights: Shares
    kv: Shares
    options: dict[str, Any] = {}  # noqa: RUF012
    decoded: bool = False
    stages: int = 1


NO_HOST, APART = {"host_attention": False}, {"overlap": False}
ROWS = (
    Row("30B", 7.32, "30B", 64, 2, MIXED, HOST),
    Row("30B, no policy search", 6.93, "30B", 64, 2, HOST, HOST),
    Row("30B, no overlap", 5.86, "30B", 64, 2, MIXED, HOST, APART),
    Row("30B, no host attention", 4.03, "30B", 64, 2, MIXED, HOST, NO_HOST),
    Row("30B, DeepSpeed's policy", 1.57, "30B", 8, 1, HOST, DEVICE),
    Row("175B", 0.69, "175B", 32, 8, HALVES, DISK),
    Row("175B, no policy search", 0.27, "175B", 32, 1, HALVES, DISK),
    Row("175B, no overlap", 0.59, "175B", 32, 8, HALVES, DISK, APART),
    Row("175B, no host attention", 0.62, "175B", 32, 8, HALVES, DISK, NO_HOST),
    Row("30B, decoding alone", 11.52, "30B", 64, 2, MIXED, HOST, decoded=True),
    Row("175B, decoding alone", 0.83, "175B", 32, 8, HALVES, DISK, decoded=True),
    Row("30B, four devices", 23.61, "30B", 64, 3, MIXED, HOST, stages=4),
    Row("30B, four devices, decoding", 48.94, "30B", 64, 3, MIXED, HOST, {}, True, 4),
    Row("175B, four devices", 2.33, "175B", 40, 1, HOST, HOST, stages=4),
    Row("30B, entries in 4 bits", 8.38, "30B", 64, 8, HOST, HOST, {**NO_HOST, "kv_bits": 4}),
    Row("175B, all in 4 bits", 1.12, "175B", 48, 3, HOST, HOST,
        {**NO_HOST, "kv_bits": 4, "weight_bits": 4}))
SHAPES = {"30B": (48, 7168, 56), "175B": (96, 12288, 96)}


def tokens_per_s(row: Row, serial_share: float) -> float:
    """Tokens per second of blocks in steady state."""
    layers, hidden, heads = SHAPES[row.model]
    model = ModelSpec(name="opt", family="opt", num_layers=layers, hidden_size=hidden,
                      num_heads=heads, vocab_size=1, intermediate_size=4 * hidden,
                      max_positions=2048)  # layers alone, as their cost model counts
    lengths = joint_empirical(np.array([[INPUT, OUTPUT]]))
    problem = Problem(
        model=model, cluster=replace(catalog.cluster("t4-gcp"), num_nodes=row.stages),
        lengths=lengths, dtype="float16", num_queries=None, fixed=FixedSchedule(),
        constraint=latency_constraint(latency_s=np.inf, kind="sequence", quantile=0.99),
        default_max_tokens=OUTPUT)
    profile = import_folder("flexgen", CONSTANTS, model, problem.cluster.device, "float16")
    timing = ProfileTiming(profile, Roofline(model, problem.cluster.device, "float16"))
    each = layers // row.stages
    placement = Placement(weights=row.weights, kv=row.kv, hidden=HOST, device_batch=row.batch,
                          **{"host_attention": True, **row.options})
    steps = PlacedSteps(problem, LayerTimes.of(problem, timing), tuple(
        StageAssignment(index=i, ranks=(i,), first_layer=i * each, num_layers=each)
        for i in range(row.stages)), placement, sharers=1)
    shares, block = np.concatenate((row.weights, row.kv, HOST)), row.batch * row.count
    share = 1.0 if not placement.overlap else serial_share
    encode_s = float(steps.encode_step(0, block).seconds(shares, share))
    decode_s = float(steps.decode_step(0, block, INPUT + np.arange(1, OUTPUT)).seconds(
        shares, share).sum())
    if row.decoded:
        return block * (OUTPUT - 1) / decode_s
    whole_s = (2 * row.stages - 1) * encode_s + row.stages * decode_s
    return row.stages * block * OUTPUT / whole_s


def main() -> None:
    args = options(__doc__).parse_args()
    found = [(row, tokens_per_s(row, 0.45), tokens_per_s(row, 0.0)) for row in ROWS]
    lines = [f"# FlexGen's rows, {today()}", "", about(__doc__), "",
             *table(["row", "device batch x number", "published", "c 0.45", "", "c 0", ""])]
    for row, own, perfect in found:
        errors = [f"{100 * (one / row.published - 1):+.1f} %" for one in (own, perfect)]
        lines.append(f"| {row.name} | {row.batch} x {row.count} | {row.published:g} | {own:.3g} | "
                     f"{errors[0]} | {perfect:.3g} | {errors[1]} |")
    for share, at in ((0.45, 1), (0.0, 2)):
        errors = np.array([one[at] / one[0].published - 1 for one in found[:FITTED]])
        lines += ["", f"c {share:g}, the first eight rows: {100 * np.abs(errors).mean():.1f} % in "
                  f"the mean, {100 * np.abs(errors).max():.1f} % at most, bias "
                  f"{100 * errors.mean():+.1f} %."]
    write("flexgen", "\n".join(lines), args.out)


if __name__ == "__main__":
    main()
