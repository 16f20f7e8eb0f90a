"""The roofline against published tables of kernels: matrix products, attention, all-reduces.

    aiconfigurator/<system>_<engine>_<version>_<table>.csv, <system>_nccl_<version>.csv
    vidur/compute/<gpu>/*/*/mlp.csv, vidur/network/*, vidur/history/*

Each table is compared with the constants of the engine that it was measured under; Vidur's, and
NCCL's, with those of our own runner. docs/accuracy.md has the errors."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from published import vidur
from published.compared import Compared
from xgpt.core import catalog
from xgpt.core.cluster import Link
from xgpt.core.engines import OWN_ENGINE
from xgpt.core.lengths import FloatArray
from xgpt.core.model import ModelSpec
from xgpt.core.units import FP8
from xprofiler.constants import RooflineConstants
from xprofiler.importers import aiconfigurator
from xprofiler.importers.draft import Table
from xprofiler.roofline import Roofline
from xprofiler.timing import Operator

GPUS = {"a100": "A100-80", "a40": "A40"}
MOST_ROWS = 8192  # of a product: more than an engine's step has
HEAD_DIM = 128
# Of finding the scale of an fp8 product's operand and converting it, which these tables' products
# do and served checkpoints spare: seconds of a launch, and the share of the memory's bandwidth,
# reading 16 bits and writing 8. Under vLLM neither can be told from the launch of the product.
_SCALING = {"tensorrt-llm": (12.8e-6, 0.238)}
# Tables that show no time of their kernel, by GPU, framework and name.
_L2 = "decode attention that reads from the L2 cache, beyond the memory's peak"
_UNUSABLE = {
    ("A100-80", "trtllm", "generation_attention"): _L2,
    ("H200", "trtllm", "generation_attention"): _L2}
# vLLM's prefill attention on H200: with grouped heads the table is up to 260 times quicker than the
# peak, and quicker for more heads. Without them it stays at a quarter of the peak, which served
# requests of 8,192 tokens (grouped, H100) exceed. Only the cost of a launch is taken from it.
_LAUNCHES = ("H200", "vllm", "context_attention")
_MOST_LAUNCHED = 256  # tokens
_BEYOND_PEAK = 1.05  # quicker than the data sheet allows by more: no time of this kernel
# Operators of Vidur's layers, and the side of the product that is split
_SPLIT = {"attn_pre_proj": "n", "attn_post_proj": "k", "mlp_up_proj": "n", "mlp_down_proj": "k"}


def heads_model(heads: int, kv_heads: int) -> ModelSpec:
    """A model with so many heads of 128."""
    return ModelSpec(name=f"{heads} heads, {kv_heads} of keys", family="llama", num_layers=1,
                     hidden_size=HEAD_DIM * heads, num_heads=heads, num_kv_heads=kv_heads,
                     vocab_size=32000, intermediate_size=4 * HEAD_DIM * heads, head_size=HEAD_DIM)


class Timed(NamedTuple):
    """What a table was measured on and under; with other constants than the engine's, if given."""

    gpu: str
    engine: str
    constants: RooflineConstants | None = None

    def roofline(self, heads: int = 32, kv_heads: int = 8, weight_dtype: str = "") -> Roofline:
        return Roofline(heads_model(heads, kv_heads), catalog.device(self.gpu), "bfloat16",
                        self.constants, engine=self.engine, weight_dtype=weight_dtype)


def of_aiconfigurator(folder: Path) -> Iterator[Compared]:
    """Every table of the folder."""
    for path in sorted(folder.glob("*.csv")):
        system, framework, version, table = _parts(path)
        gpu = aiconfigurator.SYSTEMS.get(system)
        if gpu is None:
            continue
        source = f"aiconfigurator {framework} {version}"
        of = Timed(gpu, aiconfigurator.ENGINES.get(framework, OWN_ENGINE))
        if table == "gemm":
            yield from (products(dtype, own, source, of)
                        for dtype, own in aiconfigurator.read_gemms(path).items())
        elif (why := _UNUSABLE.get((gpu, framework, table))) is not None:
            yield _skipped(path, source, of, why)
        elif table == "context_attention":
            own = aiconfigurator.read_context_attention(path)
            kept = launches(own) if (gpu, framework, table) == _LAUNCHES else own
            found = attention(kept, source, of, Operator.ENCODE_ATTENTION)
            more = len(own.lines) - len(kept.lines)
            yield replace(found, skipped=found.skipped + more, why=found.why if not more else (
                "prefill attention of grouped heads beyond the peak, or of more than "
                f"{_MOST_LAUNCHED} tokens, far below it"))
        elif table == "generation_attention":
            yield attention(aiconfigurator.read_generation_attention(path), source, of,
                            Operator.DECODE_ATTENTION)
        else:
            yield all_reduces(aiconfigurator.read_all_reduce(path), source, of)


