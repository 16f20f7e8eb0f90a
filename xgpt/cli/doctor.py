"""`xgpt doctor`: what this machine has; with `--gpu`, how the CUDA kernels do on its card."""

from dataclasses import asdict
from pathlib import Path

import click

from xgpt.app.doctor import DifferingKernels, compare_on_gpu, examine
from xgpt.cli.options import print_json
from xgpt.cli.terminal import Terminal
from xgpt.report.doctor_table import doctor_table, gpu_table


@click.command()
@click.option("--gpu", is_flag=True, help="Compare every CUDA kernel with torch on this machine's "
              "GPU, time it, and write xgpt-doctor-CARD.json.")
@click.option("--json", "as_json", is_flag=True,
              help="Print one machine-readable object on stdout.")
def doctor(gpu: bool, as_json: bool) -> None:
    """What this machine has of what xgpt can use."""
    if not gpu:
        found = examine()
        print_json(found) if as_json else click.echo(doctor_table(found))
        return
    verdict = compare_on_gpu(Terminal(), Path.cwd())
    if not as_json:
        click.echo(gpu_table(verdict.card, verdict.num_cases, verdict.shares, verdict.file.name,
                             verdict.differing))
    if verdict.differing:
        raise DifferingKernels(verdict)
    if as_json:
        print_json(asdict(verdict))
