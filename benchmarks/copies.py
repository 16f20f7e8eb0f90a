"""Two vLLM replicas of one core each: under one schedule of xgpt, as two processes over halves of
the file, and by vLLM's own data parallelism; beside xgpt's own runner.

    python benchmarks/copies.py --config FILE [--workload FILE] [--rounds 3] [--queries N]
                                [--compiled] [--no-wait] [--out benchmarks/results]

FILE is that of benchmarks/peers.py; the first of its models counts. One job is the peers' workload
in its order, the other the same requests with the shortest answers first, so that equal halves of
the file are unequal work. All requests are there at the start, and each gives exactly its number
of tokens, greedily. Every replica has one core. vLLM runs eagerly unless `--compiled` is given.

- *xgpt on vLLM*: `run.engine: vllm`; a rank and an engine for each core, and one queue.
- *halves*: two vLLM processes; each gets half of the lines, as `xgpt schedule --export vllm` does.
- *data parallelism*: one client with `data_parallel_size=2`, whose two engines it balances.

A run is timed from the moment when all replicas are loaded to the last answer; the whole command
from its start to its end, with loading, and for xgpt with planning. `xgpt's best` is xgpt on vLLM.
Only xgpt keeps each line once when the command is killed: the others write nothing before their
end.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from contenders import Contender, Outcome, Peer, Quiet, Setting, peer_contenders, run_xgpt
from peers import PATIENCE_S, compare
from runner import about, machine, options, today, write
from workload import Query, read_or_draw, write_workload

REPLICAS = 2
OWN: dict[str, dict[str, Any]] = {"xgpt on vLLM": {"engine": "vllm"}, "xgpt's own runner": {}}
PEERS = {"vLLM, halves": "halves", "vLLM, data parallelism": "parallel"}  # modes of the driver


def main() -> None:
    given = _arguments()
    config = yaml.safe_load(given.config.read_text(encoding="utf-8"))
    model = config["models"][0]
    queries = read_or_draw(given.workload)[:given.queries]
    shortest_first = sorted(queries, key=lambda query: query.output_tokens)
    how = "compiled" if given.compiled else "eagerly"
    pages = [f"# Two vLLM replicas, {machine()}", about(__doc__),
             f"{today()}. {model['name']}, {model['dtype']}; vLLM runs {how}. {_size(queries)} "
             f"Medians and ranges of {given.rounds} rounds in turns, after one uncounted. "
             "`others`: most that other processes used of the cores during a run."]
    with tempfile.TemporaryDirectory() as name:
        for title, job in (("In the file's order", queries), ("Shortest answers first",
                                                              shortest_first)):
            scratch = Path(name) / title.split()[0].lower()
            scratch.mkdir()
            write_workload(job, scratch / "workload.jsonl")
            half = len(job) // REPLICAS
            pages += [f"## {title}", f"Output tokens of the halves: {_written(job[:half]):,} and "
                      f"{_written(job[half:]):,}."]
            setting = Setting(
                model=model, queries=job, workload=scratch / "workload.jsonl", threads=REPLICAS,
                scratch=scratch, quiet=Quiet(patience_s=0.0 if given.no_wait else PATIENCE_S))
            section = compare(setting, contenders(setting, config, given), given.rounds)
            pages.append(section.partition("\n")[2].strip())  # without the model's name
            write("copies", "\n\n".join(pages), given.out)


def contenders(setting: Setting, config: dict[str, Any],
               given: argparse.Namespace) -> list[Contender]:
    # only what vLLM executes counts as xgpt's best
    own = [Contender(name, _run(setting, config, keys, given), range(given.rounds + 1),
                     is_xgpt="engine" in keys) for name, keys in OWN.items()]
    ending = "-compiled" if given.compiled else ""
    peers = [Peer(name, "vllm", "run_vllm_copies.py", mode + ending, is_compiled=given.compiled)
             for name, mode in PEERS.items()]
    return [*own, *peer_contenders(setting, {**config, "peers": list(PEERS)}, given.rounds, peers)]


def _run(setting: Setting, config: dict[str, Any], keys: dict[str, Any],
         given: argparse.Namespace) -> Callable[[Path], Outcome]:
    run = {"ranks": REPLICAS, "threads_per_rank": 1, **keys}
    if "engine" in keys:
        run |= {"engine_python": config["interpreters"]["vllm"],
                "engine_args": {"enforce_eager": not given.compiled}}
    return lambda folder: run_xgpt(setting, folder, run, {"schedule": {"replicas": REPLICAS}})


def _written(queries: list[Query]) -> int:
    return sum(query.output_tokens for query in queries)


def _size(queries: list[Query]) -> str:
    return (f"{len(queries)} requests, {sum(len(query.input_ids) for query in queries):,} input "
            f"and {_written(queries):,} output tokens.")


def _arguments() -> argparse.Namespace:
    parser = options(__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--workload", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--queries", type=int, help="only the first so many, to try it out")
    parser.add_argument("--compiled", action="store_true", help="by torch.compile, as on GPUs")
    parser.add_argument("--no-wait", action="store_true", help="for a quiet machine; to try it out")
    return parser.parse_args()


if __name__ == "__main__":
    main()
