"""Are vLLM's greedy tokens under our schedules transformers', and its steps the replay's?

    python benchmarks/engine_exactness.py FOLDER --python VLLM_PYTHON --model MODEL_FOLDER
        [--workload FILE] [--queries 200] [--threads 2] [--policies rra,sarathi,vllm]
        [--profile FILE] [--out benchmarks/results]

The queries of benchmarks/peers.py in float32, each with exactly its number of tokens. transformers
is shown every query with the tokens that vLLM gave it, in one pass, and says at each position which
token it finds likeliest: up to the first position whose two best logits are less than 1e-3 apart
they must be the same. Two sums of the same numbers in another order may differ there, and
everything behind it hangs on that token: such positions are counted. FOLDER keeps what was run.
No times are told, so the machine may be at other work: `--profile` is of vLLM's steps in float32,
however disturbed, by which the schedules are found without measuring it again.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import yaml
from several_runs import SeveralRuns
from workload import Query, read_or_draw, write_job

from xgpt.app.opened import open_file
from xgpt.core.queries import QueryLengths
from xgpt.core.schedule_file import load_schedule
from xprofiler.roofline import Roofline
from xsimulator.replay.job import replay_job

NEAR_TIE = 1e-3  # between the two best logits


class Compared(NamedTuple):
    """Of one run: the tokens that were compared; the queries whose comparison ended at a near-tie;
    all tokens that were given; and those that differ where no near-tie excuses it."""

    tokens: int
    cut: int
    given: int
    wrong: int


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", required=True, help="of the environment that has vLLM")
    parser.add_argument("--model", type=Path, required=True, help="folder, float32")
    parser.add_argument("--workload", type=Path)
    parser.add_argument("--queries", type=int, default=200)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--policies", default="rra,sarathi,vllm")
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    folder, model = given.folder.resolve(), given.model.resolve()
    queries = read_or_draw(given.workload)[:given.queries]
    job = yaml.safe_load(write_job(folder, queries, str(model), {
        "engine": "vllm", "engine_python": given.python, "dtype": "float32", "ranks": 1,
        # a machine at other work is slower than any profile: the schedule stays as it is
        "step_times": "off", "threads_per_rank": given.threads}).read_text(encoding="utf-8"))
    job["workload"]["requests"] = str(folder / "requests.jsonl")
    if given.profile is not None:
        job["profile"] = str(given.profile.resolve())
    several, policies = SeveralRuns(folder), given.policies.split(",")
    several.submit((policy, 1, {**job, "schedule": {"policy": policy}}) for policy in policies)
    torch.set_num_threads(given.threads)
    text = page(model, queries, {policy: several.runs(policy)[0].place for policy in policies})
    print(text)
    if given.out is not None:
        path = given.out / f"engine-exact-vllm-{time.strftime('%Y-%m-%d')}.md"
        path.write_text(text + "\n", encoding="utf-8")


def page(model: Path, queries: Sequence[Query], places: dict[str, Path]) -> str:
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(
        model, trust_remote_code=False, dtype=torch.float32).eval()
    lines = ["| rule | queries | tokens, of wanted | compared | queries cut at a near-tie "
             "| differ elsewhere | steps as replayed |", "|---|---|---|---|---|---|---|"]
    is_right, known = True, _Known()
    for policy, place in places.items():
        results = lines_of(place / "out" / "results.jsonl")
        answers = [line["output_ids"] for line in results]
        found = compared(reference, queries, answers, known)
        wanted = sum(query.output_tokens for query in queries)
        logged, expected = steps_of(place), replayed(place, queries)
        same = sum(a == b for a, b in zip(logged, expected, strict=False))
        is_right &= found.wrong == 0 and found.given == wanted and logged == expected
        lines.append(
            f"| {policy} | {len(answers)} | {found.given:,} of {wanted:,} | {found.tokens:,} | "
            f"{found.cut} | {found.wrong} | {same} of {max(len(logged), len(expected))} |")
    return "\n".join([*lines, "", "as promised" if is_right else "NOT as promised"])


class _Known(dict[tuple[int, ...], tuple[int, int]]):
    """Of a query's tokens and its answer's, one after the other: (tokens up to the first near-tie,
    those of them that differ). Most rules give the same answer, which is looked at once."""


def compared(reference: Any, queries: Sequence[Query], answers: Sequence[Sequence[int]],
             known: _Known) -> Compared:
    tokens = cut = wrong = 0
    for query, answer in zip(queries, answers, strict=True):
        key = (*query.input_ids, *answer)
        if key not in known:
            known[key] = _looked_at(reference, key, len(answer))
        first, differ = known[key]
        cut += first < len(answer)
        wrong += differ
        tokens += first
    return Compared(tokens, cut, sum(map(len, answers)), wrong)


def _looked_at(reference: Any, ids: Sequence[int], count: int) -> tuple[int, int]:
    """(tokens up to the first near-tie, those of them that differ) of the last `count`."""
    with torch.no_grad():
        # the row before a token is that which chooses it
        logits = reference(torch.tensor([ids]), logits_to_keep=count + 1).logits[0, :-1]
    best = logits.topk(2, dim=1)
    ties = (best.values[:, 0] - best.values[:, 1] < NEAR_TIE).nonzero()
    first = int(ties[0, 0]) if len(ties) else count
    return first, int((best.indices[:first, 0] != torch.tensor(ids[-count:])[:first]).sum())


def steps_of(place: Path) -> list[tuple[Any, ...]]:
    return [(s["kind"], s["group"], s["phase"], s["iteration"], s["queries"], s["tokens"])
            for s in lines_of(place / "out" / "steps.jsonl")]


def replayed(place: Path, queries: Sequence[Query]) -> list[tuple[Any, ...]]:
    problem = open_file(place / "job.yaml").problem
    outputs = np.array([query.output_tokens for query in queries])
    pool, = replay_job(
        problem, Roofline(problem.model, problem.cluster.device, problem.dtype),
        load_schedule(place / "out" / "schedule.json").estimate, QueryLengths(
            inputs=np.array([len(query.input_ids) for query in queries]), outputs=outputs,
            most_outputs=outputs)).pools
    return [(step.kind.value, step.group, step.phase, step.iteration, encoded + decoded,
             tokens + decoded) for step, encoded, decoded, tokens in zip(
        pool.steps, pool.encoded.tolist(), pool.decoded.tolist(), pool.tokens.tolist(),
        strict=True)]


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    main()
