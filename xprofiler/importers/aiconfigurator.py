"""Reads kernel tables of aiconfigurator and of AISimulate, its successor (ai-dynamo on GitHub,
Apache-2.0): milliseconds of one call of one kernel of an inference engine, by its sizes. They are
exported to CSV, or lie as in both repositories under `systems/data`:

    <system>_<framework>_<version>_<table>.csv, <system>_nccl_<version>.csv
    <system>/<family>/<framework>/<version>/<table>_perf.parquet, also <system>/comm/nccl/...

The files count milliseconds and elements of two bytes; the tables read from them hold seconds and
bytes."""

import re
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike
from scipy.interpolate import RegularGridInterpolator

from xgpt.core.cluster import Device
from xgpt.core.errors import wrong
from xgpt.core.lengths import FloatArray, IntArray
from xgpt.core.model import (
    ModelSpec,
    kv_elements_of_rank,
    kv_heads_of_rank,
    refuse_tp_degree,
)
from xgpt.core.units import DTYPE_BYTES
from xprofiler.importers.draft import (
    OPERATORS,
    Column,
    Fault,
    ProfileDraft,
    Source,
    Table,
    fail,
    in_order,
    read_table,
    samples_at,
)
from xprofiler.profile import ALL_REDUCE, Peaks, Profile, Sample, TableKey
from xprofiler.timing import Operator

ELEMENT_BYTES = DTYPE_BYTES["bfloat16"]
COMMIT, DATE = "095f58a51", "2026-08-21"  # of the exported tables
SYSTEMS = {"a100_sxm": "A100-80", "h100_sxm": "H100", "h200_sxm": "H200"}
# framework -> the catalog's name
ENGINES = {"vllm": "vllm", "trtllm": "tensorrt-llm", "sglang": "sglang"}
LINKS = {"A100-80": "nvlink3", "H100": "nvlink4", "H200": "nvlink4"}
DEGREES = (1, 2, 4, 8)
_BEYOND_PEAK = 1.05  # chosen: times shorter than the data sheet allows by more are not believed
_UNUSED = ("framework|version|device|op_name|kernel_source|beam_width|isl|backend|implementation|"
           "power|power_limit|compute_bound")
_ALL = slice(None)


def read_gemms(path: Path) -> dict[str, Table]:
    """Tables of matrix products out[m, n] = in[m, k] x w[n, k] by dtype, with `latency` in
    seconds. A file without a dtype column holds bfloat16 alone."""
    table = read_table(path, [
        *(Column(name, "count", least=1, is_work=True) for name in "mnk"), Column("latency", "ms"),
        Column("gemm_dtype", "text", allowed=("bfloat16", "fp8"), may_lack=True,
               default="bfloat16", is_choice=True)], _UNUSED)
    return {dtype: table.of(table["gemm_dtype"] == dtype)
            for dtype in np.unique(table["gemm_dtype"]).tolist()}


def read_gemm(path: Path) -> Table:
    """The bfloat16 table of `read_gemms`. Raises InputError where the file has none."""
    tables = read_gemms(path)
    if "bfloat16" not in tables:
        raise wrong(path, "gemm_dtype", "bfloat16", f"one of {', '.join(tables)}")
    return tables["bfloat16"]


def read_context_attention(path: Path) -> Table:
    """Table of prefill attention: `latency` in seconds for `batch_size` prompts of `tokens` each,
    without a cached prefix. Heads are counted per GPU."""
    table = _read_attention(path, Column("isl", "count", least=1, is_work=True),
                            Column("step", "text", allowed=("0",), is_choice=True))
    return table.of(_ALL, tokens=table["isl"])


def read_generation_attention(path: Path) -> Table:
    """Table of decode attention: `latency` in seconds of one new token for each of `batch_size`
    requests, whose contexts have `tokens` with the new one. Heads are counted per GPU."""
    table = _read_attention(path, Column("step", "count"))
    return table.of(_ALL, tokens=table["step"] + 1)


def read_all_reduce(path: Path) -> Table:
    """Table of all-reduces: `latency` in seconds by `num_gpus` and `num_bytes`. Reads a framework's
    own kernels or, by the file's name, NCCL's. `kernel_source` is empty where the file has none."""
    more = [Column("allreduce_dtype", "text", allowed=("bfloat16",), is_choice=True),
            Column("kernel_source", "text", may_lack=True, default="")]
    is_nccl = "_nccl_" in path.name or path.name.startswith("nccl_")
    if is_nccl:
        more = [Column("nccl_dtype", "text", allowed=("half", "bfloat16"), is_choice=True),
                Column("op_name", "text", allowed=("all_reduce",), is_choice=True)]
    table = read_table(path, [
        Column("num_gpus", "count", least=2),
        Column("message_size", "count", least=1, is_work=True), Column("latency", "ms"), *more],
        _UNUSED)
    if is_nccl:
        table = table.of(_ALL, kernel_source=np.full(len(table.lines), ""))
    return table.of(_ALL, num_bytes=table["message_size"] * ELEMENT_BYTES)


