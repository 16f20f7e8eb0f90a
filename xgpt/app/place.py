"""A run as commands about runs are told of it: by its output folder, or by its job file."""

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from xgpt.core.errors import InputError, Mistake, wrong
from xgpt.core.job_file import job_tree, load_job
from xgpt.core.requests_section import absolute
from xgpt.core.sections import Section


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a run writes. `bound_s`: on its latency. `results`, `quote_formulas`: a table of them,
    besides, as a job has it."""

    name: str
    output: Path
    bound_s: float
    results: Path | None = None
    quote_formulas: bool = False


def place_of(where: Path, overrides: Sequence[str] = ()) -> Place:
    """Raises InputError of a job file, for overrides of a folder, and where there is neither."""
    if not where.exists() and where.suffix not in (".yaml", ".yml"):
        raise wrong("command line", "DIR|JOB.yaml", str(where), "no such folder, and no job file")
    if not where.is_dir():
        try:
            job = load_job(where, overrides)
        except InputError as cause:
            if (begun := _begun(where, overrides)) is None:
                raise cause from None
            return begun
        return Place(name=job.name, output=job.output, bound_s=job.constraint.latency_s,
                     results=job.results, quote_formulas=job.quote_formulas)
    if overrides:
        raise InputError([Mistake(file="--set", line=None, key=override.partition("=")[0],
                                  value=None, allowed="goes with a job file, not with a folder")
                          for override in overrides])
    return _of_folder(Path(os.path.abspath(where)))


def _begun(where: Path, overrides: Sequence[str]) -> Place | None:
    """By a job file that says no more what can be run (its requests were moved, say): a run that
    was begun by it is still to be asked for and stopped."""
    mistakes: list[Mistake] = []
    if any(one.partition("=")[0] not in ("output", "name") for one in overrides):
        return None  # misspelt, perhaps: another run than is meant must not be stopped
    try:
        top = Section(job_tree(where, overrides, mistakes), "", mistakes)
    except InputError:
        return None
    output = absolute(top.text("output", "out", "a folder"), Path(os.path.abspath(where)).parent)
    name = top.text("name", where.stem, "a name of printable characters")
    if mistakes or not (output / "job.json").is_file():
        return None
    found = _of_folder(output)
    return found if found.name == name else None


def _of_folder(output: Path) -> Place:
    try:
        asked = json.loads((output / "job.json").read_text(encoding="utf-8"))
        table = asked.get("results")
        return Place(name=str(asked["name"]), output=output,
                     bound_s=float(asked["constraint"]["latency_s"]),
                     results=None if table is None else Path(table),
                     quote_formulas=asked.get("quote_formulas") is True)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):  # its results decide
        return Place(name=output.name, output=output, bound_s=math.inf)
