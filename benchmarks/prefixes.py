"""Jobs whose prompts begin alike: xgpt without and with shared prefixes, beside peers without and
with their prefix caches, in turns.

    python benchmarks/prefixes.py --config FILE [--rounds 3] [--threads 2] [--part 1]
                                  [--only NAME] [--job NAME] [--no-wait] [--out benchmarks/results]
    python benchmarks/prefixes.py --trace ../shared/data/mooncake/conversation.jsonl

FILE is that of benchmarks/peers.py. All requests are there at the start. Each engine has the same
threads and room for the same number of tokens in its KV cache; what xgpt planned to use of it is
shown. `--part 4`: a quarter of the requests, to try it out. `--trace`: the share of input tokens
that a cache of so many tokens saves on Mooncake's trace, in the input's order and in that of
prefixes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml
from contenders import (
    PEERS,
    Contender,
    FailedRun,
    Outcome,
    Quiet,
    Setting,
    peer_contenders,
    run_xgpt,
)
from runner import about, machine, options, table, today, write
from workload import Query, write_workload

from xgpt.core.units import DTYPE_BYTES
from xrunner.checkpoint.source import read_spec

PATIENCE_S = 7200.0
WORK_BYTES = 150_000_000  # chosen: what xgpt may take besides weights and KV entries
CACHING = ", caching"
BLOCK_TOKENS = 512  # of Mooncake's trace
KEPT = (16_384, 65_536, 262_144, 4_194_304, 0)  # 0: all


class Job(NamedTuple):
    """`kv_tokens`: room of every engine's KV cache."""

    name: str
    queries: list[Query]
    kv_tokens: int


