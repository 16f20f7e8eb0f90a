"""The command `xgpt init`."""

import math
import shlex
import sys
from pathlib import Path
from typing import Any

import click

from xgpt.app.init import (
    USUAL_FILE,
    NewJob,
    PromptsLook,
    columns_of,
    delimiters_of,
    files_here,
    likeliest,
    look_at,
    model_here,
    needs_column,
    refuse_existing,
    shared_in,
    usual_max_tokens,
    write_new_job,
)
from xgpt.app.models import ModelCheck, UnsupportedModel, check_model_named
from xgpt.app.opened_job import tell_delimiters
from xgpt.app.plan_analysis import saved_table
from xgpt.cli.options import check_writable, json_option, print_json
from xgpt.cli.terminal import Terminal, is_terminal, say, show
from xgpt.core.errors import wrong
from xgpt.core.units import parse_seconds
from xgpt.job.answer_forms import CHOICES, choices_of, json_schema_of
from xgpt.job.workload_section import TEMPLATE
from xgpt.report.table import paragraph, table
from xgpt.report.words import counted
from xgpt.requests.template import columns_in


@click.command()
@click.argument("job_file", type=click.Path(path_type=Path), default=USUAL_FILE,
                metavar="[JOB.yaml]")
@click.option("--prompts", type=click.Path(path_type=Path), metavar="FILE",
              help="File of prompts: CSV, Parquet, JSON, JSON lines or a prompt per line (default: "
              "the only such file here).")
@click.option("--column", metavar="NAME", help="Column of the prompts.")
@click.option("--prompt", default="", metavar="TEXT",
              help="Prompt template with columns in braces: 'Summarise: {text}'.")
@click.option("--system", default="", metavar="TEXT", help="System message before each prompt.")
@click.option("--choices", metavar="A,B,...",
              help="Labels: each answer is one of them.")
@click.option("--json-schema", type=click.Path(path_type=Path), metavar="FILE",
              help="JSON schema that each answer follows.")
@click.option("--model", metavar="NAME|DIR|ID",
              help="A name of `xgpt models`, a folder, or a hub id (default: one on this machine, "
              "else a small one).")
@click.option("--max-tokens", type=click.IntRange(min=1), metavar="N",
              help="Most tokens of an answer.")
@click.option("--latency", metavar="TIME", help="Latency limit of an answer: 30s, 2min, inf.")
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
@click.option("--yes", is_flag=True, help="Ask nothing and use the defaults.")
@json_option
def init(job_file: Path, prompts: Path | None, column: str | None, prompt: str, system: str,
         choices: str | None, json_schema: Path | None, model: str | None, max_tokens: int | None,
         latency: str | None, force: bool, yes: bool, as_json: bool) -> None:
    """Write a job file for your model, your prompts and this machine.

    On a terminal it asks for values that no option gives, with a default for each.
    """
    if not force:
        refuse_existing(job_file)
    check_writable(job_file, "JOB.yaml")
    asks = can_ask() and not yes and not as_json
    latency_s = None if latency is None else _latency(latency)
    if prompt and not columns_in(prompt):
        raise wrong("command line", "--prompt", prompt, TEMPLATE)
    if prompt and column is not None:
        raise wrong("command line", "--column", column, "left out beside --prompt")
    if choices is not None and json_schema is not None:
        raise wrong("command line", "--choices", choices, "left out beside --json-schema")
    added = _added(prompt, system, choices, json_schema)
    if (choices or json_schema) and not prompt:
        say("note: without --prompt 'QUESTION {column}' the model sees the rows alone, no question")
    look = _look(_prompts(prompts, asks), column, asks, prompt)
    check = _model(model, asks)
    assert check.spec is not None
    cap = max_tokens
    if cap is None and choices is None:
        cap = _max_tokens(usual_max_tokens(check.spec, look), look, asks)
    if latency_s is None:
        latency_s = math.inf if not asks else float(click.prompt(
            "How long may one answer take (30s, 2min; inf for no limit)",
            err=True, default="inf", value_proc=_latency))
    write_new_job(NewJob(path=job_file, model=check.name, check=check, look=look, max_tokens=cap,
                         latency_s=latency_s, added=added))
    if as_json:
        print_json({"job": job_file, "model": check.name, "prompts": look.count,
                    "max_tokens": cap, "latency_s": latency_s, "is_executed": check.is_executed})
        return
    show(f"Wrote {job_file}. It explains every key.")
    if look.is_all and (shares := shared_in(job_file)):
        show(f"\n{saved_table(shares)}\n")
    if check.is_executed:
        show(f"Next:  xgpt submit {_word(job_file)}")
    else:
        show(f"Next:  xgpt schedule {_word(job_file)}   (this model is not run here: "
                   f"xgpt models --check {_word(check.name)})")


