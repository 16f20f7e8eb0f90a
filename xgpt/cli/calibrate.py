"""The command `xgpt calibrate`: a factor on computed times from measured runs."""

from pathlib import Path
from typing import Any

import click

from xgpt.app.calibrate import calibrate
from xgpt.cli.options import check_writable, json_option, print_json
from xgpt.cli.terminal import show
from xgpt.core.units import FP8
from xgpt.report.table import fact
from xprofiler.calibration import save_calibration


@click.command("calibrate")
@click.argument("sources", type=click.Path(path_type=Path, exists=True), nargs=-1, required=True,
                metavar="FILE...")
@click.option("--out", type=click.Path(path_type=Path), default="calibration.json",
              show_default=True, metavar="FILE", help="Calibration file to write.")
@click.option("--model", metavar="NAME", help="Catalog name of a benchmark's model (default: by "
              "its model_id).")
@click.option("--device", metavar="NAME", help="Catalog name of a benchmark's GPU.")
@click.option("--engine", metavar="NAME", help="Engine of a benchmark, or its release: "
              "vllm-0.12.")
@click.option("--tp", type=click.IntRange(1), metavar="N",
              help="Tensor-parallel degree of a benchmark.")
@click.option("--weight-dtype", type=click.Choice([FP8]), help="Weights of a benchmark, if of 8 "
              "bits.")
@json_option
def calibrate_command(sources: tuple[Path, ...], out: Path, as_json: bool, **asked: Any) -> None:
    """Fit computed times to runs that you measured. FILE: a CSV file of closed loops, or a result
    of `vllm bench serve --save-result`; at least three rows of one degree."""
    check_writable(out, "--out")
    found = calibrate(sources, asked)
    save_calibration(found.calibration, out)
    if as_json:
        print_json({"file": out, **found._asdict()})
        return
    show(f"{found}\n" + fact("written", f"{out}; plan with it by --set plan.calibration={out}"))
