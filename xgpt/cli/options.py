"""Options that several commands share, their shell completion, and how commands print JSON."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from xgpt.core.engines import load_row
from xgpt.core.errors import wrong
from xgpt.core.system.whole_file import why_no_file

F = TypeVar("F", bound=Callable[..., Any])

JOB_FILE = click.Path(path_type=Path)  # or a folder
json_option = click.option("--json", "as_json", is_flag=True,
                           help="Print one machine-readable object on stdout.")


def complete_override(ctx: click.Context, param: click.Parameter,
                      incomplete: str) -> list[CompletionItem]:
    """Completes `--set`: keys of a job file, and the values of those that have a few."""
    keys = dict(_keys(load_row("xgpt.job.job_file:job_schema")()["properties"]))
    keys["model"] = load_row("xgpt.core.catalog:names")("model")
    key, is_given, _ = incomplete.partition("=")
    found = [f"{key}={value}" for value in keys.get(key, ())] if is_given else [
        f"{name}=" for name in keys]
    return [CompletionItem(one) for one in found if one.startswith(incomplete)]


def _keys(properties: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, Sequence[str]]]:
    """Yields each dotted key of a JSON schema's properties with its values, if it has a few."""
    for name, own in properties.items():
        forms = own.get("anyOf", [own])
        values = [str(value) for form in forms for value in form.get("enum", ())]
        values += ["true", "false"] * any(form.get("type") == "boolean" for form in forms)
        inner = [pair for form in forms
                 for pair in _keys(form.get("properties", {}), f"{within}{name}.")]
        if values or not inner:
            yield f"{within}{name}", values
        yield from inner


place_argument = click.argument("where", type=JOB_FILE, required=False, metavar="[DIR|JOB.yaml]")


def job_arguments(command: F) -> F:
    """Adds the argument JOB.yaml and the options --set (repeatable) and --json to a command."""
    return click.argument("job_file", type=JOB_FILE, metavar="JOB.yaml")(job_options(command))


def run_arguments(command: F) -> F:
    """Adds the argument DIR|JOB.yaml (default: ./job.yaml, or the newest run under ./out) and the
    options --set and --json to a command."""
    return place_argument(job_options(command))


def job_options(command: F) -> F:
    """Adds the options --set (repeatable) and --json to a command."""
    return click.option("--set", "overrides", multiple=True, metavar="KEY.PATH=VALUE",
                        shell_complete=complete_override,
                        help="Override one key of the job file; may be repeated.")(
                            json_option(command))


def verbose_option(command: F) -> F:
    """Adds the option --verbose to a command."""
    return click.option("--verbose", "is_verbose", is_flag=True,
                        help="Print more details.")(command)


def within_seconds(command: F) -> F:
    """Adds the option --max-seconds, the job's `search.max_seconds`, to a command."""
    return click.option(
        "--max-seconds", type=click.FloatRange(min=0, min_open=True), metavar="N",
        help="Stop the search for a schedule after N seconds, and show the gap reached.")(command)


def with_seconds(overrides: tuple[str, ...], max_seconds: float | None) -> tuple[str, ...]:
    """The `--set`s of a command, with one for its --max-seconds."""
    return overrides if max_seconds is None else (*overrides, f"search.max_seconds={max_seconds:g}")


def check_writable(path: Path | None, option: str) -> None:
    """Makes the folder of `path`, unless that is None. Raises InputError where no file can be
    written there, before anything is computed for it."""
    if path is not None and (allowed := why_no_file(path)) is not None:
        raise wrong("command line", option, str(path), allowed)


def print_json(value: Mapping[str, Any] | Sequence[Any]) -> None:
    plain = load_row("xgpt.core.schedule_file:plain")  # imports pydantic, which --help need not
    click.echo(json.dumps(plain(value), indent=1, allow_nan=False))
