"""Arguments every job command shares, how they print, and what makes a shell complete them."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem, get_completion_class

from xgpt.core.engines import load_row
from xgpt.core.errors import wrong
from xgpt.core.system.whole_file import why_no_file, why_no_folder

F = TypeVar("F", bound=Callable[..., Any])

_CATALOG = "xgpt.core.catalog:names"
# Keys that `--set` completes -> their values, or (where a table or function of them is, its
# arguments): imported when a shell asks.
KEYS: dict[str, tuple[str, ...]] = {
    "model": (_CATALOG, "model"), "cluster": (_CATALOG, "cluster"),
    "workload.task": (_CATALOG, "task"), "workload.requests": (), "workload.max_tokens": (),
    "workload.output_tokens": ("observe",), "workload.chat": ("true", "false"),
    "workload.score": ("true", "false"),
    "workload.embed": ("xgpt.job.job_file:POOLINGS",), "run.stop": (),
    "constraint.latency_s": ("inf",), "constraint.kind": ("sequence", "queries"),
    "constraint.quantile": (), "constraint.confidence": (), "constraint.drift": (),
    "constraint.ttft_s": (), "constraint.tpot_s": (), "constraint.makespan_s": (),
    "constraint.memory": (), "constraint.max_gpus": (), "profile": (),
    "objective": ("xgpt.core.constraint:OBJECTIVES",), "price_per_hour": (),
    "schedule.policy": ("xgpt.core.policies:policy_names",), "schedule.encode_batch": (),
    "schedule.decode_iterations": (), "schedule.tp_degree": (), "schedule.tp_gpus": (),
    "run.ranks": (), "run.dtype": ("xgpt.job.job:DTYPES",),
    "run.weight_dtype": ("xgpt.job.job:DTYPES", "int8"), "run.seed": (),
    "run.temperature": (), "run.threads_per_rank": (), "run.weights": ("checkpoint", "random"),
    "run.engine": ("xgpt.core.engines:engine_names",), "search.max_seconds": (), "output": ()}

json_option = click.option("--json", "as_json", is_flag=True,
                           help="Print one machine-readable object on stdout.")


class JobFile(click.Path):
    """A job file, or a folder: what a shell proposes."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def shell_complete(self, ctx: click.Context, param: click.Parameter,
                       incomplete: str) -> list[CompletionItem]:
        folder, _, begun = incomplete.rpartition("/")
        where = Path(folder + "/" if "/" in incomplete else ".").expanduser()
        try:
            there = sorted(where.iterdir())
        except OSError:
            return []
        head = incomplete[: len(incomplete) - len(begun)]
        return [CompletionItem(f"{head}{path.name}{'/' * path.is_dir()}") for path in there
                if path.name.startswith(begun) and not path.name.startswith(".")
                and (path.is_dir() or path.suffix in (".yaml", ".yml"))]


def complete_override(ctx: click.Context, param: click.Parameter,
                      incomplete: str) -> list[CompletionItem]:
    """Keys of a job file, and the values of those that have a few."""
    key, is_given, begun = incomplete.partition("=")
    if not is_given:
        return [CompletionItem(f"{name}=") for name in KEYS if name.startswith(key)]
    values: Sequence[str] = KEYS.get(key, ())
    if values and ":" in values[0]:
        found = load_row(values[0])
        values = found(*values[1:]) if callable(found) else (*found, *values[1:])
    if key == "cluster":
        values = [*values, "local"]
    return [CompletionItem(f"{key}={value}") for value in values if value.startswith(begun)]


def job_arguments(command: F) -> F:
    """JOB.yaml, --set key.path=value (repeatable), --json."""
    return click.argument("job_file", type=JobFile(), metavar="JOB.yaml")(
        job_options(command))


def run_arguments(command: F) -> F:
    """JOB.yaml or an output folder, --set, --json."""
    return click.argument("where", type=JobFile(), metavar="DIR|JOB.yaml")(
        job_options(command))


def job_options(command: F) -> F:
    """--set key.path=value (repeatable), --json."""
    return click.option("--set", "overrides", multiple=True, metavar="KEY.PATH=VALUE",
                        shell_complete=complete_override,
                        help="Override one key of the job file; may be repeated.")(
                            json_option(command))


def within_seconds(command: F) -> F:
    """--max-seconds N: the job's `search.max_seconds`."""
    return click.option(
        "--max-seconds", type=click.FloatRange(min=0, min_open=True), metavar="N",
        help="End the search for a schedule after N seconds, with what it has proved until then.")(
            command)


def with_seconds(overrides: tuple[str, ...], max_seconds: float | None) -> tuple[str, ...]:
    """The overrides of a command, with what its --max-seconds asks for."""
    return overrides if max_seconds is None else (
        *overrides, f"search.max_seconds={max_seconds:g}")


def verify_option(command: F) -> F:
    """--verify: the job's `run.verify`."""
    return click.option(
        "--verify", "is_verified", is_flag=True,
        help="Know the model's weights again by every byte, not by samples of them.")(command)


def with_verify(overrides: tuple[str, ...], is_verified: bool) -> tuple[str, ...]:
    """The overrides of a command, with what its --verify asks for."""
    return (*overrides, "run.verify=true") if is_verified else overrides


def check_writable(path: Path, option: str) -> None:
    """Checks `path` before anything is computed for it, and makes its folder. Raises InputError
    where no file can be written there."""
    if (allowed := why_no_file(path)) is not None:
        raise wrong("command line", option, str(path), allowed)


def check_folder(path: Path, option: str) -> None:
    """The same of a folder of files."""
    if (allowed := why_no_folder(path)) is not None:
        raise wrong("command line", option, str(path), allowed)


def print_json(value: Mapping[str, Any] | Sequence[Any]) -> None:
    plain = load_row("xgpt.core.schedule_file:plain")  # pydantic with it, which --help does without
    click.echo(json.dumps(plain(value), indent=1, allow_nan=False))


_PLACES = {"bash": "~/.bashrc", "zsh": "~/.zshrc", "fish": "~/.config/fish/config.fish"}


@click.command()
@click.argument("shell", type=click.Choice(tuple(_PLACES)), default=lambda: _own_shell())
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print what completes xgpt's commands in your shell, for its start-up file.

    \b
    bash   echo 'eval "$(xgpt completion bash)"' >> ~/.bashrc
    zsh    echo 'eval "$(xgpt completion zsh)"' >> ~/.zshrc
    fish   echo 'xgpt completion fish | source' >> ~/.config/fish/config.fish
    """
    made = get_completion_class(shell)
    assert made is not None, f"{shell = }"
    click.echo(made(context.find_root().command, {}, "xgpt", "_XGPT_COMPLETE").source())


def _own_shell() -> str:
    """The shell that the user has by default."""
    name = os.path.basename(os.environ.get("SHELL", ""))
    return name if name in _PLACES else "bash"
