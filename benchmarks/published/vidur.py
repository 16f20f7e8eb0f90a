"""Vidur's profiling tables (Agrawal et al., MLSys 2024): medians of float16 kernels, in
milliseconds there and in seconds here. Rows of no tokens or bytes timed nothing, and are left out.

    compute/<gpu>/<org>/<model>/mlp.csv    network/<node>/{all_reduce,send_recv}.csv
    history/<gpu>_attention_*.csv          (the tree's older attention tables)"""

import csv
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from xgpt.core.lengths import BoolArray, FloatArray, IntArray

# Attention's own time: the kernel and what brings its operands into place.
_AROUND_ATTENTION = ("attn_input_reshape", "attn_output_reshape", "attn_kv_cache_save")


class MlpTable(NamedTuple):
    """Products of one layer. The shape is the whole model's, in Vidur's names; `seconds` [rows] by
    operator."""

    name: str
    n_head: int
    n_kv_head: int
    n_embd: int
    n_expanded_embd: int
    use_gated_mlp: bool
    tokens: IntArray
    tp_degree: IntArray
    seconds: Mapping[str, FloatArray]


class AttentionTable(NamedTuple):
    """[rows] attention in one layer; of decoding `queries` of one token at `cached_tokens`."""

    n_head: int
    n_kv_head: int
    is_prefill: BoolArray
    queries: IntArray
    cached_tokens: IntArray
    seconds: FloatArray


class AllReduceTable(NamedTuple):
    """[rows] medians, a row for each (ranks, ranks of a node, bytes)."""

    ranks: IntArray
    ranks_per_node: IntArray
    num_bytes: IntArray
    seconds: FloatArray


def read_mlp(path: Path, operators: Iterable[str]) -> MlpTable:
    """The times of these operators."""
    rows = _rows(path, "num_tokens")
    first = rows[0]
    return MlpTable(
        path.parent.name, *(int(first[name]) for name in MlpTable._fields[1:5]),
        use_gated_mlp=first["use_gated_mlp"] == "True", tokens=_counts(rows, "num_tokens"),
        tp_degree=_counts(rows, "num_tensor_parallel_workers"),
        seconds={operator: _seconds(rows, operator) for operator in operators})


def read_attention(path: Path) -> AttentionTable:
    rows = _rows(path, "batch_size")
    first, is_prefill = rows[0], np.array([row["is_prefill"] == "True" for row in rows])
    kernel = np.where(is_prefill, _seconds(rows, "attn_prefill"), _seconds(rows, "attn_decode"))
    around = [_seconds(rows, operator) for operator in _AROUND_ATTENTION
              if _median(operator) in first]
    return AttentionTable(
        n_head=int(first["n_q_head"]), n_kv_head=int(first["n_kv_head"]), is_prefill=is_prefill,
        queries=_counts(rows, "batch_size"), cached_tokens=_counts(rows, "kv_cache_size"),
        seconds=np.sum([kernel, *around], axis=0))


def read_all_reduces(path: Path) -> AllReduceTable:
    rows = _rows(path, "size")
    places = np.stack([_counts(rows, name) for name in ("num_workers", "devices_per_node", "size")])
    seconds = _seconds(rows, "all_reduce")
    unique, row = np.unique(places, axis=1, return_inverse=True)
    order = np.argsort(np.ravel(row), kind="stable")
    parts = np.split(seconds[order], np.flatnonzero(np.diff(np.ravel(row)[order])) + 1)
    return AllReduceTable(*unique, seconds=np.array([np.median(part) for part in parts]))


def _rows(path: Path, work: str) -> list[dict[str, str]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        return [row for row in csv.DictReader(file) if float(row[work])]


def _counts(rows: list[dict[str, str]], name: str) -> IntArray:
    return np.array([int(float(row[name])) for row in rows])


def _seconds(rows: list[dict[str, str]], operator: str) -> FloatArray:
    """A blank cell is no number."""
    return np.array([float(row[_median(operator)] or "nan") for row in rows]) / 1e3


def _median(operator: str) -> str:
    return f"time_stats.{operator}.median"
