"""`xgpt report`: the page of a run, a sweep, or several runs beside one another."""

from pathlib import Path
from typing import get_args

import click

from xgpt.app.report import Form, write_reports, write_tables
from xgpt.cli.options import check_folder, check_writable, job_options, print_json
from xgpt.cli.terminal import show
from xgpt.core.errors import wrong
from xgpt.run_folder.files import place_of


@click.command()
@click.argument("where", nargs=-1, required=True, type=click.Path(path_type=Path),
                metavar="DIR|JOB.yaml ...")
@click.option("--format", "form", type=click.Choice(get_args(Form)), default="html",
              help="A page (the default), or pictures.")
@click.option("--out", type=click.Path(path_type=Path), metavar="FILE",
              help="Where to write (pictures: a folder); default: report.html in the folder, and "
              "for several ./compare.html.")
@job_options
def report(where: tuple[Path, ...], form: Form, out: Path | None, overrides: tuple[str, ...],
           as_json: bool) -> None:
    """Report what lies in a run's or a sweep's folder; compare several runs."""
    places = [place_of(one, overrides) for one in where]
    if out is not None and form == "png":
        if out.exists() and not out.is_dir():
            raise wrong("command line", "--out", str(out), "a folder: there is a picture a chart")
        check_folder(out, "--out")
    elif out is not None:
        check_writable(out, "--out")
    paths = [*write_reports([place.output for place in places], form, out), *write_tables(places)]
    if as_json:
        print_json({"report": paths[0], "files": paths})
    else:
        for path in paths:
            show(str(path))
