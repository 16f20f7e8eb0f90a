"""xgpt beside the peers that are installed, in turns, on one workload; with the floor beside them,


    python benchmarks/peers.py --config FILE [--workload FILE] [--rounds 3] [--threads 2]
                               [--only NAME] [--queries N] [--out benchmarks/results]

Every query is there at the start and gives exactly its number of tokens (benchmarks/workload.py);
every engine gets the same threads. FILE says what is on this machine, for instance:

    interpreters:                       # each peer lives in an environment of its own
      openvino: /opt/peers/openvino/bin/python
      vllm: /opt/peers/vllm/bin/python
      transformers: /opt/peers/transformers/bin/python
      ctranslate2: /opt/peers/ctranslate2/bin/python
    models:
    - name: SmolLM2-135M
      dtype: bfloat16
      folder: /opt/models/smollm2-135m            # Hugging Face's layout
      openvino: /opt/models/smollm2-135m-openvino # converted, where the peer needs that
    xgpt:                                         # how it is run: keys of the job's section `run`
      "xgpt, 1 rank x 2 threads": {ranks: 1}
    once: [transformers]                          # too slow for every round
    peers: [OpenVINO GenAI, "vLLM, compiled"]     # only these of the rows below (default: all)

A peer that is not named there is left out. The drivers are in benchmarks/peers/; each says how its
model is converted. What a first run alone has to do (xgpt profiles, vLLM compiles) is done in an
uncounted one. Before every run the script waits until others use next to nothing of the cores.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

import floor
import torch
import yaml
from contenders import Contender, FailedRun, Quiet, Setting, peer_contenders, xgpt_contenders
from runner import machine as machine_line
from runner import options, today, write
from workload import Query, read_or_draw, write_workload

PATIENCE_S = 7200.0


def main() -> None:
    arguments = _arguments()
    config = yaml.safe_load(arguments.config.read_text(encoding="utf-8"))
    queries = read_or_draw(arguments.workload)[:arguments.queries]
    quiet = Quiet(patience_s=0.0 if arguments.no_wait else PATIENCE_S)
    pages = [heading(queries, arguments)]
    with tempfile.TemporaryDirectory() as name:
        workload = Path(name) / "workload.jsonl"
        write_workload(queries, workload)
        for place, model in enumerate(config["models"]):
            if arguments.only in (None, model["name"]):
                scratch = Path(name) / str(place)
                scratch.mkdir()
                setting = Setting(model=model, queries=queries, workload=workload,
                                  threads=arguments.threads, scratch=scratch, quiet=quiet)
                contenders = [*xgpt_contenders(setting, config, arguments.rounds),
                              *peer_contenders(setting, config, arguments.rounds)]
                pages.append(compare(setting, contenders, arguments.rounds))
                write("peers", "\n\n".join(pages), arguments.out)


def _arguments() -> argparse.Namespace:
    parser = options(__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--workload", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", help="one model of the file")
    parser.add_argument("--queries", type=int, help="only the first so many, to try it out")
    parser.add_argument("--no-wait", action="store_true", help="for a quiet machine; to try it out")
    return parser.parse_args()


def compare(setting: Setting, contenders: list[Contender], rounds: int) -> str:
    """All contenders of one model in turns; a section of the page."""
    machines: dict[floor.Numbers, floor.Machine] = {}
    failed: list[str] = []
    for number in range(rounds + 1):
        for contender in [c for c in contenders if number in c.rounds]:
            setting.quiet.wait()
            try:
                contender.take(number, setting.scratch)
            except FailedRun as error:
                if contender.is_xgpt:
                    raise
                failed.append(f"{contender.name} is left out: {error}")
                print(failed[-1], flush=True)
                contenders.remove(contender)
        if number > 0:
            measure_machine(machines, contenders, setting)
    best = max((c for c in contenders if c.is_xgpt), key=lambda c: c.tokens_per_s)
    machine = machines[floor.model_of(best.output)[1]]
    setting.quiet.wait()
    return "\n".join([
        f"## {setting.model['name']}, {setting.model['dtype']}", "",
        *table(contenders, machines, best.tokens_per_s), "", *failed, f"{best.name}:", "",
        *floor.words(machine.floor(best.output)), "", *floor.rates(machine)])


def measure_machine(machines: dict[floor.Numbers, floor.Machine], contenders: Sequence[Contender],
                    setting: Setting) -> None:
    """In every round, for all numbers that xgpt ran in: the best rates of all rounds count."""
    specs = dict(reversed(floor.model_of(c.output)) for c in contenders if c.is_xgpt)
    for numbers, spec in specs.items():
        setting.quiet.wait()
        now = floor.measure(spec, numbers, setting.threads)
        machines[numbers] = now.better(machines[numbers]) if numbers in machines else now


def table(contenders: Sequence[Contender], machines: dict[floor.Numbers, floor.Machine],
          best: float) -> list[str]:
    """`best`: tokens a second of the best of xgpt."""
    lines = ["| | output tokens/s | xgpt's best is | run (s) | whole command (s) | "
             "share of its floor | others |", "|---|---|---|---|---|---|---|"]
    for contender in sorted(contenders, key=lambda c: -c.tokens_per_s):
        outcomes = contender.outcomes
        run_s = statistics.median(o.run_s for o in outcomes)
        reached = ""
        if contender.is_xgpt:
            machine = machines[floor.model_of(contender.output)[1]]
            reached = f"{machine.floor(contender.output).total_s / run_s:.0%}"
        notes = "" if all(o.is_exact for o in outcomes) else ", NOT the tokens asked for"
        lines.append(
            f"| {contender.name} ({outcomes[0].version}){notes} | "
            f"{spread([o.output_tokens / o.run_s for o in outcomes], 0)} | "
            f"{best / contender.tokens_per_s:.2f} times | {spread([o.run_s for o in outcomes], 1)} "
            f"| {spread([o.whole_s for o in outcomes], 1)} | {reached} | "
            f"{max(o.others_share for o in outcomes):.0%} |")
    return lines


def spread(values: Sequence[float], digits: int) -> str:
    """Median and range."""
    return (f"**{statistics.median(values):.{digits}f}** ({min(values):.{digits}f} to "
            f"{max(values):.{digits}f})")


def heading(queries: Sequence[Query], arguments: argparse.Namespace) -> str:
    inputs = sum(len(query.input_ids) for query in queries)
    outputs = sum(query.output_tokens for query in queries)
    return (f"# xgpt beside its peers, {machine_line()}, {arguments.threads} threads\n\n"
            f"{today()}; {len(queries)} queries, {inputs:,} input and "
            f"{outputs:,} output tokens, greedy, all there at the start. Medians and ranges of "
            f"{arguments.rounds} rounds in turns, after one uncounted; torch {torch.__version__}, "
            f"Python {platform.python_version()}. The time of a run is without loading; that of "
            "the whole command, from its start to its end, with it. `others`: most that other "
            "processes used of the cores during a run.")


if __name__ == "__main__":
    main()
