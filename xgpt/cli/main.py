"""Entry point: the group of commands, and the conversion of errors to exit codes."""

import atexit
import io
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Mapping
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import click

from xgpt.cli.options import print_json
from xgpt.cli.terminal import open_what_is_closed, say, show
from xgpt.core.engines import load_row
from xgpt.core.errors import (
    EXIT_BAD_INPUT,
    EXIT_FAILED,
    EXIT_RESUMABLE,
    InputError,
    XgptError,
    file_error_words,
    is_out_of_memory,
    nearest,
    shorten,
)
from xgpt.launch.stop_signals import STOP_SIGNALS, stopping_in_order


def settle() -> str | None:
    """Prepares the environment of this process and its children: UTF-8 file names in any locale,
    and a home, or a folder that replaces it. Returns a note about such a folder. Restarts the
    process if Python uses another encoding. Raises XgptError if no folder can be written to."""
    if sys.getfilesystemencoding() != "utf-8":
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
    os.environ.pop("PYTHONIOENCODING", None)  # children write to this process, in UTF-8
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    home, cache = os.path.expanduser("~"), os.environ.get("XDG_CACHE_HOME")
    if cache:
        os.environ["XDG_CACHE_HOME"] = os.path.abspath(cache)
    has_home = os.path.isabs(home)
    if has_home and (cache or _takes_files(Path(home, ".cache"))):
        return None
    folder = _folder_of_user()
    if not has_home:  # nor a user name, which libraries need
        os.environ.update(HOME=folder, USER=os.environ.get("USER") or f"uid{os.getuid()}")
    os.environ.setdefault("XDG_CACHE_HOME", f"{folder}/.cache")
    why = f"{home} cannot be written to" if has_home else "this user has no home"
    return f"note: {why}; {folder} is used instead (XDG_CACHE_HOME sets another cache)"


def _takes_files(folder: Path) -> bool:
    there = next(path for path in (folder, *folder.parents) if path.exists())
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)


def _folder_of_user() -> str:
    """Path of a folder of this user below the temporary folder. Raises XgptError where others can
    use it, too."""
    folder = Path(tempfile.gettempdir(), f"xgpt-{os.geteuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if found.st_uid != os.geteuid() or found.st_mode & 0o077 or folder.is_symlink():
        raise XgptError(f"no home can be written to, and other users can use {folder}: set HOME or "
                        "XDG_CACHE_HOME to another folder")
    return str(folder)


SHOWN_LENGTH = 500  # most characters of a mistake's list or mapping in `--json`

_OF_RUNS = frozenset({"submit", "run", "score", "sweep"})

# name -> (module:attribute, one line for --help). A table, so that --help imports no command.
COMMANDS: dict[str, tuple[str, str]] = {
    "init": ("xgpt.cli.init:init", "Write a job file for your model, prompts and machine."),
    "submit": ("xgpt.cli.run:submit", "Profile, plan and run a job, and write its report."),
    "profile": ("xgpt.cli.profile:profile", "Time the model's layers on this machine."),
    "calibrate": ("xgpt.cli.calibrate:calibrate_command", "Fit computed times to your runs."),
    "schedule": ("xgpt.cli.schedule:schedule", "Find the best schedule under the latency limit."),
    "plan": ("xgpt.cli.plan:plan", "Find how many GPUs, or how long, without a job file."),
    "explain": ("xgpt.cli.schedule:explain", "Show why a job or a run has its schedule."),
    "simulate": ("xgpt.cli.schedule:simulate", "Simulate a given schedule, step by step."),
    "workload": ("xgpt.cli.workload:workload", "Show lengths and arrivals of requests."),
    "sweep": ("xgpt.cli.sweep:sweep", "Plan a grid: throughput against latency."),
    "run": ("xgpt.cli.run:run", "Run a job by a given schedule."),
    "score": ("xgpt.cli.run:score", "Compute log-likelihoods of given continuations."),
    "export": ("xgpt.cli.schedule:export", "Write the job for Kubernetes or SkyPilot."),
    "report": ("xgpt.cli.status:report", "Write the report of a run or a sweep; compare runs."),
    "status": ("xgpt.cli.status:status", "Show the progress of a run, here or under Slurm."),
    "top": ("xgpt.cli.status:top", "Watch a running job live."),
    "stop": ("xgpt.cli.status:stop", "Stop a run after its current steps."),
    "doctor": ("xgpt.cli.models:doctor", "Check this machine: hardware and packages."),
    "models": ("xgpt.cli.models:models", "List the catalog: models, devices, clusters, tasks.")}
# removed command or option -> its replacement
GONE = {"validate": "`xgpt models --accuracy` shows the errors of computed times",
        "completion": "`_XGPT_COMPLETE=bash_source xgpt` prints it (zsh_source, fish_source)",
        "--verify": "`--set run.verify=true` does it",
        "--engines": "`xgpt sweep JOB.yaml --over engine=xgpt,vllm,deepspeed` compares them",
        "--baselines": "`xgpt sweep JOB.yaml --over policy=all` compares them",
        "--budget": "`xgpt profile JOB.yaml` measures every usual size, in minutes",
        "--format": "`xgpt sweep` writes sweep.csv, and `xgpt report DIR --format png` pictures",
        "--gpus": "`--set constraint.max_gpus=N` limits them, `--set cluster=8xH100` sets them"}


class LazyGroup(click.Group):
    """A group that imports a command only when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            if ctx.resilient_parsing:  # for shell completion
                return None
            known = GONE.get(cmd_name) or nearest(cmd_name, list(COMMANDS))
            raise click.UsageError(f"no command {cmd_name!r}: {known}", ctx)
        if cmd_name in _OF_RUNS and not ctx.resilient_parsing:
            # importing a run takes half a second
            ctx.with_resource(stopping_in_order(ends_process=True))
        command: click.Command = load_row(COMMANDS[cmd_name][0])
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.NoSuchOption as error:
            raise click.UsageError(_option_words(error), error.ctx) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


def _option_words(error: click.NoSuchOption) -> str:
    """Words for an unknown option, with its replacement, or the job's key of that name."""
    option, said = error.option_name, error.format_message()
    if option in GONE:
        return f"no option {option}: {GONE[option]}"
    if error.ctx is None or all(one.name != "overrides" for one in error.ctx.command.params):
        return said
    key = load_row("xgpt.job.job_file:key_places")().get(option.lstrip("-").replace("-", "_"))
    return said if key is None else f"{said} `--set {key}=...` sets that key of the job."


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="xgpt")
def cli() -> None:
    """Constraint-aware scheduler and runner for offline LLM batch inference.

    \b
    Start with:    xgpt submit jobs/quickstart.yaml
    Your own job:  xgpt init, then xgpt submit job.yaml"""


