"""`xgpt validate`: predictions beside what was measured."""

from pathlib import Path

import click

from xgpt.app.validate import SOURCES
from xgpt.app.validate import validate as validate_folder
from xgpt.cli.options import check_writable, json_option, print_json
from xgpt.cli.terminal import Terminal, show
from xgpt.report.validation_page import write_validation_page
from xgpt.report.validation_table import chooser_table, validation_table


@click.command()
@click.argument("folder", type=click.Path(path_type=Path), required=False, metavar="[FOLDER]")
@click.option("--source", "sources", multiple=True, type=click.Choice(SOURCES), metavar="NAME",
              help=f"Only this one of {', '.join(SOURCES)}; may be given again.")
@click.option("--measured", type=click.Path(path_type=Path, exists=True, dir_okay=False),
              metavar="FILE.csv", help="Closed loops that you measured (docs/validate.md).")
@click.option("--by-model", is_flag=True, help="Each model in a row of its own.")
@click.option("--html", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE.html",
              help="Also draw predicted against measured (needs jinja2).")
@json_option
def validate(folder: Path | None, sources: tuple[str, ...], measured: Path | None,
             by_model: bool, html: Path | None, as_json: bool) -> None:
    """How far the planner's times are from what others measured.

    FOLDER holds the measurements, as docs/validate.md describes; ../shared/data if it is there."""
    if html is not None:
        check_writable(html, "--html")
    found = validate_folder(folder, Terminal(), sources=sources, measured=measured)
    if html is not None:
        write_validation_page(found.compared, found.choosers, found.calibration, html)
        Terminal().say(f"wrote {html}")
    if as_json:
        print_json(found.to_dict())
        return
    show(validation_table(found.compared, by_model=by_model))
    if found.choosers:
        show("\n" + chooser_table(found.choosers, found.calibration))