def of_graphs(table: Table) -> Table:
    """The rows of `table` but those that say that they were not launched from a CUDA graph."""
    return table.of(~np.char.endswith(table["kernel_source"], "_eager"))


class GemmTimes:
    """Interpolates seconds of matrix products, linearly in the logarithms of m, n, k and time.
    Beyond the largest size times grow in proportion; below the smallest they stay."""

    def __init__(self, table: Table) -> None:
        self.rows, wide, deep = (np.unique(table[name]) for name in "mnk")
        values = np.full((len(self.rows), len(wide), len(deep)), np.nan)
        at = tuple(np.searchsorted(axis, table[name])
                   for name, axis in zip("mnk", (self.rows, wide, deep), strict=True))
        with np.errstate(divide="ignore"):
            values[at] = np.log(table["latency"])
        if np.isneginf(values).any():
            raise wrong(table.path, "latency", 0, "a product takes more than no time")
        if min(values.shape) < 2 or (np.isfinite(values).sum(axis=2) < 2).any():
            raise wrong(table.path, "m, n, k", values.shape,
                        "two m and n at least, and two k for each m and n")
        self._axes = tuple(np.log(axis) for axis in (self.rows, wide, deep))
        self._of = RegularGridInterpolator(self._axes, _filled(values, self._axes[-1]))

    def __call__(self, rows: ArrayLike, n: float, k: float) -> FloatArray:
        """Seconds of the product [rows, k] x [k, n], for each of `rows`."""
        sizes = [np.log(np.asarray(size, float)) for size in (rows, n, k)]
        inside = [np.clip(at, axis[0], axis[-1])
                  for at, axis in zip(sizes, self._axes, strict=True)]
        beyond = sum(np.maximum(at - axis[-1], 0.0)
                     for at, axis in zip(sizes, self._axes, strict=True))
        seconds: FloatArray = np.exp(self._of(tuple(inside)) + beyond)
        return seconds


def _filled(values: FloatArray, depths: FloatArray) -> FloatArray:
    """`values` [m, n, k], logarithms of seconds, with sizes that were not measured (the largest n
    with the largest k) interpolated and extrapolated along k."""
    filled = values.copy()
    for line in filled.reshape(-1, values.shape[-1]):
        known = np.flatnonzero(np.isfinite(line))
        missing = np.flatnonzero(~np.isfinite(line))
        if not len(missing):
            continue
        line[missing] = np.interp(depths[missing], depths[known], line[known])
        last, before = known[-1], known[-2]
        slope = (line[last] - line[before]) / (depths[last] - depths[before])
        beyond = missing[missing > last]
        line[beyond] = line[last] + slope * (depths[beyond] - depths[last])
    return filled


def _read_attention(path: Path, *more: Column) -> Table:
    names = ("batch_size", "num_heads", "num_key_value_heads")
    return read_table(path, [
        *(Column(name, "count", least=1, is_work=name == "batch_size") for name in names), *more,
        Column("head_dim", "count", least=1, may_lack=True, default=128),
        *(Column(name, "text", allowed=allowed, may_lack=True, is_choice=True)
          for name, allowed in (("attn_dtype", ("bfloat16",)), ("kv_cache_dtype", ("bfloat16",)),
                                ("window_size", ("0",)))),  # 0: attention to all tokens
        Column("latency", "ms")], _UNUSED)


