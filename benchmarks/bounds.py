"""Latency bounds: what `policy: auto` chooses for each, run, beside each policy that xgpt searches
and a static batch, each in its best configuration that keeps the bound, by the same ranks and
kernels.

    python benchmarks/bounds.py FOLDER [--turns 3] [--ranks 2] [--most 8] [--model smollm2-135m]
        [--task T --queries 300] [--factors 0.4,0.6,2] [--policies auto,rra,...]
        [--peak 3.9e12] [--out benchmarks/results]

QUERIES of forced lengths (INPUTS, OUTPUTS), all there at the start. The bounds are FACTORS of the
latency of what auto chooses without a bound, for 99 % of all queries. Every configuration is
planned from one profile, measured first, with the same confidence; what counts is what the runs
measured. They are run in turns: every policy under every bound once, then all again.

FOLDER keeps what was run: the same command goes on, and `--most` ends it after so many runs. The
machine must be otherwise idle. On a GPU without `--ranks`: one rank for each. There a column says
what share of the memory's bandwidth the decode steps reached.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from runner import options, write
from several_runs import Run, SeveralRuns, range_words

from xgpt.core import catalog
from xgpt.core.model import ModelSpec
from xgpt.core.units import DTYPE_BYTES

AUTO = "auto"
POLICIES = (AUTO, "rra", "waa-c", "sarathi", "vllm", "orca", "ft")


class Law(NamedTuple):
    """How many tokens: a normal law on [1, most]."""

    words: str
    mean: float
    std: float
    most: int

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        """Whole numbers; those outside are drawn again."""
        found: list[int] = []
        while len(found) < count:
            value = round(rng.normal(self.mean, self.std))
            found += [value] * (1 <= value <= self.most)
        return found


USUAL = Law("N(64, 40) on [1, 140]", 64, 40, 140), Law("N(32, 15) on [1, 80]", 32, 15, 80)


class Row(NamedTuple):
    bound_s: float
    policy: str
    runs: list[Run]  # none: no configuration keeps the bound

    @property
    def measured_qps(self) -> float:
        return statistics.median(run.metrics["throughput_qps"]["measured"] for run in self.runs)

    @property
    def kept(self) -> int:
        """In how many of its runs 99 % of the queries kept the bound."""
        return sum(run.metrics["latency_p99_s"]["measured"] <= self.bound_s for run in self.runs)

    @property
    def keeps(self) -> bool:
        return bool(self.runs) and 2 * self.kept > len(self.runs)


class Asked(NamedTuple):
    """What is compared, on what."""

    model: str
    queries: int
    inputs: Law
    outputs: Law
    factors: tuple[float, ...]
    policies: tuple[str, ...]
    ranks: int | None


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--most", type=int, help="runs, after which it ends")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--task", help="of the catalog, whose lengths are drawn")
    parser.add_argument("--queries", type=int, default=32)
    parser.add_argument("--factors", default="0.4,0.6,2")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--peak", type=float, help="what a read of a GPU's memory reaches, in "
                        "bytes a second (default: of the profile, where it was measured whole)")
    arguments = parser.parse_args()
    several = SeveralRuns(arguments.folder)
    laws = USUAL if arguments.task is None else laws_of(arguments.task)
    asked = Asked(arguments.model, arguments.queries, *laws,
                  tuple(map(float, arguments.factors.split(","))),
                  tuple(arguments.policies.split(",")), arguments.ranks)
    job = job_of(arguments.folder, asked)
    bounds = bounds_of(several, arguments.folder, job, asked.factors)
    several.submit(((name_of(bound_s, policy), turn, with_bound(job, bound_s, policy))
                    for turn in range(1, arguments.turns + 1) for bound_s in bounds
                    for policy in asked.policies), most=arguments.most)
    rows = [Row(bound_s, policy, runs) for bound_s in bounds for policy in asked.policies
            if (runs := several.runs(name := name_of(bound_s, policy)))
            or several.keeps_no_bound(name)]
    text = table(rows, asked, arguments.peak or several.peak_bytes_per_s())
    write("bounds", text, arguments.out)


def laws_of(task: str) -> tuple[Law, Law]:
    """Inputs and outputs of a task of the catalog."""
    lengths = catalog.task_row(task)
    found = [Law(f"N({law.mean:g}, {law.std:g}) on [1, {law.max}]", law.mean, law.std, law.max)
             for law in (lengths.input_tokens, lengths.output_tokens)]
    return found[0], found[1]


def job_of(folder: Path, asked: Asked) -> dict[str, Any]:
    """The job but for its bound and policy; its requests are written to the folder."""
    rng = np.random.default_rng(20261121)
    folder.mkdir(parents=True, exist_ok=True)
    inputs, outputs = (law.draw(rng, asked.queries) for law in (asked.inputs, asked.outputs))
    (folder / "requests.jsonl").write_text("".join(
        json.dumps({"id": f"r{i:03d}", "tokens": rng.integers(100, 30_000, size=n).tolist(),
                    "forced_tokens": m}) + "\n"
        for i, (n, m) in enumerate(zip(inputs, outputs, strict=True))), encoding="utf-8")
    ranks = {} if asked.ranks is None else {"ranks": asked.ranks}
    return {"model": asked.model, "cluster": "local",
            "workload": {"requests": str((folder / "requests.jsonl").absolute()),
                         "input_tokens": "from_requests",
                         "output_tokens": {"mean": float(np.mean(outputs)),
                                           "std": float(np.std(outputs)), "max": max(outputs)}},
            "run": {**ranks, "dtype": "bfloat16", "weights": "random"}}


def bounds_of(several: SeveralRuns, folder: Path, job: dict[str, Any],
              factors: Sequence[float]) -> list[float]:
    """Seconds; of one search without a bound, which measures the profile."""
    kept = folder / "free.json"
    if not kept.is_file():
        place = folder / "free.yaml"
        place.write_text(json.dumps(with_bound(job, math.inf, AUTO)), encoding="utf-8")
        done = several.xgpt("schedule", str(place), "--json")
        if done.returncode != 0:
            sys.exit(f"exit code {done.returncode}\n{done.stderr[-2000:]}")
        kept.write_text(done.stdout, encoding="utf-8")
    latency_s = json.loads(kept.read_text(encoding="utf-8"))["figures"]["latency_s"]
    return [round(factor * latency_s, 3) for factor in factors]


def with_bound(job: dict[str, Any], bound_s: float, policy: str) -> dict[str, Any]:
    bound = "inf" if math.isinf(bound_s) else bound_s
    return {**job, "schedule": {"policy": policy},
            "constraint": {"latency_s": bound, "kind": "queries", "quantile": 0.99}}


def name_of(bound_s: float, policy: str) -> str:
    return f"{bound_s:g}s-{policy}"


def row(one: Row, model: str, peak_bytes_per_s: float) -> str:
    if not one.runs:
        return f"| {one.bound_s:.2f} | {one.policy} | none keeps the bound | | | | | | |"
    bandwidth = range_words(f"{share:.0%}" for run in one.runs
                            if (share := decode_share(run, model, peak_bytes_per_s)) is not None)
    predicted = [statistics.median(run.metrics[key]["predicted"] for run in one.runs)
                 for key in ("throughput_qps", "latency_p99_s")]
    qps, p99 = ([run.metrics[key]["measured"] for run in one.runs]
                for key in ("throughput_qps", "latency_p99_s"))
    others = max(run.metrics.get("others_cpu_share") or 0.0 for run in one.runs)
    return (f"| {one.bound_s:.2f} | {one.policy} | {range_words(run.words for run in one.runs)} | "
            f"{predicted[0]:.2f} | {' '.join(f'{value:.2f}' for value in qps)} | "
            f"{one.measured_qps:.2f} | {predicted[1]:.2f} | "
            f"{' '.join(f'{value:.2f}' for value in p99)}, kept {one.kept} of {len(one.runs)} | "
            f"{bandwidth or f'{others:.0%}'} |")


def decode_share(run: Run, model: str, peak_bytes_per_s: float) -> float | None:
    """Of the memory's bandwidth, in decode steps; None: not on a GPU, or of several ranks, or
    nobody knows what a read reaches."""
    if not peak_bytes_per_s or run.metrics["ranks"] != 1 or (
            run.metrics["machine"]["device"].startswith("cpu-")):
        return None
    steps = list(decode_steps(run.place / "out", catalog.model(model), run.metrics["dtype"]))
    return sum(step.num_bytes for step in steps) / sum(
        step.seconds for step in steps) / peak_bytes_per_s if steps else None


class DecodeStep(NamedTuple):
    queries: int
    num_bytes: float
    seconds: float


def decode_steps(output: Path, model: ModelSpec, dtype: str) -> Iterator[DecodeStep]:
    """Those of a run whose rank holds the whole model."""
    item_bytes = DTYPE_BYTES[dtype]
    for line in (output / "steps.jsonl").read_text(encoding="utf-8").splitlines():
        step = json.loads(line)
        if step["kind"] != "decode":
            continue
        queries = step["queries"]
        yield DecodeStep(queries, item_bytes * moved_elements(model, queries,
                                                              step["context_tokens"]),
                         step["end_s"] - step["start_s"])


def moved_elements(model: ModelSpec, queries: int, context: float) -> float:
    """The least that a decode step reads and writes: weights, of a mixture those of the experts
    that are hit, the cache, and what goes into and out of layers, attention and head."""
    hidden, width, kv = (model.hidden_size, model.num_heads * model.head_dim,
                         model.kv_elements_per_token_layer)
    experts, passing = model.decoder.experts, 2 * width + kv
    inner = model.mlp_columns if experts is None else float(
        experts.inner * experts.hit(np.array(float(queries))))
    layer = hidden * (passing + (3 if model.is_gated_mlp else 2) * inner) + queries * (
        2 * hidden + passing)
    cached = queries * (context * kv + 2 * width)
    return model.num_layers * (layer + cached) + hidden * (model.vocab_size + queries)


def table(rows: list[Row], asked: Asked, peak_bytes_per_s: float) -> str:
    first = next(one.runs[0].metrics for one in rows if one.runs)
    what = (__doc__ or "").split(chr(10) * 2)[2].replace("QUERIES", f"{asked.queries} queries")
    for name, words in (("INPUTS", f"inputs {asked.inputs.words}"),
                        ("OUTPUTS", f"outputs {asked.outputs.words}"),
                        ("FACTORS", ", ".join(f"{factor:g}" for factor in asked.factors))):
        what = what.replace(name, words)
    last = "others" if first["machine"]["device"].startswith("cpu-") else (
        f"decode steps, of {peak_bytes_per_s / 1e12:.2f} TB/s that a read reaches")
    lines = [
        f"# Latency bounds, {asked.model} ({first['model_source']}), {first['machine']['device']}, "
        f"{first['ranks']} rank{'s' * (first['ranks'] > 1)}, {first['dtype']}", "",
        f"{first['date'][:10]}. {what}", "",
        "| bound (s) | policy | configuration | requests/s predicted | measured, each | median |"
        f" predicted P99 | measured P99 of each run | {last} |", "|" + 9 * "---|",
        *(row(one, asked.model, peak_bytes_per_s) for one in rows), ""]
    return "\n".join([*lines, *(f"- {_verdict([one for one in rows if one.bound_s == bound_s])}"
                                for bound_s in dict.fromkeys(one.bound_s for one in rows))])


def _verdict(rows: list[Row]) -> str:
    """Auto beside the best of the others, of those that kept the bound in most of their runs."""
    head = f"Bound {rows[0].bound_s:.2f} s: "
    auto = next((one for one in rows if one.policy == AUTO), None)
    kept = [one for one in rows if one.keeps and one is not auto]
    if auto is None or not auto.keeps or not kept:
        return head + (f"kept in most runs by {', '.join(r.policy for r in rows if r.keeps)}."
                       if any(r.keeps for r in rows) else "kept in most runs by none.")
    best = max(kept, key=lambda one: one.measured_qps)
    return head + (f"auto at {auto.measured_qps / best.measured_qps:.2f} times the throughput of "
                   f"the best of the others that kept it ({best.policy}).")


if __name__ == "__main__":
    main()
