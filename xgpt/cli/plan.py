"""The command `xgpt plan`: how many GPUs, or how long, without a job file."""

from dataclasses import asdict
from pathlib import Path

import click

from xgpt.app.sizing import Question, answer
from xgpt.cli.options import check_writable, job_options, print_json
from xgpt.cli.terminal import Terminal, say, show
from xgpt.core.schedule_file import to_json
from xgpt.report.table import figures_of


@click.command()
@click.argument("model")
@click.option("--on", required=True, metavar="GPU|NxGPU|CLUSTER",
              help="H100: find how many are needed. 8xH100: find how long these take.")
@click.option("--prompts", metavar="N", help="Number of requests, such as 3M.")
@click.option("--input", "input_tokens", required=True, metavar="TOKENS",
              help="Input tokens of a request, or {mean: M, std: S, max: X}.")
@click.option("--output", "output_tokens", required=True, metavar="TOKENS",
              help="Output tokens of a request, in the same form.")
@click.option("--within", metavar="TIME", help="Limit on the whole job, such as 8h.")
@click.option("--latency", metavar="TIME", help="Limit on one request, such as 30s.")
@click.option("--engine", metavar="NAME", help="Engine of the step times (default: vllm if its "
              "times were validated on such GPUs, else xgpt).")
@click.option("--save", type=click.Path(path_type=Path), metavar="FILE",
              help="Write the job file to FILE.")
@job_options
def plan(save: Path | None, overrides: tuple[str, ...], as_json: bool, **asked: str) -> None:
    """Plan a job of MODEL without a job file: how many GPUs it needs, or how long it takes."""
    check_writable(save, "--save")
    question = Question(**asked)
    found = answer(question, save or Path("job.yaml"), overrides, Terminal(),
                   is_saved=save is not None)
    if as_json:
        print_json({"question": asdict(question), "job": figures_of(found.prediction),
                    "times": found.times, **to_json(found.schedule)})
        return
    show(str(found))
    if save is not None:
        say(f"job file: {save}; put your file of prompts into workload.requests")
