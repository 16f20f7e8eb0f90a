"""Importers of others' profiling data: each yields a Profile that says whose numbers it holds.

The files stay where they are; docs/importers.md says what is read, assumed and left out."""

from importlib import import_module
from pathlib import Path

from xgpt.core.cluster import Device
from xgpt.core.errors import UnknownNameError
from xgpt.core.model import ModelSpec
from xprofiler.profile import Profile

# modules of this folder with `import_folder(folder, model, device, dtype, *, engine, version)`
IMPORTERS = ("aiconfigurator",)


def import_folder(source: str, folder: Path, model: ModelSpec, device: Device, dtype: str, *,
                  engine: str | None = None, version: str | None = None) -> Profile:
    """The Profile of `source`'s tables in `folder`. `engine`, `version`: whose of them; None:
    vLLM's, and the newest that is there. Raises UnknownNameError for another source, InputError
    listing what is there where the folder has no tables for this model, device and engine."""
    if source not in IMPORTERS:
        raise UnknownNameError("source of profiles", source, IMPORTERS)
    imported: Profile = import_module(f"{__name__}.{source}").import_folder(
        folder, model, device, dtype, engine=engine, version=version)
    return imported
