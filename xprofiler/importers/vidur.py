"""Vidur's profiling tables (Agrawal et al., MLSys 2024): one layer's operators by tokens and
degree, attention kernels, collectives. Medians of float16 kernels, in milliseconds.

    compute/<gpu>/<org>/<model>/mlp.csv    network/<node>/{all_reduce,send_recv}.csv
    history/<gpu>_attention_*.csv          (the tree's older attention tables)"""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xgpt.core.cluster import Device
from xgpt.core.errors import wrong
from xgpt.core.lengths import FloatArray, IntArray
from xgpt.core.model import ModelSpec, refuse_tp_degree
from xprofiler.importers.draft import (
    Column,
    Fault,
    ProfileDraft,
    Source,
    fail,
    grouped_messages,
    one_value,
    read_table,
    samples_at,
)
from xprofiler.profile import ALL_REDUCE, TRANSFER, Profile, TableKey
from xprofiler.timing import Operator

SOURCE = Source(name="Vidur", kernels="vidur", commit="7d47513", date="2024-11-19",
                libraries="not recorded")

GEMMS = ("attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj")
_NORMS = ("input_layernorm", "post_attention_layernorm")
ELEMENTWISE = (*_NORMS, "attn_rope", "mlp_act", "add")
ADDS_PER_LAYER = 2  # recorded once, done after attention and after the MLP
_STATS = r"|time_stats\..*\.(min|max|mean|std)"
# Attention's own time: the kernel and what brings its operands into place.
_AROUND_ATTENTION = ("attn_input_reshape", "attn_output_reshape", "attn_kv_cache_save")


class LayerShape(NamedTuple):
    """The shape of the whole model's layer, not of a shard's, in Vidur's names."""

    n_head: int
    n_kv_head: int
    n_embd: int
    n_expanded_embd: int
    use_gated_mlp: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MlpTable:
    """Medians of one layer's operators but attention. Rows may repeat (tokens, tp_degree).
    `seconds` by operator [rows]; a layer with one norm lacks `post_attention_layernorm`."""

    path: Path
    shape: LayerShape
    tokens: IntArray
    tp_degree: IntArray
    seconds: Mapping[str, FloatArray]
    num_empty: int = 0  # rows of no tokens, left out


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MessageTable:
    """Medians of one collective or message [rows], one row for each (ranks, ranks of a node,
    bytes). `ranks_per_node` below `ranks`: it went between nodes."""

    num_bytes: IntArray
    ranks: IntArray
    ranks_per_node: IntArray
    seconds: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionMedians:
    """Medians of attention in one layer [rows]. Prefill: one query of `new_tokens` with
    `cached_tokens` before them; decode: `queries` of one token at `cached_tokens` each."""

    n_embd: int
    n_head: int
    n_kv_head: int
    tp_degree: IntArray
    is_prefill: NDArray[np.bool_]
    queries: IntArray
    new_tokens: IntArray
    cached_tokens: IntArray
    seconds: FloatArray


def read_mlp(path: Path) -> MlpTable:
    """Raises InputError for a file that is no such table."""
    operators = ("emb", *GEMMS, *ELEMENTWISE)
    shape = [Column(name, "count", least=1) for name in LayerShape._fields[:-1]]
    table = read_table(path, [
        *(Column(_median(op), "ms", may_lack=op == "post_attention_layernorm")
          for op in operators),
        *shape, Column("use_gated_mlp", "flag"),
        Column("num_tokens", "count", least=1, is_work=True),
        Column("num_tensor_parallel_workers", "count", least=1)], "vocab_size" + _STATS)
    return MlpTable(
        path=path, shape=LayerShape(*(one_value(table, name) for name in LayerShape._fields)),
        tokens=table["num_tokens"], tp_degree=table["num_tensor_parallel_workers"],
        seconds={op: table[_median(op)] for op in operators if _median(op) in table},
        num_empty=table.num_empty)