def launches(table: Table) -> Table:
    """The rows of vLLM's prefill attention on H200 that show the cost of a launch."""
    is_alone = table["num_heads"] == table["num_key_value_heads"]
    return table.of(is_alone & (table["tokens"] <= _MOST_LAUNCHED))


def of_vidur(folder: Path) -> Iterator[Compared]:
    """Its layers' products, the attention of A100, and the all-reduces within a node."""
    for short, gpu in GPUS.items():
        for path in sorted((folder / "compute" / short).glob("*/*/mlp.csv")):
            yield _layer_products(vidur.read_mlp(path, _SPLIT), gpu)
    cached = folder / "history" / "a100_attention_8192x64x8_tp2_20240508.csv"
    if cached.is_file():
        yield _vidur_decode(vidur.read_attention(cached))
    for name, gpu, degrees, link in (
            ("network/a100_dgx/all_reduce.csv", "A100-80", (2, 4, 8), "nvlink3"),
            ("network/a100_pairwise_nvlink/all_reduce.csv", "A100-80", (2,), "nvlink3"),
            ("network/a100_pairwise_nvlink/all_reduce.csv", "A100-80", (4,), "pcie4-x16-p2p"),
            ("history/a40_all_reduce.csv", "A40", (2, 4, 8), "pcie4-x16")):
        if (folder / name).is_file():
            table = vidur.read_all_reduces(folder / name)
            inside = (table.ranks == table.ranks_per_node) & np.isin(table.ranks, degrees)
            yield messages("Vidur", Timed(gpu, OWN_ENGINE), catalog.link(link), (
                table.ranks[inside], table.num_bytes[inside], table.seconds[inside]))


def _skipped(path: Path, source: str, of: Timed, why: str) -> Compared:
    with path.open(encoding="utf-8") as file:
        rows = sum(1 for _ in file) - 1
    return Compared(source=source, model="", gpu=of.gpu, engine=of.engine, operator="attention",
                    predicted_s=np.empty(0), measured_s=np.empty(0), skipped=rows, why=why)


def _parts(path: Path) -> tuple[str, str, str, str]:
    """System, framework, version and table of a file's name."""
    system, rest = path.stem.split("_sxm_", 1)
    framework, version, *table = rest.split("_")
    return f"{system}_sxm", framework, version, "_".join(table)


def products(dtype: str, table: Table, source: str, of: Timed) -> Compared:
    """Of one dtype. The tables' fp8 products find their operand's scale each time: their rows of
    128 x 128 x 128 take five times those of 16 bits, and what they take more grows with rows and
    depth, whatever the columns."""
    kept = table["m"] <= MOST_ROWS
    kernels = of.roofline(weight_dtype=FP8 if dtype == FP8 else "").kernels
    found = kernels.layer_product_s(*(table[name][kept] for name in "mnk"))
    if dtype == FP8 and of.engine in _SCALING:
        launch_s, share = _SCALING[of.engine]
        bandwidth = catalog.device(of.gpu).bandwidth_bytes_per_s
        found = found + launch_s + 3.0 * table["m"][kept] * table["k"][kept] / (share * bandwidth)
    return Compared(
        source=source, model="single products", gpu=of.gpu, engine=of.engine,
        operator="products fp8" if dtype == FP8 else "products",
        predicted_s=found, measured_s=table["latency"][kept], skipped=int((~kept).sum()),
        why=f"more than {MOST_ROWS:,} rows")