def main() -> None:
    """Runs the command and exits: 0 done, 1 failed, 2 wrong input, 3 no schedule meets the limit,
    75 resumable. `--json` prints one object on stdout in every case."""
    open_what_is_closed()
    try:
        _answer()
    finally:
        atexit.register(_ignore_signals)  # registered last, called first


def _ignore_signals() -> None:
    """Ignores stop signals while the interpreter ends, since they would replace the exit code."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _answer() -> None:
    try:
        if (note := settle()) is not None and "_XGPT_COMPLETE" not in os.environ:
            say(note)
        cli(standalone_mode=False)
    except XgptError as error:
        _tell(error)
        _leave(str(error), error.exit_code, _details(error))
    except click.exceptions.Exit as leave:
        sys.exit(leave.exit_code)
    except click.ClickException as error:
        shown = io.StringIO()
        error.show(shown)
        show(shown.getvalue(), err=True, nl=False)
        _leave(error.format_message(), error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        _ignore_signals()  # a second Ctrl-C must not replace the exit code
        is_of_run = bool(_OF_RUNS & {*sys.argv[1:2]})
        said = "interrupted" + "; the same command goes on" * is_of_run
        click.echo(f"xgpt: {said}", err=True)
        _leave(said, EXIT_RESUMABLE if is_of_run else EXIT_FAILED)
    except BrokenPipeError:
        sys.exit(EXIT_FAILED)
    except Exception as error:
        if (words := _of_the_machine(error)) is not None:
            _tell(XgptError(words))
            _leave(words, EXIT_FAILED)
        show(traceback.format_exc(), err=True)
        click.echo("xgpt: this is a bug of xgpt, not of your job; please report the lines above",
                   err=True)
        _leave(f"a bug of xgpt: {type(error).__name__}: {error}", EXIT_FAILED)


def _of_the_machine(error: Exception) -> str | None:
    """Words for an error of the machine: memory that ran out, a failing file system. None for a bug
    of xgpt."""
    if isinstance(error, MemoryError) or is_out_of_memory(str(error)):
        return (f"memory ran out ({type(error).__name__}: {error}): look at `ulimit -v` and the "
                "container's limit")
    return file_error_words(error)


def _tell(error: XgptError) -> None:
    """Prints a line per mistake, or the message, on stderr."""
    if isinstance(error, InputError):
        for mistake in error.mistakes:
            say(f"error: {mistake}")
    else:
        say(f"xgpt: {error}")


def _details(error: XgptError) -> dict[str, Any]:
    details = dict(error.details)
    if isinstance(error, InputError):
        details["mistakes"] = [{"file": mistake.file, "line": mistake.line, "key": mistake.key,
                                "value": _shown_value(mistake.value), "allowed": mistake.allowed}
                               for mistake in error.mistakes]
    return details


def _shown_value(value: object) -> object:
    """The value as given; the beginning, as text, of a long list or mapping."""
    if not isinstance(value, list | dict):
        return value
    text = shorten(value, limit=SHOWN_LENGTH)
    return text if len(text) == SHOWN_LENGTH else value


def _leave(message: str, exit_code: int, details: Mapping[str, Any] | None = None) -> None:
    """Exits, after printing the `--json` object if wanted, with the message as its `error`, or as
    its `message` for a stopped run that can go on."""
    if "--json" in sys.argv[1:]:  # as typed, since wrong arguments are not parsed
        facts = ({"status": "stopped", "message": message} if exit_code == EXIT_RESUMABLE
                 else {"error": message, "mistakes": []})
        with suppress(OSError):  # where the disk is full
            print_json({**facts, "exit_code": exit_code, **(details or {})})
    sys.exit(exit_code)


assert click.UsageError.exit_code == EXIT_BAD_INPUT, "click's usage errors are wrong input too"

if __name__ == "__main__":  # for batch scripts, which need no command on the PATH
    main()
