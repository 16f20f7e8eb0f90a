"""Arguments every job command shares, and how they print."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import click

from xgpt.core.errors import InputError, Mistake

F = TypeVar("F", bound=Callable[..., Any])


def job_arguments(command: F) -> F:
    """JOB.yaml, --set key.path=value (repeatable), --json."""
    command = click.option("--json", "as_json", is_flag=True,
                           help="Print one machine-readable object on stdout.")(command)
    command = click.option("--set", "overrides", multiple=True, metavar="KEY.PATH=VALUE",
                           help="Override one key of the job file; may be repeated.")(command)
    return click.argument("job_file", type=click.Path(path_type=Path), metavar="JOB.yaml")(command)


def writable_file(path: Path, option: str) -> Path:
    """`path`, checked before anything is computed for it; its folder is made. Raises InputError
    where no file can be written there."""
    folder, reason = path.parent, None
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as cause:
        reason = f"a file in a folder that can be made: {cause.strerror}"
    if not path.name or path.is_dir():
        reason = "a file, not a folder"
    elif reason is None and not os.access(path if path.exists() else folder, os.W_OK):
        reason = "a file that can be written to"
    if reason is not None:
        raise InputError([Mistake(file="command line", line=None, key=option, value=str(path),
                                  allowed=reason)])
    return path


def say(message: str) -> None:
    """A progress or log line: stderr, so that stdout holds only what was asked for."""
    click.echo(to_fit(message) if is_terminal() else message, err=True)


def to_fit(message: str) -> str:
    """`message` with its long lines broken between words, to the width of the terminal."""
    columns = shutil.get_terminal_size((80, 24)).columns
    return "\n".join(
        line if len(line) <= columns else textwrap.fill(
            line, columns, break_long_words=False, break_on_hyphens=False)
        for line in message.split("\n"))


def print_json(value: Mapping[str, Any] | Sequence[Any]) -> None:
    click.echo(json.dumps(plain(value), indent=1))


def plain(value: Any) -> Any:
    """Paths as text, infinity as "inf", dataclasses as mappings: what JSON can hold."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if hasattr(value, "__dataclass_fields__"):
        return plain(asdict(value))
    return value


def is_terminal() -> bool:
    return sys.stderr.isatty()
