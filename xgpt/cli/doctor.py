"""`xgpt doctor`: what this machine has; with `--gpu`, how the CUDA kernels do on its card."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click

from xgpt.app.doctor import Remedy, compare_on_gpu, examine, remedies
from xgpt.cli.options import json_option, print_json
from xgpt.cli.terminal import show
from xgpt.report.table import fact, paragraph


@click.command()
@click.option("--gpu", is_flag=True, help="Compare every CUDA kernel with torch on this machine's "
              "GPU, time it, and write xgpt-doctor-CARD.json.")
@json_option
def doctor(gpu: bool, as_json: bool) -> None:
    """What this machine has of what xgpt can use, and what mends the rest."""
    if not gpu:
        found = examine()
        missing = remedies(found)
        if as_json:
            print_json({**found, "missing": [asdict(remedy) for remedy in missing]})
        else:
            show("\n".join(fact(label, words) for label, words in found.items()))
            show("\n" + _verdict(missing))
        return
    file = compare_on_gpu(Path.cwd())
    if as_json:
        print_json({"file": file})
    else:
        show(paragraph(f"all kernels agree with torch. {file.name} is written; please send it to "
                       "the project: it is how kernels get known to work on a card"))


def _verdict(missing: Sequence[Remedy]) -> str:
    """What to do; a command is never broken, so that it can be copied."""
    needed = [remedy for remedy in missing if remedy.is_needed]
    lines = ["Jobs run here: xgpt init writes one for your prompts." if not needed else
             "No job runs here yet."]
    for group, title in ((needed, "Needed"), ([r for r in missing if not r.is_needed], "Better")):
        for remedy in group:
            lines += ["", fact(title, remedy.why), f"    {remedy.command}"]
    return "\n".join(lines)
