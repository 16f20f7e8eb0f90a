"""Reads the constants of FlexGen's cost model (arXiv:2303.06865, appendix A.3): rates of one
machine, which its authors fitted to their own runs (FMInference/FlexLLMGen, Apache-2.0). The file
`flexgen.json` holds them by their names there: bandwidths in GiB/s, operations in TFLOP/s.

`ctog_bdw_cache` (entries from host to device) and `gpu_bdw` (device memory) are not among theirs.
Embedding, output head, sampling and a step's overhead take no time, as in their model. The slower
host attention of few requests or small models (c1, c2, c3: some per cent) is left out."""

import json
from pathlib import Path

import numpy as np

from xgpt.core.cluster import Device
from xgpt.core.errors import wrong
from xgpt.core.model import ModelSpec, active_layer_params
from xgpt.core.placement import layer_tensors
from xprofiler.importers.draft import (
    MAX_QUERIES,
    MAX_ROWS,
    MAX_TOKENS,
    Fault,
    ProfileDraft,
    Source,
    fail,
    samples_at,
)
from xprofiler.profile import COPY, STEP_OVERHEAD, Profile, TableKey
from xprofiler.timing import Operator

FILE = "flexgen.json"
GIB, TERA = 2.0**30, 1e12
# constant and factor of each copy (TimingFacts.copy_rates). Weights are read from disk at 0.95 of
# its rate while decoding, as the released code has it.
_COPIES = {
    "weights-host-up": ("ctog_bdw", 1.0), "hidden-host-up": ("ctog_bdw", 1.0),
    "kv-host-up": ("ctog_bdw_cache", 1.0), "hidden-host-down": ("gtoc_bdw_hidden", 1.0),
    "kv-host-down": ("gtoc_bdw_cache", 1.0), "kv-disk-up": ("dtoc_bdw", 1.0),
    "weights-disk-up": ("dtoc_bdw", 1.0), "weights-disk-up-decode": ("dtoc_bdw", 0.95),
    "kv-disk-down-encode": ("ctod_bdw_cache_p", 1.0), "kv-disk-down-decode": ("ctod_bdw_g", 1.0)}
_PRODUCTS = {Operator.LAYER_REST: "mm_flops_p", Operator.DECODE_REST: "mm_flops_g"}
_ATTENTION = {Operator.DECODE_ATTENTION: "bmm_flops_g", Operator.HOST_ATTENTION: "cpu_flops"}
_RATES = ("gpu_bdw", "bmm_flops_p", *dict.fromkeys(key for key, _ in _COPIES.values()),
          *_PRODUCTS.values(), *_ATTENTION.values())


def import_folder(folder: Path, model: ModelSpec, device: Device, dtype: str, *,
                  engine: str | None = None, version: str | None = None) -> Profile:
    """The Profile of a model by the constants in `folder`. Raises InputError for a file that lacks
    one, a dtype that has not 16 bits, an encoder-decoder model, and an engine or version."""
    for option, value in (("--engine", engine), ("--engine-version", version)):
        if value is not None:
            raise wrong("command line", option, value, "none: the constants are of no engine")
    path = folder / FILE
    constants = _read(path)
    source = Source("FlexGen", "FlexGen's cost model", "004ffef", "", "")
    source.check(path, model, dtype)
    draft, hidden = ProfileDraft(model, device, dtype), model.num_heads * model.head_dim
    flops, layer_bytes = (2.0 * active_layer_params(model),
                          2.0 * sum(tensor.elements for tensor in layer_tensors(model)))
    floor_s = layer_bytes / (constants["gpu_bdw"] * GIB)
    for operator, key in _PRODUCTS.items():
        of_row = flops / (constants[key] * TERA)
        rows = np.array(sorted({1.0, max(floor_s / of_row, 1.0), float(MAX_ROWS)}))
        draft.add(operator, 1, samples_at(rows, np.maximum(rows * of_row, floor_s)))
    ends = np.array([1.0, MAX_TOKENS])
    x, y = (axis.ravel() for axis in np.meshgrid([1.0, MAX_QUERIES], ends))
    draft.add(Operator.ENCODE_ATTENTION, 1, samples_at(
        ends, 4 * ends**2 * hidden / (constants["bmm_flops_p"] * TERA)))
    for operator, key in _ATTENTION.items():
        draft.add(operator, 1, samples_at(x, 4 * x * y * hidden / (constants[key] * TERA), y))
    for operator in (Operator.EMBED, Operator.HEAD, Operator.KV_COMPACTION):
        draft.add(operator, 1, samples_at([1.0, MAX_ROWS], [0.0, 0.0]))
    draft.tables[TableKey(STEP_OVERHEAD)] = tuple(samples_at([0.0], [0.0]))
    for name, (key, share) in _COPIES.items():
        draft.tables[TableKey(COPY, 1, name)] = tuple(samples_at(
            [GIB], [1 / (constants[key] * share)]))
    return draft.profile(source, f"constants of {constants.get('machine', path.name)}")


def _read(path: Path) -> dict[str, float]:
    """The constants by name. Raises InputError, which names every key at fault."""
    try:
        raw = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as cause:
        raise wrong(path, "file", None, f"a readable JSON file of constants: {cause}") from None
    if not isinstance(raw, dict):
        raise wrong(path, "file", None, "an object of constants by name")
    fail(path, [Fault(None, key, raw.get(key), "a number above 0 (GiB/s or TFLOP/s)")
                for key in _RATES
                if not (isinstance(raw.get(key), (int, float)) and raw[key] > 0)])
    return raw
