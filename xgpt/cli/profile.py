"""The commands `xgpt profile`, `profile show` and `profile import`."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from xgpt.app.needed_profile import needed_profile
from xgpt.app.opened_job import open_file
from xgpt.app.profile import local_profile
from xgpt.app.schedule import by_layout
from xgpt.app.tiers import needs_tiers, with_measured_tiers
from xgpt.cli.options import (
    check_writable,
    job_arguments,
    json_option,
    print_json,
    verbose_option,
)
from xgpt.cli.terminal import Terminal, say
from xgpt.cli.terminal import show as show_text
from xgpt.core import catalog
from xgpt.core.errors import wrong
from xgpt.job.job import DTYPES
from xgpt.report.profile_table import profile_tables
from xprofiler.importers import IMPORTERS, import_folder
from xprofiler.points import judge
from xprofiler.profile import Profile
from xprofiler.profile_file import load_profile, save_profile


class JobOrCommand(click.Group):
    """A group whose command is `measure` where the first word is none of its commands."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        first = next((word for word in args if not word.startswith("-")), None)
        if first == "merge":
            raise click.UsageError("no command 'profile merge': the cache merges measurements, and "
                                   "`xgpt profile JOB.yaml --tp 1,2,4` measures several degrees",
                                   ctx)
        asks_help = not args or args[0] in ("-h", "--help")
        if first not in self.commands and not asks_help:
            args = ["measure", *args]
        return super().parse_args(ctx, args)


def _degrees(_context: click.Context, _parameter: click.Parameter,
             text: str | None) -> tuple[int, ...] | None:
    """Whole numbers >= 1, separated by commas."""
    words = [] if text is None else [word.strip() for word in text.split(",")]
    if not all(w.isascii() and w.isdigit() and 0 < int(w) < 100_000 for w in words):
        raise click.BadParameter(f"{text!r}: whole numbers >= 1, for example 1,2,4")
    return tuple(sorted({int(word) for word in words})) or None


@click.group(cls=JobOrCommand)
def profile() -> None:
    """Time the model's layers on this machine (kept in a cache).

    \b
    xgpt profile JOB.yaml                   measure, or measure more
    xgpt profile show FILE                  show a profile
    xgpt profile import SOURCE FOLDER ...   convert other tools' measurements"""


@profile.command()
@job_arguments
@click.option("--out", type=click.Path(path_type=Path), metavar="FILE",
              help="Also write the profile to FILE.")
@click.option("--again", is_flag=True, help="Measure again what the cache has.")
@click.option("--tp", "degrees", callback=_degrees, metavar="1,2,...",
              help="Tensor-parallel degrees to measure (default: those this machine can run).")
@verbose_option
def measure(job_file: Path, overrides: tuple[str, ...], as_json: bool, out: Path | None,
            again: bool, degrees: tuple[int, ...] | None, is_verbose: bool) -> None:
    """Time the layers of JOB.yaml's model on this machine."""
    opened = open_file(job_file, overrides, Terminal(is_verbose=is_verbose))
    if not opened.is_local:
        raise wrong(
            opened.job.source, "cluster", opened.job.cluster,
            "`local`: a profile is measured on the machine itself (--set cluster=local); plans for "
            "other clusters use a profile file (`profile: FILE`) or the roofline of their device")
    check_writable(out, "--out")
    # of the layouts that a job leaves open, the one of fewest ranks
    opened = next(iter(by_layout(opened).values()))
    if opened.problem.offload == "auto" and needs_tiers([opened]):
        opened = with_measured_tiers(opened)
    folder = None if opened.files is None else opened.files.directory
    measured = local_profile(needed_profile(opened.job, opened.problem, degrees, folder),
                             opened.tell, again=again)
    if out is not None:
        save_profile(measured, out)
        say(f"profile: written to {out}")
    _print(measured, as_json, is_verbose=is_verbose)


@profile.command()
@click.argument("file", type=click.Path(path_type=Path), metavar="FILE")
@json_option
@verbose_option
def show(file: Path, as_json: bool, is_verbose: bool) -> None:
    """Show a profile's conditions and quality; with --verbose its tables of times."""
    _print(load_profile(file), as_json, is_verbose=is_verbose)


@profile.command("import")
@click.argument("source", type=click.Choice(sorted(IMPORTERS)), metavar="SOURCE")
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False),
                metavar="FOLDER")
@click.option("--model", required=True, metavar="NAME", help="Catalog name of the model.")
@click.option("--device", required=True, metavar="NAME", help="Catalog name of the device.")
@click.option("--dtype", type=click.Choice([d for d in DTYPES if d != "auto"]), default="float16",
              show_default=True, help="Dtype of the measurements.")
@click.option("--engine", metavar="NAME",
              help="Engine of the measurements: vllm (default), tensorrt-llm, sglang.")
@click.option("--engine-version", metavar="VERSION",
              help="Version of the engine (default: the newest in FOLDER).")
@click.option("--out", type=click.Path(path_type=Path), required=True, metavar="FILE",
              help="Profile file to write.")
def import_(source: str, folder: Path, model: str, device: str, dtype: str, engine: str | None,
            engine_version: str | None, out: Path) -> None:
    """Convert measurements in FOLDER to a profile file. SOURCE: aiconfigurator, flexgen."""
    check_writable(out, "--out")
    imported = import_folder(source, folder, _row("model", model), _row("device", device), dtype,
                             engine=engine, version=engine_version)
    save_profile(imported, out)
    say(f"profile: written to {out}; use it with `profile: {out}` in a job file")
    _print(imported, as_json=False, is_verbose=False)


def _row(kind: Any, name: str) -> Any:
    known = catalog.names(kind)
    if name not in known:
        raise wrong("command line", f"--{kind}", name, ", ".join(known))
    return catalog.model(name) if kind == "model" else catalog.device(name)


def _print(shown: Profile, as_json: bool, *, is_verbose: bool) -> None:
    if not as_json:
        head, *tables = profile_tables(shown).split("\n\n")
        show_text("\n\n".join([head, *(tables if is_verbose else ["Tables: --verbose"])]))
        return
    verdict = judge(shown)
    told = {**asdict(verdict), "sentence": verdict.sentence}
    print_json({"metadata": shown.metadata, "verdict": told, "refused": shown.refused,
                "peaks": shown.peaks, "spent_s": shown.spent_s, "tables": {
                    str(key): [{"x": p.x, "y": p.y, "median_s": p.median_s, "spread": p.spread}
                               for p in points] for key, points in shown.tables.items()}})
