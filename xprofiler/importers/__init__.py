"""Importers of others' profiling data as Profiles; anybody who may import xprofiler may call
`import_folder`. docs/profile.md says what is read and left out."""

from importlib import import_module
from pathlib import Path

from xgpt.core.cluster import Device
from xgpt.core.errors import UnknownNameError
from xgpt.core.model import ModelSpec
from xprofiler.profile import Profile

# modules of this folder with `import_folder(folder, model, device, dtype, *, engine, version)`
IMPORTERS = ("aiconfigurator", "flexgen")


def import_folder(source: str, folder: Path, model: ModelSpec, device: Device, dtype: str, *,
                  engine: str | None = None, version: str | None = None) -> Profile:
    """The Profile made of `source`'s tables in `folder`.

    `engine`, `version`: which tables to read (default: vLLM, the newest version found). Raises
    UnknownNameError for an unknown source, and InputError, which lists what the folder has, where
    it has no tables for this model, device and engine."""
    if source not in IMPORTERS:
        raise UnknownNameError("source of profiles", source, IMPORTERS)
    imported: Profile = import_module(f"{__name__}.{source}").import_folder(
        folder, model, device, dtype, engine=engine, version=version)
    return imported
