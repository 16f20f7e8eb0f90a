"""The roofline's constants for an engine on a generation of GPUs (catalog/engines.yaml).

A row says what its engine does otherwise than the common constants (xprofiler.constants): how near
its kernels come to the peaks, what launches cost it, which all-reduce it has. Rows are fitted by
benchmarks/fit_engines.py. A generation that an engine was never measured on takes the constants of
the nearest one that it was; shares of a peak carry over better than seconds do."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from xgpt.core import catalog
from xgpt.core.cluster import Device
from xgpt.core.engines import OWN_ENGINE
from xprofiler.constants import BY_KIND, RooflineConstants
from xprofiler.source_errors import UNCALIBRATED, SourceErrors, errors_from

LINK_FIELDS = ("nvlink", "pcie", "pcie_peer", "network")
# Which measured generation stands in for another, the nearest first.
_NEAREST = {
    "volta": ("turing", "ampere", "ada", "hopper", "blackwell"),
    "turing": ("volta", "ampere", "ada", "hopper", "blackwell"),
    "ampere": ("ada", "turing", "volta", "hopper", "blackwell"),
    "ada": ("ampere", "hopper", "turing", "volta", "blackwell"),
    "hopper": ("blackwell", "ada", "ampere", "turing", "volta"),
    "blackwell": ("hopper", "ada", "ampere", "turing", "volta")}


def engine_constants(device: Device, engine: str = OWN_ENGINE) -> RooflineConstants:
    """Constants of `engine` on `device`; those of its kind where the engine's row has none.
    Raises UnknownNameError."""
    base = BY_KIND[device.kind]
    if device.kind != "gpu":
        return base
    for name in _with_those_it_is_like(engine):
        constants = catalog.engine(name).constants
        generation = _nearest(device.generation, constants)
        if generation is not None:
            base = changed(base, constants[generation])
    return base


def engine_errors(device: Device, engine: str = OWN_ENGINE) -> SourceErrors:
    """How far off what is computed with these constants is: the errors of the engine's own row, or
    of the one that it is like. Raises UnknownNameError."""
    rows = [row for name in _with_those_it_is_like(engine)
            if (row := catalog.engine(name)).errors]
    if device.kind != "gpu" or not rows:
        return UNCALIBRATED
    generation = _nearest(device.generation, rows[-1].errors)
    if generation is None:
        return UNCALIBRATED
    return errors_from(rows[-1].errors[generation], f"{rows[-1].name} on {generation}",
                       is_carried=generation != device.generation)


def changed(constants: RooflineConstants, row: Mapping[str, Any]) -> RooflineConstants:
    """`constants` with the fields of a row of the catalog put in; values by degree are mappings
    there, those of a link mappings of its fields."""
    values: dict[str, Any] = {}
    for name, value in row.items():
        if name in LINK_FIELDS:
            own = {key: _plain(part) for key, part in value.items()}
            values[name] = replace(getattr(constants, name), **own)
        else:
            values[name] = _plain(value)
    return replace(constants, **values)


def _nearest(generation: str, rows: Mapping[str, Any]) -> str | None:
    """The generation among the rows that stands in for this one: itself, if it is there."""
    return next((g for g in (generation, *_NEAREST.get(generation, ())) if g in rows), None)


def _with_those_it_is_like(engine: str) -> list[str]:
    """Names of the rows whose constants hold, the engine's own last."""
    found: list[str] = []
    name: str | None = engine
    while name is not None:
        assert name not in found, f"{engine}: rows that are like each other: {found}"
        found.insert(0, name)
        name = catalog.engine(name).like
    return found


def _plain(value: Any) -> Any:
    """A mapping by degree as pairs; a number as it is."""
    return tuple(sorted(value.items())) if isinstance(value, Mapping) else value
