"""aiconfigurator's kernel tables (ai-dynamo/aiconfigurator): one call of one kernel of an inference
engine, in milliseconds, by its sizes.

    <system>_<framework>_<version>_{gemm,context_attention,generation_attention,custom_allreduce}.csv
    <system>_nccl_<version>.csv"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from xgpt.core.cluster import Device
from xgpt.core.errors import wrong
from xgpt.core.model import ModelSpec, refuse_tp_degree
from xprofiler.importers import kernel_tables
from xprofiler.importers.draft import OPERATORS, ProfileDraft, Source, samples_at
from xprofiler.importers.kernel_tables import AllReduceTable, AttentionTable, GemmTimes
from xprofiler.importers.table import Fault, fail
from xprofiler.profile import ALL_REDUCE, Profile, Sample, TableKey
from xprofiler.timing import Operator
from xprofiler.work import floor_s, work

COMMIT, DATE = "095f58a51", "2026-08-21"
SYSTEMS = {"a100_sxm": "A100-80", "h100_sxm": "H100", "h200_sxm": "H200"}
# Versions whose columns these readers were written for.
VERSIONS = {"vllm": ("0.14.0", "0.19.0"), "trtllm": ("1.0.0", "1.2.0rc5")}
ENGINES = {"vllm": "vllm", "trtllm": "tensorrt-llm"}  # the catalog's names
TABLES = ("gemm", "context_attention", "generation_attention", "custom_allreduce")
LINKS = {"A100-80": "nvlink3", "H100": "nvlink4", "H200": "nvlink4"}
DEGREES = (1, 2, 4, 8)
_BEYOND_PEAK = 1.05  # quicker than the data sheet's peaks allow by more: no time of this kernel


class Origin(NamedTuple):
    """What a file's name says."""

    system: str
    framework: str
    version: str
    table: str


def parse_name(path: Path) -> Origin:
    """Raises InputError for a system, framework, version or table that is not known."""
    match = re.fullmatch(r"([a-z0-9]+_[a-z]+)_([a-z]+)_([^_]+)_([a-z_]+)\.csv", path.name)
    if match is None:
        raise wrong(path, "file name", path.name, "<system>_<framework>_<version>_<table>.csv")
    origin = Origin(*match.groups())
    versions = VERSIONS.get(origin.framework, (origin.version,))  # of another: that is told
    fail(path, [Fault(None, key, value, f"{of}one of {', '.join(known)}")
                for key, value, of, known in (
                    ("system", origin.system, "", SYSTEMS),
                    ("framework", origin.framework, "", VERSIONS),
                    ("version", origin.version, f"of {origin.framework}, ", versions),
                    ("table", origin.table, "", TABLES)) if value not in known])
    return origin


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFiles:
    """One framework's tables. `all_reduce`: the framework's own, or NCCL's."""

    gemm: Path
    context_attention: Path | None = None
    generation_attention: Path | None = None
    all_reduce: Path | None = None


def import_profile(model: ModelSpec, device: Device, dtype: str, files: KernelFiles, *,
                   link: str | None = None) -> Profile:
    """A Profile of one framework's tables. `link`: xgpt's name for what joins ranks within a node;
    without it the all-reduces are left out. Raises InputError for files that are no such tables, of
    another device or of another engine than the matrix products, and where no degree has its
    attention heads in them."""
    origin = parse_name(files.gemm)
    _check_same_engine(origin, files)
    source = Source(name="aiconfigurator", kernels=f"aiconfigurator {origin.framework}",
                    commit=COMMIT, date=DATE, libraries=f"{origin.framework} {origin.version}")
    source.check(files.gemm, model, dtype)
    if SYSTEMS[origin.system] != device.name:
        raise wrong(files.gemm, "device", device.name,
                    f"{SYSTEMS[origin.system]}: the table is of {origin.system}")
    draft = ProfileDraft(model, device, dtype, ENGINES[origin.framework])
    times = GemmTimes(kernel_tables.read_gemm(files.gemm))
    degrees = [d for d in DEGREES if not draft.refuse(d, refuse_tp_degree(model, d))]
    for degree in degrees:
        _add_products(draft, times, model, degree)
    if files.context_attention is not None:
        _add_attention(draft, kernel_tables.read_context_attention(files.context_attention), model,
                       Operator.ENCODE_ATTENTION)
    if files.generation_attention is not None:
        cached = kernel_tables.read_generation_attention(files.generation_attention)
        _add_attention(draft, cached, model, Operator.DECODE_ATTENTION)
    if files.all_reduce is not None and link is not None:
        read = (kernel_tables.read_nccl_all_reduce if "_nccl_" in files.all_reduce.name
                else kernel_tables.read_custom_all_reduce)
        _add_all_reduce(draft, read(files.all_reduce), link)
    if not draft.degrees:
        fail(files.gemm, [Fault(None, f"tensor-parallel degree {d}", None, why)
                          for d, why in sorted(draft.refused.items())])
    draft.notes.append("products between the measured m, n, k by the logarithms of time and size; "
                       "norms, rotary embedding, activation, residual adds and sampling from the "
                       "analytic roofline")
    draft.fill_from_roofline()
    return draft.profile(source, f"{origin.system} {origin.framework} {origin.version}")