def attention(table: Table, source: str, of: Timed, operator: Operator) -> Compared:
    """Heads are those of one rank. Left out: other head sizes, and times below what the data
    sheet's peaks allow (blocks that stay in a cache, kernels that did not do the work)."""
    seconds = table["latency"]
    found, least = np.full(len(seconds), np.nan), np.zeros(len(seconds))
    device = catalog.device(of.gpu)
    heads = np.stack([table["num_heads"], table["num_key_value_heads"]])
    known = table["head_dim"] == HEAD_DIM
    for query_heads, kv_heads in np.unique(heads[:, known], axis=1).T.tolist():
        own = (heads[0] == query_heads) & (heads[1] == kv_heads) & known
        queries, tokens = (table[name][own].astype(float) for name in ("batch_size", "tokens"))
        timing = of.roofline(query_heads, kv_heads)
        if operator is Operator.ENCODE_ATTENTION:
            found[own] = queries * timing.operator_s(operator, tokens, queries)
            flops = 2 * queries * tokens * tokens * query_heads * HEAD_DIM
            least[own] = flops / device.peak_flops_per_s("bfloat16")
        else:
            found[own] = timing.operator_s(operator, queries, tokens)
            moved = queries * tokens * 2 * kv_heads * HEAD_DIM * 2
            least[own] = moved / device.bandwidth_bytes_per_s
    kept = known & (least <= _BEYOND_PEAK * seconds)
    return Compared(
        source=source, model="single kernels", gpu=of.gpu, engine=of.engine,
        operator=("prefill attention" if operator is Operator.ENCODE_ATTENTION
                  else "decode attention"),
        predicted_s=found[kept], measured_s=seconds[kept], skipped=int((~kept).sum()),
        why="other head sizes, or quicker than the peaks allow")


def all_reduces(table: Table, source: str, of: Timed) -> Compared:
    """Of kernels launched singly and from a graph, the graph's."""
    own, link = aiconfigurator.of_graphs(table), catalog.link(aiconfigurator.LINKS[of.gpu])
    return messages(source, of, link, (own["num_gpus"], own["num_bytes"], own["latency"]))


def messages(source: str, timed: Timed, link: Link,
             measured: tuple[FloatArray, ...]) -> Compared:
    ranks, num_bytes, seconds = measured
    found, links = np.empty(len(seconds)), timed.roofline().links
    for degree in np.unique(ranks).tolist():
        of = ranks == degree
        found[of] = links.collective_s(num_bytes[of], degree, link)
    return Compared(source=source, model=f"over {link.name}", gpu=timed.gpu, engine=timed.engine,
                    operator="all-reduce", predicted_s=found, measured_s=seconds)


def _layer_products(table: vidur.MlpTable, gpu: str) -> Compared:
    """All products of the layers of one model, up to 4,096 rows."""
    width, inner = table.n_embd, table.n_expanded_embd
    sizes = {"attn_pre_proj": width * (table.n_head + 2 * table.n_kv_head) // table.n_head,
             "attn_post_proj": width, "mlp_up_proj": inner * (2 if table.use_gated_mlp else 1),
             "mlp_down_proj": inner}
    kernels = Timed(gpu, OWN_ENGINE).roofline().kernels
    kept = table.tokens <= 4096
    rows, degrees = table.tokens[kept].astype(float), table.tp_degree[kept].astype(float)
    found, measured = [], []
    for operator, side in _SPLIT.items():
        own = sizes[operator] / degrees
        n, k = (own, width) if side == "n" else (width, own)
        found.append(kernels.gemm_s(rows, n, k))
        measured.append(table.seconds[operator][kept])
    return Compared(
        source="Vidur", model=table.name, gpu=gpu, engine=OWN_ENGINE,
        operator="products", predicted_s=np.concatenate(found),
        measured_s=np.concatenate(measured), skipped=len(_SPLIT) * int((~kept).sum()),
        why="more than 4,096 rows")


def _vidur_decode(table: vidur.AttentionTable) -> Compared:
    of = ~table.is_prefill
    source = Timed("A100-80", OWN_ENGINE).roofline(table.n_head, table.n_kv_head)
    return Compared(
        source="Vidur", model="Llama-2-70b", gpu="A100-80", engine=OWN_ENGINE,
        operator="decode attention", measured_s=table.seconds[of], skipped=int((~of).sum()),
        why="its prefill, unexplained: half of what every other table has",
        predicted_s=source.operator_s(Operator.DECODE_ATTENTION, table.queries[of],
                                      table.cached_tokens[of], tp_degree=2))