def jobs(part: int) -> Iterator[Job]:
    """The four jobs, each with a part of its requests."""
    rng = np.random.default_rng(46)

    def tokens(count: int) -> list[int]:
        return [int(token) for token in rng.integers(100, 30_000, size=count)]

    shared = tokens(384)
    yield Job("few-shot: 384 tokens + 40, 8 written",
              [Query(shared + tokens(40), 8) for _ in range(128 // part)], 65_536)
    documents = [tokens(1000) for _ in range(12)]
    queries = [Query(document + tokens(30), 16) for document in documents
               for _ in range(max(8 // part, 2))]
    yield Job("documents: 12 of 1,000 tokens, 8 questions of 30 each, shuffled, 16 written",
              [queries[place] for place in rng.permutation(len(queries))], 6_144)
    yield Job("samples: prompts of 400, 8 answers of 64 each",
              [Query(tokens(400), 64, samples=8) for _ in range(16 // part)], 65_536)
    shared, questions = tokens(600), [tokens(100) for _ in range(16 // part)]
    yield Job("score: 600 tokens + 100, 4 continuations of 8 each",
              [Query(shared + question + tokens(8), 0, targets=8) for question in questions
               for _ in range(4)], 65_536)


def contenders_of(job: Job, setting: Setting, config: dict[str, Any],
                  rounds: int) -> list[Contender]:
    """xgpt with prefixes off and auto, itself and on vLLM; peers with caching off and on."""
    interpreters = config.get("interpreters") or {}
    own: dict[str, dict[str, Any]] = {"xgpt": {"ranks": 1, "threads_per_rank": setting.threads}}
    if "vllm" in interpreters and not job.queries[0].targets:  # which its engine does not score
        own["xgpt, run by vLLM"] = {**own["xgpt"], "engine": "vllm",
                                    "engine_python": interpreters["vllm"]}
    found = [
        Contender(f"{name}, prefixes {key}", _xgpt(job, setting, run, key), range(rounds + 1),
                  is_xgpt=True) for name, run in own.items() for key in ("off", "auto")]
    room = ("--kv-tokens", str(job.kv_tokens))
    peers = [replaced for peer in PEERS for replaced in (
        peer._replace(more=room), peer._replace(name=peer.name + CACHING,
                                                more=(*room, "--caching")))]
    named = {**config, "peers": [name + more for name in config["peers"]
                                 for more in ("", CACHING)]}
    return [*found, *peer_contenders(setting, named, rounds, peers)]


def _xgpt(job: Job, setting: Setting, run: dict[str, Any],
          prefixes: str) -> Callable[[Path], Outcome]:
    return lambda folder: run_xgpt(setting, folder, run, {
        "schedule": {"prefixes": prefixes},
        "constraint": {"latency_s": "inf", "memory": _memory_bytes(job, setting)}})


def _memory_bytes(job: Job, setting: Setting) -> int:
    """Memory of one rank with weights and this room for KV entries."""
    spec = read_spec(Path(setting.model["folder"]), setting.model["name"])
    each = DTYPE_BYTES[setting.model["dtype"]]
    kv = job.kv_tokens * spec.kv_elements_per_token_layer * spec.num_layers * each
    return spec.num_params * each + kv + WORK_BYTES


def compare(job: Job, setting: Setting, config: dict[str, Any], rounds: int) -> list[str]:
    """All contenders of one job in turns; a section of the page."""
    contenders, failed = contenders_of(job, setting, config, rounds), list[str]()
    for number in range(rounds + 1):
        for contender in [one for one in contenders if number in one.rounds]:
            setting.quiet.wait()
            try:
                contender.take(number, setting.scratch)
            except FailedRun as error:
                failed.append(f"{contender.name} is left out: {error}")
                print(failed[-1], flush=True)
                contenders.remove(contender)
    best = min((_run_s(one) for one in contenders if not one.is_xgpt), default=None)
    lines = [f"## {job.name}", "", f"{len(job.queries)} requests, "
             f"{sum(len(query.input_ids) for query in job.queries):,} input tokens; room for "
             f"{job.kv_tokens:,} tokens.", "", *table((
                 "", "run (s)", "the best peer's time / this", "whole command (s)",
                 "KV tokens planned", "others"))]
    for one in sorted(contenders, key=_run_s):
        lines.append(f"| {one.name}{_note(one)} | {_spread([o.run_s for o in one.outcomes])} | "
                     f"{'' if best is None else f'{best / _run_s(one):.2f}'} | "
                     f"{_spread([o.whole_s for o in one.outcomes])} | {_planned(one)} | "
                     f"{max(o.others_share for o in one.outcomes):.0%} |")
    return [*lines, "", *failed]


def _run_s(contender: Contender) -> float:
    return statistics.median(outcome.run_s for outcome in contender.outcomes)


def _note(contender: Contender) -> str:
    is_exact = all(outcome.is_exact for outcome in contender.outcomes)
    return f" ({contender.outcomes[0].version}){'' if is_exact else ', NOT the tokens asked for'}"


def _planned(contender: Contender) -> str:
    if not contender.is_xgpt:
        return ""
    schedule = json.loads((contender.output / "schedule.json").read_text(encoding="utf-8"))
    return f"{sum(pool['kv_tokens'] for pool in schedule['deployment']['pools']):,}"


def _spread(values: Sequence[float]) -> str:
    return f"**{statistics.median(values):.1f}** ({min(values):.1f} to {max(values):.1f})"


def trace_page(path: Path) -> str:
    """Mooncake's trace as a job: each block of a prompt stands for its tokens."""
    with path.open(encoding="utf-8") as file:
        prompts = [_blocks(json.loads(line)) for line in file]
    total, ordered = sum(prompt.tokens for prompt in prompts), sorted(prompts)
    lines = ["# Shared prefixes of Mooncake's conversation trace", "",
             f"{today()}. {len(prompts):,} prompts, {total:,} input tokens. Share of these that is "
             "saved by a cache of so many tokens, of which the least recently used go.", "",
             *table(("tokens kept", "in the input's order", "in the order of prefixes"))]
    for kept in KEPT:
        shares = [_saved_tokens(order, kept or total) / total for order in (prompts, ordered)]
        lines.append(f"| {f'{kept:,}' if kept else 'all'} | "
                     f"{' | '.join(f'{share:.1%}' for share in shares)} |")
    return "\n".join(lines)


class Prompt(NamedTuple):
    """`blocks`: equal blocks have equal tokens before them as well."""

    blocks: tuple[int, ...]
    tokens: int

    def sizes(self) -> Iterator[tuple[int, int]]:
        """(block, its tokens), all of BLOCK_TOKENS but the last."""
        for place, block in enumerate(self.blocks):
            yield block, min(BLOCK_TOKENS, self.tokens - place * BLOCK_TOKENS)


def _blocks(line: dict[str, Any]) -> Prompt:
    return Prompt(tuple(line["hash_ids"]), line["input_length"])


def _saved_tokens(prompts: Sequence[Prompt], kept: int) -> int:
    """Tokens that a cache of `kept` tokens saves, which gives up the ends of the prefixes that were
    used longest ago."""
    cache, held, saved = dict[int, int](), 0, 0  # the block used longest ago comes first
    for prompt in prompts:
        there = sum(size for _, size in takewhile(lambda one: one[0] in cache, prompt.sizes()))
        saved += min(there, prompt.tokens - 1)
        for block, size in reversed([*prompt.sizes()]):
            held += size - cache.pop(block, 0)
            cache[block] = size
        while held > kept:
            held -= cache.pop(next(iter(cache)))
    return saved


def main() -> None:
    given = _arguments()
    if given.trace:
        write("prefixes-trace", trace_page(given.trace), given.out)
    else:
        compare_jobs(given)


def _arguments() -> argparse.Namespace:
    parser = options(__doc__)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--part", type=int, default=1)
    parser.add_argument("--only", help="one model of the file")
    parser.add_argument("--job", default="", help="jobs whose names begin so")
    parser.add_argument("--no-wait", action="store_true")
    parser.add_argument("--trace", type=Path)
    given = parser.parse_args()
    if (given.trace is None) == (given.config is None):
        parser.error("either --config or --trace")
    return given


def compare_jobs(given: argparse.Namespace) -> None:
    """Writes the page again after each job."""
    lines = ["# Shared prefixes", "", about(__doc__), "",
             f"{today()}, {machine()}, {given.threads} threads. Medians and ranges of "
             f"{given.rounds} rounds in turns, after one uncounted. `run`: without loading. "
             "`others`: most that other processes used of the cores during a run.", ""]
    config = yaml.safe_load(given.config.read_text(encoding="utf-8"))
    quiet = Quiet(patience_s=0.0 if given.no_wait else PATIENCE_S)
    with tempfile.TemporaryDirectory() as name:
        for model in config["models"]:
            for place, job in enumerate(jobs(given.part)):
                if given.only in (None, model["name"]) and job.name.startswith(given.job):
                    scratch = Path(name) / f"{model['name']}-{place}"
                    scratch.mkdir()
                    write_workload(job.queries, scratch / "workload.jsonl")
                    setting = Setting(
                        model=model, queries=job.queries, workload=scratch / "workload.jsonl",
                        threads=given.threads, scratch=scratch, quiet=quiet)
                    lines += compare(job, setting, config, given.rounds)
                    write("prefixes", "\n".join(lines), given.out)


if __name__ == "__main__":
    main()
