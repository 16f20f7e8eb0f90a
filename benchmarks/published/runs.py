"""The roofline against whole runs that others published: static batches of FasterTransformer,
prompts and tokens of Splitwise's engine, closed loops of today's serving engines.

    fastertransformer/gpt_latency.csv, splitwise-sim/perf_model.csv, silicon/serving_points.csv

published.left_out predicts serving points by constants that were not fitted to them."""

import csv
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from published.compared import Compared
from xgpt.core import catalog
from xgpt.core.cluster import Link
from xgpt.core.lengths import FloatArray
from xgpt.core.model import ModelSpec
from xgpt.core.units import FP8
from xprofiler.constants import RooflineConstants
from xprofiler.doubt import Cell, shape_of
from xprofiler.roofline import Roofline
from xprofiler.timing import MessageKind, Operator, TimingSource
from xsimulator.closed_loop import LoopTimes
from xsimulator.layer_times import ALL_REDUCES_PER_LAYER
from xsimulator.measured_loops import LINKS, ServingPoint, predicted

GPUS = {"h100_sxm": "H100", "h200_sxm": "H200", "a100_sxm": "A100-80"}
ENGINES = {"vllm": "vllm", "trtllm": "tensorrt-llm", "sglang": "sglang"}
# Some of the silicon table's runs drew their lengths from 0.8 to 1 times the stated ones, and do
# not say so. Of those told apart by `_shortest`, times to first token are such.
_DRAWN_FROM = 0.8
# vLLM's runs of thousands of tokens cannot have encoded all of their inputs: at degree 8, 40
# requests of 8,000 and 100 tokens in 0.91 s are 350,000 tokens/s, whose all-reduces alone would
# keep NVLink busy for 0.7 of the time at its data sheet's rate. vLLM keeps prefixes that inputs
# share unless told not to. The share is read off their
# times to first token.
_CACHED = 0.77
# Shapes that the catalog has not: planned here, not executed.
_QWEN3_32B = ModelSpec(
    name="qwen3-32b", family="llama", num_layers=64, hidden_size=5120, num_heads=64, num_kv_heads=8,
    head_size=128, vocab_size=151936, intermediate_size=25600, is_gated_mlp=True, has_bias=False,
    tied_embeddings=False)
_SPLITWISE = "vllm-0.2"  # the engine of its measurements
_SPLITWISE_GPUS = {"a100-80gb": "A100-80", "h100-80gb": "H100"}
_BLOOM = ModelSpec(name="bloom-176b", family="gpt2", num_layers=70, hidden_size=14336,
                   num_heads=112, vocab_size=250880, intermediate_size=57344)


class Shape(NamedTuple):
    """A static batch."""

    tp_degree: int
    batch: int
    input_tokens: int
    output_tokens: int


def static_batch_s(source: TimingSource, model: ModelSpec, link: str | Link,
                   shape: Shape) -> float:
    """One batch without early termination: encode, then output_tokens - 1 decode iterations."""
    degree, batch, inputs, outputs = shape
    encode_s, decode_s = _parts(source, model, link, degree)
    contexts = inputs + np.arange(1.0, outputs)
    return float(encode_s(batch, inputs) + decode_s(batch, contexts).sum())


def of_fastertransformer(folder: Path,
                         constants: RooflineConstants | None = None) -> Iterator[Compared]:
    """GPT of three sizes. `constants`: others than the engine's. Left out: batches that did not
    fit, and pipelines over nodes."""
    rows = _rows(folder / "gpt_latency.csv")
    by_model: dict[str, list[Mapping[str, str]]] = defaultdict(list)
    for row in rows:
        by_model[row["model"]].append(row)
    for name, own in by_model.items():
        model = _gpt(own[0])
        used = [row for row in own if row["oom"] == "0" and row["pp"] == "1"]
        source = Roofline(model, catalog.device("A100-80"), "float16", constants,
                          engine="fastertransformer")
        found = [static_batch_s(source, model, superpod_link(int(row["tp"])), Shape(
            int(row["tp"]), int(row["batch_size"]), int(row["input_len"]),
            int(row["output_len"]))) for row in used]
        yield Compared(
            source="FasterTransformer", model=name, gpu="A100-80", engine="fastertransformer",
            operator="static batch", predicted_s=np.array(found),
            measured_s=np.array([float(row["latency_ms"]) * 1e-3 for row in used]),
            skipped=len(own) - len(used), why="out of memory, or several stages")


