"""DistServe's fitted coefficients (Zhong et al., OSDI 2024): milliseconds of the whole model.

    prefill step = a + b sum(tokens) + c sum(tokens^2)         over the queries encoded together
    decode step  = a' + b' sum(context tokens) + c' queries    two fits: below a batch, from it on

A profile has one LAYER_REST for both phases, by rows; theirs differ at equal rows. Let D(x) be the
decode step of x queries without context, and L the layers. With

    L LAYER_REST(x)             = min(a, min over q >= x of D(q))
    L ENCODE_ATTENTION(n)       = b n + c n^2
    L DECODE_ATTENTION(q, y)    = D(q) - L LAYER_REST(q) + b' q y

and nothing for embedding, head, messages and steps (theirs contain them), decode is exact, and
prefill is exact from the rows on at which D reaches a. Where it falls short, and what happens just
above the batch at which the fits change (times only grow with size here): docs/importers.md."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from xgpt.core import catalog
from xgpt.core.cluster import Device
from xgpt.core.errors import wrong
from xgpt.core.lengths import FloatArray
from xgpt.core.model import ModelSpec, refuse_tp_degree
from xprofiler.importers.draft import (
    MAX_QUERIES,
    MAX_TOKENS,
    Fault,
    ProfileDraft,
    Source,
    fail,
    free,
)
from xprofiler.profile import ALL_REDUCE, Profile, Sample, TableKey
from xprofiler.timing import Operator

SOURCE = Source(name="DistServe", kernels="distserve", commit="82831f1", date="2025-04-06",
                libraries="not recorded")
DEVICE = "A100-80"
_MS = 1e-3
_FITS = ("prefill", "decoding_smallbs", "decoding_largebs")
_THRESHOLD = "decoding_large_small_bs_threshold"
_MAX_BYTES = 2.0**40
_CHORD_TOKENS = 128  # c n^2 between points this far apart is off by c 64^2 at most
_SHORT = (1, 8, 16, 32, 64)  # tokens below the first of those


class Line(NamedTuple):
    """Coefficients in seconds: `fixed_s`, and per token and per third quantity (prefill: squared
    tokens of a query; decode: queries)."""

    fixed_s: float
    per_token_s: float
    per_other_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """One model at one degree. Decode batches from `threshold` on follow `decode_large`."""

    prefill: Line
    decode_small: Line
    decode_large: Line
    threshold: int

    def decode_s(self, queries: float, context: float) -> float:
        """One step of the whole model, `queries` at `context` tokens each."""
        a, b, c = self.decode_small if queries < self.threshold else self.decode_large
        return a + b * queries * context + c * queries

    def refusal(self) -> str | None:
        """Why this fit is no time that grows with work, or None."""
        for name, line in (("prefill", self.prefill), ("decode", self.decode_small),
                           ("decode", self.decode_large)):
            for field, value in zip(Line._fields, line, strict=True):
                if value < 0:
                    return (f"DistServe's fit of {name} has a negative coefficient "
                            f"({field.removesuffix('_s')}: {value * 1e3:.3g} ms)")
        return None


def read_coefficients(path: Path) -> dict[str, dict[int, Fit]]:
    """{model: {degree: fit}} of a file. Raises InputError naming every fault."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as cause:
        raise wrong(path, "file", None, f"a readable JSON file: {cause}") from None
    faults: list[Fault] = []
    fits_of: dict[str, dict[int, Fit]] = {}
    for model, of_degree in _items(raw, "file", "{model: {degree: fits}}", faults):
        for degree, fits in _items(of_degree, model, "{degree: fits}", faults):
            fit = _fit(f"{model}.{degree}", fits, faults)
            if not degree.isdigit() or int(degree) < 1:
                faults.append(Fault(None, f"{model}.{degree}", None, "a degree of 1 or more"))
            elif fit is not None:
                fits_of.setdefault(model, {})[int(degree)] = fit
    fail(path, faults)
    if not fits_of:
        raise wrong(path, "file", None, "at least one model; the file is empty")
    return fits_of


def import_profile(model: ModelSpec, device: Device, dtype: str, *, path: Path,
                   links: Sequence[str] = ()) -> Profile:
    """A Profile of one file's coefficients for `model`, by its Hub name. `links`: xgpt's names of
    links within a node, over which an all-reduce then costs nothing: the fits contain it. Raises
    InputError for other devices and models."""
    SOURCE.check(path, model, dtype)
    fits_of = read_coefficients(path)
    name = model.hub_id or model.name
    faults = []
    if device.name != DEVICE:
        faults.append(Fault(None, "device", device.name, f"the fits are of {DEVICE}"))
    if name not in fits_of:
        faults.append(Fault(None, "model", name, f"one of {', '.join(fits_of)}"))
    fail(path, faults)
    draft = ProfileDraft(model, device, dtype)
    for degree, fit in sorted(fits_of[name].items()):
        if not draft.refuse(degree, refuse_tp_degree(model, degree) or fit.refusal()):
            _add_fit(draft, fit, degree, model)
            if degree > 1:
                draft.tables.update({TableKey(ALL_REDUCE, degree, link): free(_MAX_BYTES)
                                     for link in links})
    if not draft.degrees:
        fail(path, [Fault(None, f"{name}.{d}", None, why) for d, why in draft.refused.items()])
    draft.add_overhead(0.0)
    draft.notes.append("fits of whole steps: embedding, head, all-reduces and the host's part "
                       "are within the layers")
    return draft.profile(SOURCE, f"{name} by {path.name}")