def read_attention(path: Path) -> AttentionMedians:
    """Raises InputError for a file that is no such table."""
    counts = ("n_embd", "n_q_head", "n_kv_head", "num_tensor_parallel_workers", "batch_size")
    table = read_table(path, [
        *(Column(_median(op), "ms", may_blank=True) for op in ("attn_prefill", "attn_decode")),
        *(Column(_median(op), "ms", may_lack=True) for op in _AROUND_ATTENTION),
        *(Column(name, "count", least=1) for name in counts),
        Column("prefill_chunk_size", "count"), Column("kv_cache_size", "count"),
        Column("is_prefill", "flag")],
        "block_size|max_model_len|attention_backend|profile_method" + _STATS)
    is_prefill = table["is_prefill"]
    kernel = np.where(is_prefill, table[_median("attn_prefill")], table[_median("attn_decode")])
    fail(path, [Fault(int(line), _median("attn_prefill" if prefill else "attn_decode"), "",
                      "a time in milliseconds, 0 or more")
                for line, prefill, s in zip(table.lines, is_prefill, kernel, strict=True)
                if np.isnan(s)])
    around = [table[_median(op)] for op in _AROUND_ATTENTION if _median(op) in table]
    return AttentionMedians(
        n_embd=one_value(table, "n_embd"), n_head=one_value(table, "n_q_head"),
        n_kv_head=one_value(table, "n_kv_head"), is_prefill=is_prefill,
        tp_degree=table["num_tensor_parallel_workers"], queries=table["batch_size"],
        new_tokens=table["prefill_chunk_size"], cached_tokens=table["kv_cache_size"],
        seconds=np.sum([kernel, *around], axis=0))


def layer_rest_s(table: MlpTable) -> FloatArray:
    """[rows] one layer without its attention kernel."""
    missing = [op for op in ELEMENTWISE if op not in table.seconds]
    fail(table.path, [Fault(1, _median(op), None, "missing column: xgpt runs no layer without it")
                      for op in missing])
    single = sum(table.seconds[op] for op in (*GEMMS, *_NORMS, "attn_rope", "mlp_act"))
    total: FloatArray = single + ADDS_PER_LAYER * table.seconds["add"]
    return total


@dataclass(frozen=True, slots=True, kw_only=True)
class VidurFiles:
    """Tables of one machine."""

    mlp: Path
    attention: Sequence[Path] = ()
    all_reduce: Path | None = None
    send_recv: Path | None = None


def import_profile(model: ModelSpec, device: Device, dtype: str, files: VidurFiles, *,
                   links: Mapping[str, str] | None = None) -> Profile:
    """A Profile of Vidur's tables. `links`: xgpt's names for what joins ranks within a node
    ("intra") and between nodes ("inter"); tables without a name are left out. Raises InputError
    for files that are no such tables, or tables of another model."""
    SOURCE.check(files.mlp, model, dtype)
    table = read_mlp(files.mlp)
    _check_shape(table, model)
    draft = ProfileDraft(model, device, dtype)
    rest_s = layer_rest_s(table)
    if table.num_empty:
        draft.notes.append(f"{table.num_empty} rows of no tokens left out")
    for degree in (int(d) for d in np.unique(table.tp_degree)):
        if draft.refuse(degree, refuse_tp_degree(model, degree)):
            continue
        rows = table.tp_degree == degree
        draft.add(Operator.LAYER_REST, degree, samples_at(table.tokens[rows], rest_s[rows]))
        draft.add(Operator.EMBED, degree,
                  samples_at(table.tokens[rows], table.seconds["emb"][rows]))
    for path in files.attention:
        _add_attention(draft, read_attention(path), model)
    if files.all_reduce is not None:
        _add_messages(draft, ALL_REDUCE, read_messages(files.all_reduce, "all_reduce"), links or {})
    if files.send_recv is not None:
        _add_messages(draft, TRANSFER, read_messages(files.send_recv, "send_recv"), links or {})
    draft.fill_from_roofline()
    return draft.profile(SOURCE, f"{files.mlp.parent.name}'s layer")


class _Tables(NamedTuple):
    """Where in the data folder a device's tables are, and xgpt's names for its links."""

    gpu: str
    all_reduce: str
    send_recv: str
    links: Mapping[str, str]


# Messages between nodes have no name by default: those machines' network is not a catalog link's.
# The A40 table shows no NVLink between any two cards (64 MiB between two take 17 ms).
PLACES = {
    "A100-80": _Tables("a100", "network/a100_dgx/all_reduce.csv", "network/a100_dgx/send_recv.csv",
                       {"intra": "nvlink3"}),
    "A40": _Tables("a40", "history/a40_all_reduce.csv",
                   "network/a40_pairwise_nvlink/send_recv.csv", {"intra": "pcie4-x16"}),
}


def import_folder(folder: Path, model: ModelSpec, device: Device, dtype: str) -> Profile:
    """The Profile of the tables for this model's layer and this device in Vidur's data folder.
    Raises InputError listing what is there if there are none."""
    place = PLACES.get(device.name)
    if place is None:
        raise wrong(folder, "device", device.name, f"Vidur's tables are of {', '.join(PLACES)}")
    compute = folder / "compute" / place.gpu

    def there(name: str) -> Path | None:
        return folder / name if (folder / name).is_file() else None

    files = VidurFiles(
        mlp=_find_mlp(compute, model),
        attention=sorted((folder / "history").glob(f"{place.gpu}_*attention*.csv")),
        all_reduce=there(place.all_reduce), send_recv=there(place.send_recv))
    return import_profile(model, device, dtype, files, links=place.links)


