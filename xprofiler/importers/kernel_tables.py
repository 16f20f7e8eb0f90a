"""aiconfigurator's tables as they are: sizes and seconds of single kernel calls.

Latencies are milliseconds and messages elements of two bytes in the files; seconds and bytes here.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.interpolate import RegularGridInterpolator

from xgpt.core.errors import wrong
from xgpt.core.lengths import FloatArray, IntArray
from xgpt.core.units import DTYPE_BYTES
from xprofiler.importers.table import Column, Table, read_table

ELEMENT_BYTES = DTYPE_BYTES["bfloat16"]
_UNUSED_ATTENTION = "version|window_size"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GemmTable:
    """[rows] out[m, n] = in[m, k] x w[n, k]."""

    path: Path
    m: IntArray
    n: IntArray
    k: IntArray
    seconds: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionTable:
    """[rows] `queries` together, each of `tokens`: new ones (context attention, causal) or those
    in its cache (generation: one new token). Heads are those of one GPU."""

    path: Path
    queries: IntArray
    tokens: IntArray
    num_heads: IntArray
    kv_heads: IntArray
    head_dim: IntArray
    seconds: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AllReduceTable:
    """[rows] bytes, not the files' elements. `kernel`: the file's name of it, empty where it has
    none."""

    ranks: IntArray
    num_bytes: IntArray
    seconds: FloatArray
    kernel: NDArray[np.str_]


def read_gemms(path: Path) -> dict[str, GemmTable]:
    """The rows of each dtype; a file without the column has bfloat16 alone."""
    table = read_table(path, [
        *(Column(name, "count", least=1, is_work=True) for name in "mnk"), Column("latency", "ms"),
        Column("gemm_dtype", "text", allowed=("bfloat16", "fp8"), may_lack=True,
               default="bfloat16")])
    found = {}
    for dtype in np.unique(table["gemm_dtype"]).tolist():
        rows = table["gemm_dtype"] == dtype
        m, n, k = (table[name][rows] for name in "mnk")
        found[dtype] = GemmTable(path=path, m=m, n=n, k=k, seconds=table["latency"][rows])
    return found


def read_gemm(path: Path, dtype: str = "bfloat16") -> GemmTable:
    """The rows of one dtype."""
    tables = read_gemms(path)
    if dtype not in tables:
        raise wrong(path, "gemm_dtype", dtype, f"one of {', '.join(tables)}")
    return tables[dtype]


def read_context_attention(path: Path) -> AttentionTable:
    """Prompts without a cached prefix."""
    table = _read_attention(path, Column("isl", "count", least=1, is_work=True))
    for i in np.flatnonzero(table["step"])[:1]:
        raise wrong(path, "step", int(table["step"][i]), "0: no cached prefix", int(table.lines[i]))
    return _attention(table, table["isl"])


def read_generation_attention(path: Path) -> AttentionTable:
    """`tokens` counts the one being made: the file's step + 1."""
    table = _read_attention(path)
    return _attention(table, table["step"] + 1)


def read_custom_all_reduce(path: Path) -> AllReduceTable:
    """The framework's own all-reduce kernels."""
    return _read_all_reduce(path, [
        Column("allreduce_dtype", "text", allowed=("bfloat16",)),
        Column("kernel_source", "text", may_lack=True, default="")], "backend|implementation")


def read_nccl_all_reduce(path: Path) -> AllReduceTable:
    """NCCL's all-reduces; its other collectives are left out."""
    return _read_all_reduce(path, [
        Column("nccl_dtype", "text", allowed=("half", "bfloat16")),
        Column("op_name", "text",
               allowed=("all_reduce", "all_gather", "alltoall", "reduce_scatter"))])


class GemmTimes:
    """A GemmTable between its sizes: linear in the logarithms of m, n, k and time. Beyond the
    largest (a vocabulary is wider) in proportion to each; below the smallest, as there."""

    def __init__(self, table: GemmTable) -> None:
        self.rows, wide, deep = (np.unique(axis) for axis in (table.m, table.n, table.k))
        values = np.full((len(self.rows), len(wide), len(deep)), np.nan)
        at = tuple(np.searchsorted(axis, of) for axis, of in (
            (self.rows, table.m), (wide, table.n), (deep, table.k)))
        with np.errstate(divide="ignore"):
            values[at] = np.log(table.seconds)
        if np.isneginf(values).any():
            raise wrong(table.path, "latency", 0, "a product takes more than no time")
        if min(values.shape) < 2 or (np.isfinite(values).sum(axis=2) < 2).any():
            raise wrong(table.path, "m, n, k", values.shape,
                        "two m and n at least, and two k for each m and n")
        self._axes = tuple(np.log(axis) for axis in (self.rows, wide, deep))
        self._of = RegularGridInterpolator(self._axes, _filled(values, self._axes[-1]))

    def __call__(self, rows: ArrayLike, n: float, k: float) -> FloatArray:
        """Seconds of [rows, k] x [k, n]."""
        sizes = [np.log(np.asarray(size, float)) for size in (rows, n, k)]
        inside = [np.clip(at, axis[0], axis[-1])
                  for at, axis in zip(sizes, self._axes, strict=True)]
        beyond = sum(np.maximum(at - axis[-1], 0.0)
                     for at, axis in zip(sizes, self._axes, strict=True))
        seconds: FloatArray = np.exp(self._of(tuple(inside)) + beyond)
        return seconds


def _filled(values: FloatArray, depths: FloatArray) -> FloatArray:
    """[m, n, k] logarithms; sizes not measured (the largest n with the largest k) go on along k."""
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
        Column("head_dim", "count", least=1, may_lack=True, default=128), Column("step", "count"),
        Column("attn_dtype", "text", allowed=("bfloat16",), may_lack=True),
        Column("kv_cache_dtype", "text", allowed=("bfloat16",), may_lack=True),
        Column("latency", "ms")], _UNUSED_ATTENTION)


def _attention(table: Table, tokens: IntArray) -> AttentionTable:
    return AttentionTable(
        path=table.path, queries=table["batch_size"], tokens=tokens,
        num_heads=table["num_heads"], kv_heads=table["num_key_value_heads"],
        head_dim=table["head_dim"], seconds=table["latency"])


def _read_all_reduce(path: Path, more: list[Column], unused: str = "") -> AllReduceTable:
    table = read_table(path, [
        Column("num_gpus", "count", least=2),
        Column("message_size", "count", least=1, is_work=True), Column("latency", "ms"), *more],
        unused)
    rows = (table["op_name"] == "all_reduce" if "op_name" in table
            else np.ones(len(table.lines), bool))
    kernel = table["kernel_source"] if "kernel_source" in table else np.full(len(rows), "")
    return AllReduceTable(
        ranks=table["num_gpus"][rows], kernel=kernel[rows],
        num_bytes=table["message_size"][rows] * ELEMENT_BYTES, seconds=table["latency"][rows])
