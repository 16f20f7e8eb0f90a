"""`xgpt export`: a job as a file for another scheduler; nothing is submitted."""

from pathlib import Path

import click

from xgpt.app.hand_in import FORMATS
from xgpt.app.hand_in import export as export_job
from xgpt.cli.options import check_writable, job_arguments, print_json
from xgpt.cli.terminal import Terminal, show
from xgpt.core.job_file import load_job
from xgpt.core.whole_file import write_atomically


@click.command()
@job_arguments
@click.option("--to", required=True, type=click.Choice(list(FORMATS)),
              help="A Kubernetes JobSet, or a SkyPilot task.")
@click.option("--image", required=True, help="Container image that has xgpt.")
@click.option("--claim", default="xgpt", show_default=True,
              help="JobSet: the persistent volume claim that holds the job file's folder.")
@click.option("--out", type=click.Path(path_type=Path), metavar="FILE",
              help="Write the file there instead of printing it.")
def export(job_file: Path, overrides: tuple[str, ...], as_json: bool, to: str, image: str,
           claim: str, out: Path | None) -> None:
    """Print the job as a Kubernetes JobSet or a SkyPilot task, by its schedule."""
    if out is not None:
        check_writable(out, "--out")
    text = export_job(load_job(job_file, overrides), overrides, Terminal(), to=to, image=image,
                      claim=claim)
    if out is not None:
        write_atomically(out, text)
    if as_json:
        print_json({"to": to, "text": text, "file": out})
    elif out is None:
        show(text, nl=False)