def import_folder(folder: Path, model: ModelSpec, device: Device, dtype: str, *,
                  engine: str | None = None, version: str | None = None) -> Profile:
    """The Profile made of an engine's tables for `device`.

    `engine`, `version`: defaults are vLLM and the newest version found. Raises InputError for an
    unknown engine, version or device, for a folder without such tables, and for a model whose
    attention heads they lack at every degree."""
    engine = engine or "vllm"
    system, framework, version = _tables_of(folder, device, engine, version)

    def table(name: str) -> Path:
        family = {"gemm": "gemm", "custom_allreduce": "comm"}.get(name, "attention")
        flat = folder / f"{system}_{framework}_{version}_{name}.csv"
        tree = folder / system / family / framework / version / f"{name}_perf.parquet"
        return flat if flat.is_file() else tree

    commit, date = _origin(table("gemm"))
    source = Source(name="aiconfigurator", kernels=f"aiconfigurator {framework}", commit=commit,
                    date=date, libraries=f"{framework} {version}")
    source.check(table("gemm"), model, dtype)
    draft = ProfileDraft(model, device, dtype, engine)
    times = GemmTimes(read_gemm(table("gemm")))
    degrees = [d for d in DEGREES if not draft.refuse(d, refuse_tp_degree(model, d))]
    for degree in degrees:
        _add_products(draft, times, model, degree)
    if (path := table("context_attention")).is_file():
        _add_attention(draft, read_context_attention(path), model, Operator.ENCODE_ATTENTION)
    if (path := table("generation_attention")).is_file():
        _add_attention(draft, read_generation_attention(path), model, Operator.DECODE_ATTENTION)
    paths = [table("custom_allreduce"), *sorted(folder.glob(f"{system}_nccl_*.csv")),
             *sorted(folder.glob(f"{system}/comm/nccl/*/nccl_perf.parquet"))]
    for path in [path for path in paths if path.is_file()][:1]:
        _add_all_reduce(draft, read_all_reduce(path), LINKS[device.name])
    if not draft.degrees:
        fail(table("gemm"), [Fault(None, f"tensor-parallel degree {d}", None, why)
                             for d, why in sorted(draft.refused.items())])
    draft.notes.append("products between the measured m, n, k by the logarithms of time and size; "
                       "norms, rotary embedding, activation, residual adds and sampling from the "
                       "analytic roofline")
    draft.fill_from_roofline()
    return draft.profile(source, f"{system} {framework} {version}")


def _origin(gemm: Path) -> tuple[str, str]:
    """(commit, date) of the export, or of what collected the products, if they say it."""
    if gemm.suffix == ".csv":
        return COMMIT, DATE
    meta = gemm.parent / "collection_meta.yaml"
    text = meta.read_text("utf-8") if meta.is_file() else ""
    commit, date = (re.findall(rf"{key}: '?([0-9a-f-]+)", text) or [""] for key in (
        "collector_ref", "collected_at"))
    return commit[-1][:9], date[-1]


def _tables_of(folder: Path, device: Device, engine: str, version: str | None
               ) -> tuple[str, str, str]:
    """(system, framework, version) as in the names of the engine's tables for `device`; the newest
    version found where `version` is None."""
    framework = next((name for name, known in ENGINES.items() if known == engine), None)
    if framework is None:
        raise wrong("command line", "--engine", engine, f"one of {', '.join(ENGINES.values())}")
    system = next((system for system, name in SYSTEMS.items() if name == device.name), None)
    if system is None:
        raise wrong(folder, "device", device.name, f"one of {', '.join(SYSTEMS.values())}")
    start, end = f"{system}_{framework}_", "_gemm.csv"
    tree = f"{system}/gemm/{framework}/*/gemm_perf.parquet"
    there = [*(path.name[len(start):-len(end)] for path in folder.glob(f"{start}*{end}")),
             *(path.parent.name for path in folder.glob(tree))]
    if not there:
        others = ", ".join(sorted(p.name for p in folder.glob("*_gemm.csv"))) or "none"
        raise wrong(folder, "tables", f"{system}_{framework}",
                    f"{tree} or {start}*{end}; there are: {others}")
    if version is not None and version not in there:
        raise wrong("command line", "--engine-version", version,
                    f"of {engine}, one of {', '.join(sorted(there))}")
    newest = max(there, key=lambda one: [  # a commit is the oldest
        int(number) for number in re.findall("[0-9]+", one) if one[0].isdigit()])
    return system, framework, version or newest


def layer_products(model: ModelSpec, degree: int) -> list[tuple[float, float]]:
    """(n, k) of each matrix product of one rank in one layer: query, key and value together;
    output; up (with gate); down."""
    hidden, width = model.hidden_size, model.num_heads * model.head_dim / degree
    inner = model.intermediate_size / degree
    return [(width + kv_elements_of_rank(model, degree), hidden), (hidden, width),
            (inner * (2 if model.is_gated_mlp else 1), hidden), (hidden, inner)]