def _gpt(row: Mapping[str, str]) -> ModelSpec:
    hidden = int(row["head_num"]) * int(row["size_per_head"])
    return ModelSpec(name=row["model"], family="gpt2", num_layers=int(row["num_layers"]),
                     hidden_size=hidden, num_heads=int(row["head_num"]),
                     vocab_size=int(row["vocab_size"]), intermediate_size=4 * hidden)


def fitted_cells(folder: Path) -> Iterator[Cell]:
    """Cells of the runs of 2023's engines that constants were fitted to. `folder`: of all
    measurements."""
    for row in _rows(folder / "fastertransformer" / "gpt_latency.csv"):
        if row["pp"] == "1":
            yield Cell("fastertransformer", "A100-80", shape_of(_gpt(row)), "", int(row["tp"]))
    for row in _rows(folder / "splitwise-sim" / "perf_model.csv"):
        if row["model"] == "llama2-70b" and row["hardware"] in _SPLITWISE_GPUS:
            yield Cell(_SPLITWISE, _SPLITWISE_GPUS[row["hardware"]],
                       shape_of(catalog.model("llama-2-70b")), "", int(row["tensor_parallel"]))


def superpod_link(tp_degree: int) -> Link:
    """What joins a group of its machines: nodes of eight A100, as FasterTransformer's guide and the
    paper have them."""
    cluster = catalog.cluster("a100-16")
    nodes = -(-tp_degree // cluster.devices_per_node)
    return replace(cluster, num_nodes=nodes).link_of(range(tp_degree))


def of_splitwise(folder: Path,
                 constants: RooflineConstants | None = None) -> Iterator[Compared]:
    """Prompts and decode steps of Llama-2-70B and BLOOM. `constants`: others than the engine's.
    Left out: what its README says is not measured, or was out of memory."""
    rows = _rows(folder / "perf_model.csv")
    points: dict[tuple[str, ...], list[Mapping[str, str]]] = defaultdict(list)
    skipped = 0
    for row in rows:
        is_full = (row["model"] == "llama2-70b" and row["tensor_parallel"] == "2"
                   and int(row["batch_size"]) >= 32)
        if row["hardware"].endswith("pcap") or is_full:
            skipped += 1
            continue
        points[tuple(row[key] for key in ("model", "hardware", "tensor_parallel", "prompt_size",
                                          "batch_size", "token_size"))].append(row)
    groups: dict[tuple[str, str], list[tuple[float, float, float, float]]] = defaultdict(list)
    for (name, hardware, degree, prompt, batch, tokens), own in points.items():
        gpu = _SPLITWISE_GPUS[hardware]
        model = catalog.model("llama-2-70b") if name == "llama2-70b" else _BLOOM
        encode_s, decode_s = _cached_parts(model, gpu, int(degree), constants)
        context = int(prompt) + int(tokens) / 2
        prompt_s, token_s = (float(np.median([float(row[key]) for row in own])) * 1e-3
                             for key in ("prompt_time", "token_time"))
        groups[model.name, gpu].append((
            float(encode_s(int(batch), int(prompt))), prompt_s,
            float(decode_s(int(batch), np.array(context))), token_s))
    for (name, gpu), found in groups.items():
        values = np.array(found)
        for at, operator in ((0, "prompt"), (2, "decode step")):
            yield Compared(
                source="Splitwise", model=name, gpu=gpu, engine=_SPLITWISE, operator=operator,
                predicted_s=values[:, at], measured_s=values[:, at + 1],
                skipped=skipped if at == 0 else 0, why="synthetic, or out of memory")
            skipped = 0


def serving_points(path: Path) -> list[ServingPoint]:
    """Points of silicon/serving_points.csv."""
    models = {"Qwen/Qwen3-32B": "qwen3-32b", "meta-llama/Llama-3.1-70B": "llama-3.1-70b",
              "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b",
              "nvidia/Llama-3.1-8B-Instruct-FP8": "llama-3.1-8b"}
    return [ServingPoint(
        source="silicon", model=models[row["model_path"]], device=GPUS[row["system"]],
        engine=ENGINES[row["backend"]], weight_dtype=FP8 if row["precision"] == "fp8" else "",
        tp_degree=int(row["tp_size"]), concurrency=int(row["batch_size"]),
        input_tokens=int(row["isl"]), output_tokens=int(row["osl"]),
        ttft_s=float(row["silicon_ttft_ms"]) * 1e-3,
        tpot_s=float(row["silicon_tpot_ms"]) * 1e-3,
        shortest=_shortest(row), version=row["backend_version"],
        cached=_cached(row)) for row in _rows(path)]


def _shortest(row: Mapping[str, str]) -> float:
    """1 where requests start together and stay so; rows that name no version of the engine, or
    inputs in thousands of tokens, are of other runs."""
    is_drawn = not row["backend_version"] or int(row["isl"]) % 1000 == 0
    return _DRAWN_FROM if is_drawn else 1.0


def _cached(row: Mapping[str, str]) -> float:
    """Share of an input that the engine had in its cache."""
    is_cached = row["backend"] == "vllm" and int(row["isl"]) % 1000 == 0
    return _CACHED if is_cached else 0.0


def model_of(point: ServingPoint) -> ModelSpec:
    """The point's model, also of shapes that the catalog has not."""
    return _QWEN3_32B if point.model == _QWEN3_32B.name else catalog.model(point.model)


def simulated(point: ServingPoint, constants: RooflineConstants | None = None) -> LoopTimes:
    """The prediction. `constants`: others than the engine's."""
    return predicted(point, constants, model_of(point))


def of_serving(points: Iterable[ServingPoint], times: Mapping[ServingPoint, LoopTimes],
               left_out: str = "") -> Iterator[Compared]:
    """TPOT, TTFT and latency of requests, by model, GPU, engine and dtype. `left_out`: what was
    left out of the fit at a time; "": nothing."""
    groups: dict[tuple[str, ...], list[ServingPoint]] = defaultdict(list)
    for point in points:
        dtype = point.weight_dtype or "16 bits"
        groups[point.source, f"{point.model} {dtype}", point.device, point.row].append(point)
    for (source, model, gpu, engine), own in sorted(groups.items()):
        for name in ("tpot_s", "ttft_s", "latency_s"):
            yield Compared(
                source=source, model=model, gpu=gpu, engine=engine, left_out=left_out,
                operator={"tpot_s": "TPOT", "ttft_s": "TTFT", "latency_s": "request"}[name],
                predicted_s=np.array([getattr(times[point], name) for point in own]),
                measured_s=np.array([getattr(point, name) for point in own]))


class _StepsOf(NamedTuple):
    """Seconds of encoding (batch, input tokens) and of a decode step (batch, contexts)."""

    encode_s: Callable[[int, int], float]
    decode_s: Callable[[int, FloatArray], FloatArray]


def _parts(source: TimingSource, model: ModelSpec, link: str | Link, degree: int) -> _StepsOf:
    """A whole model as one stage; each step ends with the head and the host's cost."""
    joined = catalog.link(link) if isinstance(link, str) else link

    def layers_s(rows: float, attention_s: FloatArray) -> FloatArray:
        reduce_s = source.message_s(MessageKind.ALL_REDUCE, rows * model.hidden_size * 2, joined,
                                    tp_degree=degree)
        rest_s = source.operator_s(Operator.LAYER_REST, rows, tp_degree=degree)
        seconds: FloatArray = model.num_layers * (
            rest_s + attention_s + ALL_REDUCES_PER_LAYER * reduce_s)
        return seconds

    def ends_s(batch: int) -> FloatArray:
        return (source.operator_s(Operator.HEAD, batch, tp_degree=degree)
                + source.facts.step_overhead_s)

    return _StepsOf(
        lambda batch, inputs: float(ends_s(batch) + layers_s(batch * inputs, batch * (
            source.operator_s(Operator.ENCODE_ATTENTION, inputs, batch, tp_degree=degree)))),
        lambda batch, contexts: ends_s(batch) + layers_s(float(batch), source.operator_s(
            Operator.DECODE_ATTENTION, batch, contexts, tp_degree=degree)))


@cache
def _cached_parts(model: ModelSpec, gpu: str, degree: int,
                  constants: RooflineConstants | None) -> _StepsOf:
    source = Roofline(model, catalog.device(gpu), "float16", constants, engine=_SPLITWISE)
    return _parts(source, model, LINKS[gpu], degree)


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