def _find_mlp(compute: Path, model: ModelSpec) -> Path:
    """The table of the model's own name, else the first by name of one with equal layers."""
    shapes = {path: _peek_shape(path) for path in sorted(compute.glob("*/*/mlp.csv"))}
    equal = [path for path, shape in shapes.items() if shape == _shape_of(model)]
    own = [path for path in equal if f"{path.parent.parent.name}/{path.parent.name}"
           == model.hub_id]
    if not equal:
        known = "; ".join(f"{path.parent.name} {tuple(shape) if shape else '(unreadable)'}"
                          for path, shape in shapes.items())
        raise wrong(compute, "model", model.name, f"a layer of shape {tuple(_shape_of(model))}; "
                    f"there are: {known or 'no tables'}")
    return (own or equal)[0]


def _peek_shape(path: Path) -> LayerShape | None:
    """The first row's shape, or None where it has none (reading the whole file says what is
    wrong)."""
    with path.open(encoding="utf-8", newline="") as file:
        row = next(csv.DictReader(file), None) or {}
    try:
        heads, kv_heads, width, inner = (int(row[name]) for name in LayerShape._fields[:-1])
        return LayerShape(heads, kv_heads, width, inner, row["use_gated_mlp"] == "True")
    except (KeyError, ValueError):
        return None


def _shape_of(model: ModelSpec) -> LayerShape:
    return LayerShape(model.num_heads, model.kv_heads, model.hidden_size,
                      model.intermediate_size, model.is_gated_mlp)


def _check_shape(table: MlpTable, model: ModelSpec) -> None:
    names = ("num_heads", "kv_heads", "hidden_size", "intermediate_size", "is_gated_mlp")
    fail(table.path, [
        Fault(None, key, theirs, f"{model.name} has {name} = {ours}")
        for key, theirs, name, ours in zip(LayerShape._fields, table.shape, names,
                                           _shape_of(model), strict=True) if theirs != ours])


def _add_attention(draft: ProfileDraft, table: AttentionMedians, model: ModelSpec) -> None:
    """Tables for those degrees at which a rank has the heads that were measured."""
    head_dim = table.n_embd // table.n_head
    for theirs in np.unique(table.tp_degree):
        for degree in draft.degrees:
            if (table.n_head * degree, table.n_kv_head * degree, head_dim) != (
                    model.num_heads * theirs, model.kv_heads * theirs, model.head_dim):
                continue
            rows = table.tp_degree == theirs
            alone = rows & table.is_prefill & (table.cached_tokens == 0) & (table.queries == 1)
            decode = rows & ~table.is_prefill
            for operator, of, x, y in (
                    (Operator.ENCODE_ATTENTION, alone, table.new_tokens, table.queries),
                    (Operator.DECODE_ATTENTION, decode, table.queries, table.cached_tokens)):
                if of.any():
                    draft.add(operator, degree, draft.calm(
                        operator, samples_at(x[of], table.seconds[of], y[of])))


def _add_messages(draft: ProfileDraft, name: str, table: MessageTable,
                  links: Mapping[str, str]) -> None:
    crosses = table.ranks_per_node < table.ranks
    for kind, link in links.items():
        assert kind in ("intra", "inter"), f"{kind = }"
        for ranks in np.unique(table.ranks):
            rows = (table.ranks == ranks) & (crosses == (kind == "inter"))
            if rows.any():
                draft.add_messages(TableKey(name, int(ranks) if name == ALL_REDUCE else 1, link),
                                   grouped_messages(table.num_bytes[rows], table.seconds[rows]))


def read_messages(path: Path, collective: str) -> MessageTable:
    """`collective`: all_reduce or send_recv. Raises InputError for a file that is no such table."""
    table = read_table(path, [
        Column(_median(collective), "ms"), Column("size", "count", least=1, is_work=True),
        Column("num_workers", "count", least=2), Column("devices_per_node", "count", least=1),
        Column("collective", "text", allowed=(collective,))],
        "|rank|max_devices_per_node" + _STATS)
    places = np.stack([table[c] for c in ("num_workers", "devices_per_node", "size")])
    unique, row = np.unique(places, axis=1, return_inverse=True)
    # the median of each group of rows (ranks, repeats)
    row = np.ravel(row)
    order = np.argsort(row, kind="stable")
    parts = np.split(table[_median(collective)][order], np.flatnonzero(np.diff(row[order])) + 1)
    return MessageTable(ranks=unique[0], ranks_per_node=unique[1], num_bytes=unique[2],
                        seconds=np.array([np.median(part) for part in parts]))


def _median(operator: str) -> str:
    return f"time_stats.{operator}.median"