def can_ask() -> bool:
    """Whether a user can answer questions: stdin and stderr are a terminal."""
    return sys.stdin.isatty() and is_terminal()


def _prompts(given: Path | None, asks: bool) -> Path:
    if given is None:
        here = files_here(Path.cwd())
        shown = [path.name for path in here[:20]]
        if asks:
            if shown:
                say(paragraph("Files here: " + ", ".join(shown)))
            given = Path(click.prompt("Which file holds the prompts", err=True,
                                      default=shown[0] if len(shown) == 1 else None))
        elif len(here) == 1:
            given = Path(shown[0])
            say(f"prompts: {given}, the only such file here")
        else:
            raise wrong("command line", "--prompts", None, "required: a file of prompts" + (
                f"; here are {', '.join(shown)}" if shown else "; there is none in this folder"))
    if not given.is_file():
        raise wrong("command line", "--prompts", str(given), "no such file")
    return given


def _added(prompt: str, system: str, choices: str | None, schema: Path | None) -> dict[str, Any]:
    """The keys of `workload` that these options set. Raises InputError."""
    labels = [] if choices is None else [one.strip() for one in choices.split(",")]
    option, value = ("--choices", choices) if schema is None else ("--json-schema", str(schema))
    try:
        if choices is not None:
            choices_of(labels)
        if schema is not None:
            json_schema_of(str(schema), Path.cwd())
    except ValueError as cause:
        raise wrong("command line", option, value, str(cause) or CHOICES) from None
    keys = {"prompt": prompt, "system": system, "choices": labels, "json_schema": schema}
    return {key: own for key, own in keys.items() if own}


def _look(path: Path, column: str | None, asks: bool, template: str = "") -> PromptsLook:
    """Reads the file of prompts, from the given, chosen or likeliest column, or by a template of
    columns."""
    tell_delimiters(delimiters_of(path), Terminal())
    columns = columns_of(path)
    if column is None and not template and needs_column(path, columns):
        best = likeliest(columns)
        if asks:
            say(table(("column", "characters", "its first entry"), [
                (c.name, f"{c.mean_chars:,.0f}" if c.mean_chars else "-", c.sample[:120])
                for c in columns], right=(1,)))
            column = click.prompt("Which column holds the prompts", err=True,
                                  type=click.Choice([c.name for c in columns]), show_choices=False,
                                  default=None if best is None else best.name)
        elif best is None and not any(column.sample for column in columns):
            raise wrong(path, "--prompts", None, "holds no prompt: it has a header and no rows")
        elif best is None:
            raise wrong(path, "--column", None, "required: which column holds the prompts; it has "
                        f"{', '.join(c.name for c in columns)}")
        else:
            column = best.name
            say(paragraph(f"prompts: from the column {column!r} of {path.name} (it has "
                          f"{', '.join(c.name for c in columns)}); --column names another"))
    look = look_at(path, column, template)
    if not look.count:
        first = look.errors[0] if look.errors else None
        raise wrong(path, "--prompts", None, "holds no usable prompt" + (
            f"; line {first.line}: {first.error}" if first else ": it is empty"))
    count = counted(look.count, "prompt")
    say(f"prompts: {count if look.is_all else 'more than ' + count} in {path}")
    if look.errors:
        say(paragraph(f"note: {counted(len(look.errors), 'entry')} cannot be used, the first in "
                      f"line {look.errors[0].line}: {look.errors[0].error}"))
    return look


def _model(given: str | None, asks: bool) -> ModelCheck:
    if given is None:
        here = model_here()
        given = click.prompt("Which model (catalog name, folder, hub id)", err=True,
                             default=here) if asks else here
    check = check_model_named(given)
    if not check.is_planned:
        raise UnsupportedModel(check)
    say(paragraph(f"model: {given}, {check.found}"))
    if check.weights:
        say(paragraph(f"note: {given} can be planned for, but not run here: {check.weights}"))
    return check


def _max_tokens(usual: int, look: PromptsLook, asks: bool) -> int:
    if not asks:
        return usual
    if look.capped == look.count:
        return min(usual, look.most_cap)  # every prompt names its own
    return int(click.prompt("Most tokens of an answer (256: some 190 words)", err=True,
                            type=click.IntRange(min=1), default=usual))


def _latency(text: str) -> float:
    try:
        if (seconds := parse_seconds(text)) > 0:
            return seconds
        cause = f"{text!r} is no time above 0"
    except ValueError as error:
        cause = str(error)
    raise click.BadParameter(f"{cause}; for example 30s", param_hint="--latency")


def _word(name: object) -> str:
    """The name quoted for the shell."""
    return shlex.quote(str(name))