def import_folder(folder: Path, model: ModelSpec, device: Device, dtype: str, *,
                  engine: str | None = None, version: str | None = None) -> Profile:
    """The Profile of an engine's tables for this device: of vLLM's and the newest version read
    here, if none is named. Raises InputError for an engine, a version or a device that is none of
    those, and where the folder has no such tables."""
    gemm = _products_of(folder, device, engine or "vllm", version)

    def beside(table: str) -> Path | None:
        path = gemm.with_name(gemm.name.replace("_gemm.csv", f"_{table}.csv"))
        return path if path.is_file() else None

    system = parse_name(gemm).system
    files = KernelFiles(
        gemm=gemm, context_attention=beside("context_attention"),
        generation_attention=beside("generation_attention"),
        all_reduce=beside("custom_allreduce") or next(iter(sorted(
            folder.glob(f"{system}_nccl_*.csv"))), None))
    return import_profile(model, device, dtype, files, link=LINKS[device.name])


def _products_of(folder: Path, device: Device, engine: str, version: str | None) -> Path:
    """The engine's products on this device, of `version` or the newest that is there."""
    framework = next((name for name, known in ENGINES.items() if known == engine), None)
    if framework is None:
        raise wrong("command line", "--engine", engine, f"one of {', '.join(ENGINES.values())}")
    known = VERSIONS[framework]
    if version is not None and version not in known:
        raise wrong("command line", "--engine-version", version,
                    f"of {engine}, one of {', '.join(known)}")
    system = next((system for system, name in SYSTEMS.items() if name == device.name), None)
    if system is None:
        raise wrong(folder, "device", device.name, f"one of {', '.join(SYSTEMS.values())}")
    wanted = known if version is None else (version,)
    found = [path for one in wanted
             if (path := folder / f"{system}_{framework}_{one}_gemm.csv").is_file()]
    if not found:
        there = ", ".join(sorted(p.name for p in folder.glob("*_gemm.csv"))) or "none"
        raise wrong(folder, "tables", f"{system}_{framework}",
                    f"versions {', '.join(wanted)}; there are: {there}")
    return found[-1]


def layer_products(model: ModelSpec, degree: int) -> list[tuple[float, float]]:
    """(n, k) of one rank's products in one layer: query, key and value together; output; up (with
    gate); down."""
    hidden, width = model.hidden_size, model.num_heads * model.head_dim / degree
    inner = model.intermediate_size / degree
    return [(width + model.kv_elements_per_token_layer / degree, hidden), (hidden, width),
            (inner * (2 if model.is_gated_mlp else 1), hidden), (hidden, inner)]


