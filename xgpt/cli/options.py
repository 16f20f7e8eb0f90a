"""Arguments every job command shares, and how they print."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from xgpt.core.errors import wrong
from xgpt.core.json_values import plain

F = TypeVar("F", bound=Callable[..., Any])

json_option = click.option("--json", "as_json", is_flag=True,
                           help="Print one machine-readable object on stdout.")


def job_arguments(command: F) -> F:
    """JOB.yaml, --set key.path=value (repeatable), --json."""
    return click.argument("job_file", type=click.Path(path_type=Path), metavar="JOB.yaml")(
        job_options(command))


def run_arguments(command: F) -> F:
    """JOB.yaml or an output folder, --set, --json."""
    return click.argument("where", type=click.Path(path_type=Path), metavar="DIR|JOB.yaml")(
        job_options(command))


def job_options(command: F) -> F:
    """--set key.path=value (repeatable), --json."""
    return click.option("--set", "overrides", multiple=True, metavar="KEY.PATH=VALUE",
                        help="Override one key of the job file; may be repeated.")(
                            json_option(command))


def check_writable(path: Path, option: str) -> None:
    """Checks `path` before anything is computed for it, and makes its folder. Raises InputError
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
        raise wrong("command line", option, str(path), reason)


def print_json(value: Mapping[str, Any] | Sequence[Any]) -> None:
    click.echo(json.dumps(plain(value), indent=1))
