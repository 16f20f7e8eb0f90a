"""The floor under a run of xgpt: its matrix products at the rate that products of so many rows
reach on this machine, and its KV entries at the bandwidth of memory.

    python benchmarks/floor.py RUN_FOLDER [--threads 2]

RUN_FOLDER is what `xgpt submit` has left. Every step of steps.jsonl is charged the products of all
layers for its rows (where it encodes, those of the last layer that come after its attention for its
queries alone) and of the head for its queries; every decode step the keys and values of its
queries, read once. A product's time is the best of several ways (WAYS), the layers' weights taken
in turn as in a step, a head's whole or in the runner's pieces; of a run with weights of int8 the
products of 8-bit codes are one more way. Left out: the scores of encoding (a few per cent), norms,
activations, making codes and scaling their sums back, and all else that a fused kernel could hide.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from xgpt.core.lengths import FloatArray
from xgpt.core.model import ModelSpec
from xgpt.core.placement import HEAD_TOKENS
from xrunner.checkpoint.source import read_spec
from xrunner.ops.cpu.products import (
    Int8Weight,
    MklWeight,
    PairsWeight,
    is_mkl_served,
    is_pairs_served,
    quantise,
)

# Between these, times are interpolated: a linear layer costs a part for its weights, a part a row.
ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 384, 512, 1024,
        2048)
# torch's linear layer; oneDNN's with packed weights; the same with the weights as float32, which is
# exact, and quicker where a processor's bfloat16 products are slow; MKL's with packed weights of
# float32 (where MKL does not serve, oneDNN's again); our own dot products of bfloat16 pairs (where
# these do not serve, oneDNN's packed again)
WAYS = ("plain", "packed", "packed as float32", "packed as float32 for MKL", "pairs of our own")
# of a run whose weights are held as that: codes by codes to sums
NARROW_WAYS = {"int8": "packed as int8"}
_LEAST_ROUNDS, _MOST_ROUNDS, _ENOUGH_S = 2, 6, 0.4  # of which the best counts
_FEW_LAYERS, _MANY_ROWS = 6, 128  # from so many rows on, so many layers stand for all
_READ_BYTES = 2**30  # past every cache
Shape = tuple[int, int]  # of a weight: [out, in]


class Numbers(NamedTuple):
    """What a run reckons in."""

    dtype: torch.dtype
    narrow: str = ""  # of NARROW_WAYS, if that is what its weights are held as

    @property
    def ways(self) -> tuple[str, ...]:
        """How its products can be made."""
        return (*WAYS, NARROW_WAYS[self.narrow]) if self.narrow else WAYS


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Products that a step has together: `count` times (the layers) those of these shapes."""

    shapes: tuple[Shape, ...]
    count: int

    @property
    def flops_per_row(self) -> int:
        return 2 * self.count * sum(rows * columns for rows, columns in self.shapes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """Seconds that a run's work takes at least, and what they are made of."""

    encode_s: float  # products of steps that encode, a mixed one's decoding rows among them
    decode_s: float
    head_s: float
    kv_s: float
    flops: float
    kv_bytes: float
    bandwidth_bytes_per_s: float

    @property
    def products_s(self) -> float:
        return self.encode_s + self.decode_s + self.head_s

    @property
    def total_s(self) -> float:
        return self.products_s + self.kv_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    machine = measure(*model_of(arguments.folder), arguments.threads)
    print("\n".join([*words(machine.floor(arguments.folder)), *rates(machine)]))


def model_of(folder: Path) -> tuple[ModelSpec, Numbers]:
    """The model that the run in `folder` was of, and what it reckoned in."""
    run = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    held = run.get("weight_dtype", "")
    is_narrow = held in NARROW_WAYS and held != run["dtype"]
    return read_spec(Path(run["model_dir"]), run["model_name"]), Numbers(
        getattr(torch, run["dtype"]), held if is_narrow else "")


def parts_of(spec: ModelSpec) -> dict[str, Part]:
    """By the kind of rows that go through them."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    width, kv = spec.num_heads * spec.head_dim, spec.kv_elements_per_token_layer
    attention = ((width + kv, hidden), (hidden, width))
    mlp = ((inner * (2 if spec.is_gated_mlp else 1), hidden), (hidden, inner))
    across = ((width, hidden), (hidden, width)) if spec.is_encoder_decoder else ()
    parts = {"layer": Part(shapes=(*attention, *across, *mlp), count=spec.num_layers),
             "head": Part(shapes=((spec.vocab_size, hidden),), count=1)}
    if spec.is_encoder_decoder:
        parts["encoder"] = Part(shapes=(*attention, *mlp), count=spec.num_encoder_layers)
        parts["cross_kv"] = Part(shapes=((kv, hidden),), count=spec.num_layers)
    return parts


def end_share(spec: ModelSpec) -> float:
    """The share of the layers' products that comes after the last layer's attention."""
    layer = parts_of(spec)["layer"]
    (rows, columns), *_ = layer.shapes
    whole = layer.flops_per_row / (2 * layer.count)
    return (1 - rows * columns / whole) / layer.count


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What this machine reaches on a model's products and in reading. `ways`: seconds of each
    part's products, [ways, rows] of the numbers' ways and ROWS."""

    spec: ModelSpec
    numbers: Numbers
    ways: dict[str, FloatArray]
    bandwidth_bytes_per_s: float

    @property
    def parts(self) -> dict[str, Part]:
        return parts_of(self.spec)

    def better(self, other: Machine) -> Machine:
        """The best of two measurements of the same."""
        return replace(
            self, ways={name: np.minimum(seconds, other.ways[name])
                        for name, seconds in self.ways.items()},
            bandwidth_bytes_per_s=max(self.bandwidth_bytes_per_s, other.bandwidth_bytes_per_s))

    def part_s(self, name: str, rows: Sequence[int]) -> FloatArray:
        """Seconds of the part's products for each of `rows`; those beyond the last row count that
        was measured at its rate."""
        at = np.asarray(rows, float)
        within = np.interp(np.minimum(at, ROWS[-1]), [0, *ROWS],
                           [0.0, *self.ways[name].min(axis=0)])
        return np.asarray(within * np.maximum(at / ROWS[-1], 1.0))

    def flops_per_s(self, name: str) -> FloatArray:
        """[ways, rows] as `ways`."""
        return self.parts[name].flops_per_row * np.array(ROWS) / self.ways[name]

    def floor(self, folder: Path) -> Floor:
        """Of the run in `folder`."""
        pairs = [(row["input_tokens"], row["output_tokens"])
                 for row in read_lines(folder / "results.jsonl")]
        steps = whole_steps(read_lines(folder / "steps.jsonl"))
        parts = self.parts
        products: list[tuple[str, str, int]] = []  # (kind of step, part, rows)
        for kind, queries, rows in steps:
            encodes_apart = kind == "encode" and self.spec.is_encoder_decoder
            names = ("encoder", "cross_kv") if encodes_apart else ("layer",)
            products += [(kind, name, rows) for name in names]
            if not encodes_apart:
                products.append((kind, "head", queries))
        seconds = {"encode": 0.0, "decode": 0.0, "head": 0.0}
        for kind, name, rows in products:
            where = "head" if name == "head" else "decode" if kind == "decode" else "encode"
            seconds[where] += float(self.part_s(name, [rows])[0])
        flops = sum(parts[name].flops_per_row * rows for _, name, rows in products)
        if not self.spec.is_encoder_decoder:
            for kind, queries, rows in steps:
                if kind != "decode":  # only inputs' ends go through the last layer to its end
                    layer = self.part_s("layer", [rows, queries])
                    seconds["encode"] -= end_share(self.spec) * float(layer[0] - layer[1])
                    flops -= end_share(self.spec) * parts["layer"].flops_per_row * (rows - queries)
        read = kv_tokens(self.spec, pairs) * self.spec.num_layers * (
            self.spec.kv_elements_per_token_layer * self.numbers.dtype.itemsize)
        return Floor(
            encode_s=seconds["encode"], decode_s=seconds["decode"], head_s=seconds["head"],
            kv_s=read / self.bandwidth_bytes_per_s, kv_bytes=read,
            flops=flops,
            bandwidth_bytes_per_s=self.bandwidth_bytes_per_s)


def measure(spec: ModelSpec, numbers: Numbers, threads: int) -> Machine:
    """This machine with so many threads, now."""
    torch.set_num_threads(threads)
    with torch.inference_mode():
        return Machine(spec=spec, numbers=numbers, bandwidth_bytes_per_s=read_bytes_per_s(),
                       ways={name: part_seconds(part, numbers)
                             for name, part in parts_of(spec).items()})


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def whole_steps(records: Iterable[dict[str, Any]]) -> list[tuple[str, int, int]]:
    """(kind, queries, rows) of each step, once: of the first stage of every copy's every pool, as
    if it had all of the layers. What takes up an encoder's output is part of the encode step."""
    steps = [record for record in records if record["kind"] != "cross_kv"]
    first: dict[tuple[int, str], int] = {}
    for step in steps:
        first.setdefault((step["replica"], step["pool"]), step["stage"])
    return [(step["kind"], step["queries"], step["tokens"]) for step in steps
            if step["stage"] == first[step["replica"], step["pool"]]]


def kv_tokens(spec: ModelSpec, pairs: Iterable[tuple[int, int]]) -> int:
    """Cached tokens that all decode steps read in one layer, of queries with (input, output)
    tokens: whatever the schedule, the token after k others is decoded with a context of k + 1."""
    if spec.is_encoder_decoder:  # its own tokens from the first on, and the input
        return sum(m * (m + 1) // 2 + m * n for n, m in pairs)
    return sum((m - 1) * n + (m - 1) * m // 2 for n, m in pairs)


def part_seconds(part: Part, numbers: Numbers, rows: Sequence[int] = ROWS) -> FloatArray:
    """Seconds of all products of the part, [ways, rows] of the numbers' ways."""
    layers = [[torch.randn(shape).to(numbers.dtype) for shape in part.shapes]
              for _ in range(part.count)]
    pieces = [[piece for weight in layer for piece in torch.split(weight, HEAD_TOKENS)]
              for layer in layers]  # whose weights are split, a head's, has them in pieces, too
    cuts = (layers,) if len(pieces[0]) == len(layers[0]) else (layers, pieces)
    return np.array([np.min([_products_s(cut, count, narrow=numbers.narrow) for cut in cuts],
                            axis=0) for count in rows]).T


def _products_s(layers: Sequence[Sequence[Tensor]], rows: int, *, narrow: str) -> list[float]:
    """In the order of `Numbers.ways`."""
    used = layers[:_FEW_LAYERS] if rows >= _MANY_ROWS else layers
    weights, dtype = [weight for layer in used for weight in layer], layers[0][0].dtype
    inputs = {w.shape[1]: torch.randn(rows, w.shape[1]).to(dtype) for w in layers[0]}
    plain_s = best_s(lambda: [F.linear(inputs[w.shape[1]], w) for w in weights])
    packed_s = _packed_s(weights, inputs)
    wide, wide_inputs = [w.float() for w in weights], {n: x.float() for n, x in inputs.items()}
    widened_s = packed_s if dtype is torch.float32 else _packed_s(wide, wide_inputs)
    mkl_s = _mkl_s(wide, wide_inputs) if is_mkl_served() else widened_s
    is_paired = dtype is torch.bfloat16 and is_pairs_served()
    pairs_s = _pairs_s(weights, inputs) if is_paired else packed_s
    narrow_s = [_NARROW[narrow](wide, wide_inputs)] if narrow else []
    return [s * len(layers) / len(used)
            for s in (plain_s, packed_s, widened_s, mkl_s, pairs_s, *narrow_s)]


def _packed_s(weights: Sequence[Tensor], inputs: dict[int, Tensor]) -> float:
    """`inputs` by their number of columns."""
    rows = len(next(iter(inputs.values())))
    packed = [(inputs[w.shape[1]], torch.ops.mkldnn._reorder_linear_weight(w, rows))
              for w in weights]
    return best_s(lambda: [torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], "")
                           for x, w in packed])


def _mkl_s(weights: Sequence[Tensor], inputs: dict[int, Tensor]) -> float:
    packed = [(inputs[w.shape[1]], MklWeight(w)) for w in weights]
    return best_s(lambda: [weight(x) for x, weight in packed])


def _pairs_s(weights: Sequence[Tensor], inputs: dict[int, Tensor]) -> float:
    held = [(inputs[w.shape[1]], PairsWeight(w)) for w in weights]
    return best_s(lambda: [weight(x) for x, weight in held])


def _int8_s(weights: Sequence[Tensor], inputs: dict[int, Tensor]) -> float:
    """Codes [rows, in] by codes to sums [rows, out] of float32, by the very call of a run."""
    codes = {columns: quantise(x)[0] for columns, x in inputs.items()}
    held = [(codes[w.shape[1]], *Int8Weight(w).tensors) for w in weights]
    return best_s(lambda: [torch.ops.onednn.qlinear_pointwise(
        x, 1.0, 128, packed, scales, zeros, None, 1.0, 0, torch.float32, "none", [], "")
        for x, packed, scales, zeros in held])


_NARROW = {"int8": _int8_s}


def read_bytes_per_s() -> float:
    """The best of two ways of reading a gibibyte."""
    data: Tensor = torch.ones(_READ_BYTES // 4)
    return _READ_BYTES / min(best_s(data.sum), best_s(lambda: torch.dot(data, data)))


def best_s(work: Callable[[], object]) -> float:
    times: list[float] = []
    while len(times) < _LEAST_ROUNDS or (len(times) < _MOST_ROUNDS and sum(times) < _ENOUGH_S):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def words(floor: Floor) -> list[str]:
    rate = floor.flops / floor.products_s
    return [f"Floor of this run's steps: {floor.total_s:.2f} s. Products: "
            f"{floor.flops / 1e12:.2f} TFLOP in {floor.products_s:.2f} s "
            f"({rate / 1e9:.0f} GFLOP/s; encoding {floor.encode_s:.2f} s, "
            f"decoding {floor.decode_s:.2f} s, head {floor.head_s:.2f} s). "
            f"Keys and values: {floor.kv_bytes / 1e9:.1f} GB at "
            f"{floor.bandwidth_bytes_per_s / 1e9:.1f} GB/s, {floor.kv_s:.2f} s."]


def rates(machine: Machine) -> list[str]:
    """A table: GFLOP/s of each part's products, by ways and some row counts."""
    shown = [ROWS.index(rows) for rows in (1, 8, 32, 96, 192, 512, 2048)]
    lines = [f"| GFLOP/s at rows: | {' | '.join(str(ROWS[i]) for i in shown)} |",
             f"|---|{'---|' * len(shown)}"]
    for name in machine.parts:
        for way, reached in zip(machine.numbers.ways, machine.flops_per_s(name) / 1e9,
                                strict=True):
            lines.append(f"| {name}, {way} | {' | '.join(f'{reached[i]:.0f}' for i in shown)} |")
    return lines


if __name__ == "__main__":
    main()