def import_folder(folder: Path, model: ModelSpec, device: Device, dtype: str) -> Profile:
    """The Profile of DistServe's own fits in its profile data; its links are what joins such
    devices in the catalog's clusters."""
    path = folder / "profiler-a100-80g.distserve.json"
    if not path.is_file():
        there = ", ".join(sorted(p.name for p in folder.glob("profiler-*.json"))) or "none"
        raise wrong(folder, "file", path.name, f"profiler-*.json there: {there}")
    clusters = [catalog.cluster(name) for name in catalog.names("cluster")]
    links = sorted({c.intra_link.name for c in clusters if c.device.name == device.name})
    return import_profile(model, device, dtype, path=path, links=links)


def _add_fit(draft: ProfileDraft, fit: Fit, degree: int, model: ModelSpec) -> None:
    layers = model.num_layers
    queries = _query_grid(fit)
    alone = np.array([fit.decode_s(q, 0) for q in queries])
    least_from = np.minimum.accumulate(alone[::-1])[::-1]
    rest = np.minimum(fit.prefill.fixed_s, least_from)
    rows = [*zip(queries, rest, strict=True), (MAX_TOKENS, rest[-1])]
    draft.add(Operator.LAYER_REST, degree, [Sample(x=x, samples_s=(s / layers,)) for x, s in rows])
    positions = model.max_positions or MAX_TOKENS
    _, b, c = fit.prefill
    draft.add(Operator.ENCODE_ATTENTION, degree, [
        Sample(x=n, y=1, samples_s=((b * n + c * n * n) / layers,))
        for n in (*_SHORT, *range(_CHORD_TOKENS, positions, _CHORD_TOKENS), positions)])
    decoding: list[Sample] = []
    for y in (0, positions):
        # where the second fit starts below the first, times are held: a mean of both would be
        # wrong on either side
        left = np.maximum.accumulate([fit.decode_s(q, y) for q in queries] - rest)
        decoding += [Sample(x=q, y=y, samples_s=(float(s) / layers,))
                     for q, s in zip(queries, left, strict=True)]
    draft.add(Operator.DECODE_ATTENTION, degree, decoding)
    draft.tables[TableKey(Operator.EMBED.value, degree)] = free(MAX_TOKENS)
    draft.tables[TableKey(Operator.HEAD.value, degree)] = free(MAX_QUERIES)
    draft.tables[TableKey(Operator.KV_COMPACTION.value, degree)] = free(MAX_TOKENS)


def _query_grid(fit: Fit) -> FloatArray:
    """Batches between whose neighbours both LAYER_REST and D are lines: where the fits change, and
    where D passes the prefill's fixed time. Close together above the change, where what is lifted
    to the time below it ends."""
    edge = fit.threshold
    grid = {1.0, *np.arange(edge - 1, 2 * edge), float(MAX_QUERIES)}
    for line in (fit.decode_small, fit.decode_large):
        if line.per_other_s > 0:
            grid.add((fit.prefill.fixed_s - line.fixed_s) / line.per_other_s)
    return np.array(sorted(q for q in grid if 1 <= q <= MAX_QUERIES))


def _items(raw: object, key: str, allowed: str, faults: list[Fault]) -> list[tuple[str, Any]]:
    if not isinstance(raw, dict):
        faults.append(Fault(None, key, raw, allowed))
        return []
    return list(raw.items())


def _fit(key: str, raw: object, faults: list[Fault]) -> Fit | None:
    known = (*_FITS, _THRESHOLD)
    fits = dict(_items(raw, key, f"the fits {', '.join(known)}", faults))
    bad = [Fault(None, f"{key}.{name}", None, "missing") for name in known if name not in fits]
    bad += [Fault(None, f"{key}.{name}", fits[name], f"unknown; known: {', '.join(known)}")
            for name in fits if name not in known]
    bad += [Fault(None, f"{key}.{name}", fits[name], "three numbers (milliseconds)")
            for name in _FITS if name in fits and not _is_line(fits[name])]
    threshold = fits.get(_THRESHOLD, 2)
    if type(threshold) is not int or threshold < 2:
        bad.append(Fault(None, f"{key}.{_THRESHOLD}", threshold, "a batch of 2 or more"))
    faults += bad
    if bad or not fits:
        return None
    prefill, small, large = (Line(*(value * _MS for value in fits[name])) for name in _FITS)
    return Fit(prefill=prefill, decode_small=small, decode_large=large, threshold=threshold)


def _is_line(raw: object) -> bool:
    return isinstance(raw, list) and len(raw) == 3 and all(
        isinstance(v, (int, float)) and not isinstance(v, bool) and math.isfinite(v) for v in raw)
