"""`xgpt report`: the page of a run, a sweep, or several runs beside one another."""

from pathlib import Path
from typing import get_args

import click

from xgpt.app.report import Form, write_reports, write_tables
from xgpt.cli.options import check_folder, check_writable, job_options, print_json
from xgpt.cli.terminal import say, show
from xgpt.core.errors import wrong
from xgpt.report.chart import can_draw
from xgpt.run_folder.files import place_of


@click.command()
@click.argument("where", nargs=-1, required=True, type=click.Path(path_type=Path),
                metavar="DIR|JOB.yaml ...")
@click.option("--format", "wanted", metavar="html,md,png", default="html",
              help="A page (the default), Markdown with pictures, pictures alone, or several.")
@click.option("--out", type=click.Path(path_type=Path), metavar="FILE",
              help="Where to write (pictures: a folder); default: report.html in the folder, and "
              "for several ./compare.html.")
@job_options
def report(where: tuple[Path, ...], wanted: str, out: Path | None, overrides: tuple[str, ...],
           as_json: bool) -> None:
    """Report what lies in a run's or a sweep's folder; compare several runs."""
    forms = _forms(wanted, out)
    places = [place_of(one, overrides) for one in where]
    if out is not None and forms == ["png"]:
        if out.exists() and not out.is_dir():
            raise wrong("command line", "--out", str(out), "a folder: there is a picture a chart")
        check_folder(out, "--out")
    elif out is not None:
        check_writable(out, "--out")
    folders = [place.output for place in places]
    paths = list(dict.fromkeys(
        path for form in forms for path in write_reports(folders, form, out)))
    paths += write_tables(places)
    if "md" in forms and not can_draw():
        say("no pictures: they need matplotlib (pip install -c constraints.txt -e '.[report]')")
    if as_json:
        print_json({"report": paths[0], "files": paths})
    else:
        for path in paths:
            show(str(path))


def _forms(wanted: str, out: Path | None) -> list[Form]:
    named = list(dict.fromkeys(name.strip() for name in wanted.split(",") if name.strip()))
    forms = [form for name in named for form in get_args(Form) if form == name]
    if len(forms) < len(named) or not forms:
        raise wrong("command line", "--format", wanted, ", ".join(get_args(Form)))
    if len(forms) > 1 and out is not None:
        raise wrong("command line", "--out", str(out), "for one --format alone: several lie in the "
                    "folder")
    return forms
