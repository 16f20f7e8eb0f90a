"""Importers of others' profiling data: each yields a Profile that says whose numbers it holds.

The files stay where they are; docs/importers.md says what is read, assumed and left out."""

from importlib import import_module
from pathlib import Path

from xgpt.core.cluster import Device
from xgpt.core.errors import UnknownNameError, wrong
from xgpt.core.model import ModelSpec
from xprofiler.profile import Profile

# modules of this folder with `import_folder(folder, model, device, dtype)`; those that have tables
# of several engines take `engine` and `version` besides
IMPORTERS = ("vidur", "aiconfigurator")
WITH_ENGINES = ("aiconfigurator",)


def import_folder(source: str, folder: Path, model: ModelSpec, device: Device, dtype: str, *,
                  engine: str | None = None, version: str | None = None) -> Profile:
    """The Profile of `source`'s tables in `folder`. `engine`, `version`: whose of them, where it
    has several; None: vLLM's, and the newest that is there. Raises UnknownNameError for another
    source, InputError listing what is there where the folder has no tables for this model, device
    and engine, and for an engine where the source has but one."""
    if source not in IMPORTERS:
        raise UnknownNameError("source of profiles", source, IMPORTERS)
    importer = import_module(f"{__name__}.{source}")
    of = {} if source not in WITH_ENGINES else {"engine": engine, "version": version}
    for option, value in (("--engine", engine), ("--engine-version", version)):
        if value is not None and not of:
            raise wrong("command line", option, value,
                        f"nothing: the tables of {source} are of one engine")
    profile: Profile = importer.import_folder(folder, model, device, dtype, **of)
    return profile