def _add_products(draft: ProfileDraft, times: GemmTimes, model: ModelSpec, degree: int) -> None:
    """Adds LAYER_REST and HEAD: measured matrix products, and the roofline's time of all else."""
    head = [(-(-model.vocab_size // degree), model.hidden_size)]
    for operator, products in ((Operator.LAYER_REST, layer_products(model, degree)),
                               (Operator.HEAD, head)):
        roofline = draft.roofline.operator_s(operator, times.rows, tp_degree=degree)
        for n, k in products:
            roofline = roofline - draft.roofline.kernels.gemm_s(times.rows, n, k)
        seconds = np.maximum(roofline, 0.0) + sum(times(times.rows, n, k) for n, k in products)
        draft.add(operator, degree, samples_at(times.rows, seconds))


def _add_attention(draft: ProfileDraft, table: Table, model: ModelSpec,
                   operator: Operator) -> None:
    """Adds a table for each degree whose heads per GPU were measured; refuses the other degrees."""
    beyond_peak = []
    for degree in draft.degrees:
        heads = (model.num_heads // degree, int(kv_heads_of_rank(model, degree)), model.head_dim)
        rows = ((table["num_heads"] == heads[0]) & (table["num_key_value_heads"] == heads[1])
                & (table["head_dim"] == heads[2]))
        if not rows.any():
            draft.refuse(degree, f"{table.path.name} lacks attention of {heads[0]} heads and "
                                 f"{heads[1]} key-value heads of {heads[2]}; "
                                 f"{_geometries(table, heads[0])}")
            for of in OPERATORS:
                draft.tables.pop(TableKey(of.value, degree), None)
            continue
        queries, tokens, seconds = (
            table[name][rows] for name in ("batch_size", "tokens", "latency"))
        is_encode = operator is Operator.ENCODE_ATTENTION
        x, y = (tokens, queries) if is_encode else (queries, tokens)
        share_s = seconds / queries if is_encode else seconds
        least_s = _least_s(draft.peaks, model, operator, x, y) / degree
        beyond = int((least_s > _BEYOND_PEAK * share_s).sum())
        if beyond:
            beyond_peak.append(f"{beyond} of {rows.sum()} at tp {degree}")
            continue
        calm = draft.calm(operator, samples_at(x, share_s, y))
        draft.add(operator, degree, calm if is_encode else _completed(calm))
    if beyond_peak:
        draft.notes.append(f"{operator.value} not taken where points are quicker than the "
                           f"device's peaks allow ({', '.join(beyond_peak)})")


def _least_s(peaks: Peaks, model: ModelSpec, operator: Operator, x: IntArray,
             y: IntArray) -> FloatArray:
    """Seconds that attention of all heads in one layer takes at the peaks: four operations per
    element of each pair of tokens; queries, keys, values and result pass memory once."""
    width, kv = model.num_heads * model.head_dim, model.kv_elements_per_token_layer
    is_encode = operator is Operator.ENCODE_ATTENTION
    pairs = x * (x + 1) / 2 if is_encode else x * y
    moved = x * (2 * width + kv * (1 if is_encode else y))
    least: FloatArray = np.maximum(4 * pairs * width / peaks.flops_per_s,
                                   moved * ELEMENT_BYTES / peaks.bandwidth_bytes_per_s)
    return least


def _completed(table: list[Sample]) -> list[Sample]:
    """The decode attention `table` on its whole grid; large batches were measured at short contexts
    alone. There the cache's bytes decide, so a batch's time is that of the largest batch measured
    at its context, in proportion to the requests."""
    at = {(p.x, p.y): p for p in table}
    batches, contexts = sorted({p.x for p in table}), sorted({p.y for p in table})
    added = []
    for context in contexts:
        largest = max(x for x in batches if (x, context) in at)
        measured = at[largest, context]
        added += [Sample(x=x, y=context, samples_s=tuple(
            s * x / largest for s in measured.samples_s)) for x in batches if x > largest]
    return [*table, *added]


def _add_all_reduce(draft: ProfileDraft, table: Table, link: str) -> None:
    """Adds the all-reduce tables, with the seconds that ranks of this engine wait for each other:
    the kernel was timed with all ranks ready."""
    table = of_graphs(table)
    for degree in draft.degrees:
        rows = table["num_gpus"] == degree
        if rows.any():
            skew_s = draft.roofline.links.synchronisation_s(degree)
            draft.tables[TableKey(ALL_REDUCE, degree, link)] = in_order(samples_at(
                table["num_bytes"][rows], table["latency"][rows] + skew_s))
    if any(key.name == ALL_REDUCE for key in draft.tables):
        draft.notes.append("all_reduce with the skew of this engine's ranks added")


def _geometries(table: Table, num_heads: int) -> str:
    """Words for the head counts that were measured: key-value heads beside `num_heads`, or else
    all counts of heads."""
    of_heads = table["num_heads"] == num_heads
    measured = zip(table["num_key_value_heads"][of_heads].tolist(),
                   table["head_dim"][of_heads].tolist(), strict=True)
    pairs = ", ".join(f"{kv} of {dim}" for kv, dim in sorted(set(measured)))
    if pairs:
        return f"with {num_heads} heads it has key-value heads: {pairs}"
    return f"it has heads: {', '.join(str(h) for h in np.unique(table['num_heads']))}"