def _add_products(draft: ProfileDraft, times: GemmTimes, model: ModelSpec, degree: int) -> None:
    """LAYER_REST and HEAD: measured products, and what the roofline has besides products."""
    head = [(-(-model.vocab_size // degree), model.hidden_size)]
    for operator, products in ((Operator.LAYER_REST, layer_products(model, degree)),
                               (Operator.HEAD, head)):
        roofline = draft.roofline.operator_s(operator, times.rows, tp_degree=degree)
        for n, k in products:
            roofline = roofline - draft.roofline.kernels.gemm_s(times.rows, n, k)
        seconds = np.maximum(roofline, 0.0) + sum(times(times.rows, n, k) for n, k in products)
        draft.add(operator, degree, samples_at(times.rows, seconds))


def _add_attention(draft: ProfileDraft, table: AttentionTable, model: ModelSpec,
                   operator: Operator) -> None:
    """Each degree whose heads of one GPU were measured gets a table; the others are refused."""
    beyond_peak = []
    for degree in draft.degrees:
        heads = (model.num_heads // degree, model.kv_heads // degree, model.head_dim)
        rows = ((table.num_heads == heads[0]) & (table.kv_heads == heads[1])
                & (table.head_dim == heads[2]))
        if not rows.any():
            draft.refuse(degree, f"{table.path.name} lacks attention of {heads[0]} heads and "
                                 f"{heads[1]} key-value heads of {heads[2]}; "
                                 f"{_geometries(table, heads[0])}")
            for of in OPERATORS:
                draft.tables.pop(TableKey(of.value, degree), None)
            continue
        queries, tokens, seconds = table.queries[rows], table.tokens[rows], table.seconds[rows]
        is_encode = operator is Operator.ENCODE_ATTENTION
        x, y = (tokens, queries) if is_encode else (queries, tokens)
        share_s = seconds / queries if is_encode else seconds
        least = work(model, operator, x, y, tp_degree=degree,
                     item_bytes=kernel_tables.ELEMENT_BYTES)
        beyond = int((floor_s(least, draft.peaks) > _BEYOND_PEAK * share_s).sum())
        if beyond:
            beyond_peak.append(f"{beyond} of {rows.sum()} at tp {degree}")
            continue
        calm = draft.calm(operator, samples_at(x, share_s, y))
        draft.add(operator, degree, calm if is_encode else _completed(calm))
    if beyond_peak:
        draft.notes.append(f"{operator.value} not taken where points are quicker than the "
                           f"device's peaks allow ({', '.join(beyond_peak)})")


def _completed(table: list[Sample]) -> list[Sample]:
    """Decode attention on the whole grid: large batches were measured at short contexts alone. At
    such sizes the cache's bytes decide, so a batch takes as many times the longest one measured at
    that context as it has times its queries."""
    at = {(p.x, p.y): p for p in table}
    batches, contexts = sorted({p.x for p in table}), sorted({p.y for p in table})
    added = []
    for context in contexts:
        largest = max(x for x in batches if (x, context) in at)
        measured = at[largest, context]
        added += [Sample(x=x, y=context, samples_s=tuple(
            s * x / largest for s in measured.samples_s)) for x in batches if x > largest]
    return [*table, *added]


def _add_all_reduce(draft: ProfileDraft, table: AllReduceTable, link: str) -> None:
    """What ranks of this engine wait for each other is added, where its whole runs show any: the
    kernel was timed with all ranks ready. Of kernels launched singly and from a CUDA graph, the
    graph's are taken."""
    wanted = np.char.endswith(table.kernel, "_graph") | ~(table.kernel != "").any()
    for degree in draft.degrees:
        rows = wanted & (table.ranks == degree)
        if rows.any():
            skew_s = draft.roofline.links.synchronisation_s(degree)
            draft.add_messages(TableKey(ALL_REDUCE, degree, link), samples_at(
                table.num_bytes[rows], table.seconds[rows] + skew_s))
    if any(key.name == ALL_REDUCE for key in draft.tables):
        draft.notes.append("all_reduce with the skew of this engine's ranks added")


def _check_same_engine(origin: Origin, files: KernelFiles) -> None:
    for path in (files.context_attention, files.generation_attention, files.all_reduce):
        if path is not None and "_nccl_" not in path.name:
            theirs = parse_name(path)
            if theirs[:3] != origin[:3]:
                raise wrong(path, "engine", " ".join(theirs[:3]),
                            f"that of the products: {' '.join(origin[:3])}")


def _geometries(table: AttentionTable, num_heads: int) -> str:
    """A sentence says what was measured of `num_heads`, or else of which heads anything was."""
    of_heads = table.num_heads == num_heads
    measured = zip(table.kv_heads[of_heads].tolist(), table.head_dim[of_heads].tolist(),
                   strict=True)
    pairs = ", ".join(f"{kv} of {dim}" for kv, dim in sorted(set(measured)))
    if pairs:
        return f"with {num_heads} heads it has key-value heads: {pairs}"
    return f"it has heads: {', '.join(str(h) for h in np.unique(table.num_heads))}"
