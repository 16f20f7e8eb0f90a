"""Published closed loops, simulated by two programs: the one of `xgpt models --accuracy`, and the
replay of the same loop as a job.

    python benchmarks/closed_loops.py [--data ../shared/data] [--every 1]
        [--out benchmarks/results]

The job has ten requests for each client, and a schedule that holds as many requests as there are
clients. Lengths are fixed, or drawn between 0.8 and 1 times those stated, as for the first program.
*From sending* is the replay's mean of what a client waits for the first token (`loop_ttft_s`).
*From prefill* is what a plan has as `figures.ttft_s`, at the 99th percentile. Left out: rows whose
inputs the engine's cache held, models that the catalog has not, and a row that is planned not to
fit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from published.runs import serving_points
from runner import about, options, table, today, write

import xgpt
from xgpt.app.schedule import job_with_times
from xgpt.core import catalog
from xgpt.core.problem import QueryLengths
from xsimulator.closed_loop import ROUNDS, LoopTimes
from xsimulator.measured_loops import ServingPoint, errors_of, predicted
from xsimulator.replay.replicas import replayer_of

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
SEED = 3
APART = """Where TTFT is far apart, the KV cache does not hold all clients: the job reserves room
for whole outputs, and the loop's program for half of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """A measured loop. Seconds: `loop` by the loop's program; of the replay as a job, TTFT from
    sending and from the start of prefill, and TPOT."""

    point: ServingPoint
    loop: LoopTimes
    sent_ttft_s: float
    prefill_ttft_s: float
    tpot_s: float


def loop_of(point: ServingPoint) -> Loop | None:
    """The loop by both programs; None if it is planned not to fit."""
    row, drawn = catalog.engine(point.row), np.random.default_rng(SEED)
    eight = {} if not point.weight_dtype else {"weight_dtype": point.weight_dtype} | (
        {"kv_dtype": point.weight_dtype} if row.fp8_cache else {})
    count, degree = ROUNDS * point.concurrency, point.tp_degree
    job = xgpt.load({
        "model": point.model, "cluster": f"{degree}x{point.device}", "plan": {"engine": point.row},
        "run": eight, "workload": {
            "requests": {"count": count}, "input_tokens": point.input_tokens,
            "output_tokens": point.output_tokens},
        "schedule": {"policy": "sarathi" if row.mixes else "vllm", "replicas": 1,
                     "max_active": point.concurrency, "token_budget": row.step_tokens,
                     "tp_degree": degree, "tp_gpus": degree if degree > 1 else 0}})
    estimate = xgpt.simulate(job).estimate
    if not estimate.figures.fits:
        return None
    opened, timing = job_with_times(job)
    shares = drawn.uniform(point.shortest, 1.0, (2, count))
    inputs, outputs = (np.maximum((most * own).astype(np.int64), 1) for most, own in zip(
        (point.input_tokens, point.output_tokens), shares, strict=True))
    found = replayer_of(opened.problem, timing, estimate).run(QueryLengths(
        inputs=inputs, outputs=outputs, most_outputs=np.full(count, point.output_tokens)))
    sent_s = found.loop_ttft_s(point.concurrency)
    assert sent_s is not None and estimate.figures.ttft_s is not None, f"{point = }"
    return Loop(point=point, loop=predicted(point), sent_ttft_s=sent_s,
                prefill_ttft_s=estimate.figures.ttft_s,
                tpot_s=float(found.times.tpot_s(found.output_tokens).mean()))


def lines_of(name: str, loops: Sequence[Loop]) -> Iterator[str]:
    measured = [one.point.ttft_s for one in loops]
    cells = [f"{error.mean:.0%} ({error.bias:+.0%})" for error in (
        errors_of([one.loop.ttft_s for one in loops], measured),
        errors_of([one.sent_ttft_s for one in loops], measured),
        errors_of([one.prefill_ttft_s for one in loops], measured))]
    for key, of in (("sent_ttft_s", "ttft_s"), ("tpot_s", "tpot_s")):
        apart = errors_of([getattr(one, key) for one in loops],
                          [getattr(one.loop, of) for one in loops])
        cells.append(f"{apart.median:.1%} ({apart.p90:.1%}, {apart.worst:.1%})")
    yield f"| {name} | {len(loops)} | {' | '.join(cells)} |"


def page(loops: Sequence[Loop]) -> list[str]:
    groups: dict[str, list[Loop]] = defaultdict(list)
    for one in loops:
        groups[f"{one.point.row}, {one.point.device}"].append(one)
    header = ("engine, GPU", "rows", "TTFT off, loop's program: mean (bias)",
              "replay of the job, from sending", "from prefill",
              "both programs apart, TTFT: median (ninth decile, worst)", "TPOT")
    return ["# Closed loops as jobs", "", *about(__doc__).splitlines(), "", *table(header),
            *(line for name, own in sorted(groups.items()) for line in lines_of(name, own)),
            *lines_of("all", loops), "",
            *APART.splitlines(), "", f"Times are computed, {today()}."]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--every", type=int, default=1, help="take one row in so many")
    arguments = parser.parse_args()
    points = [point for point in serving_points(arguments.data / "silicon" / "serving_points.csv")
              if point.model in catalog.names("model") and not point.cached]
    loops = [loop for point in points[::arguments.every] if (loop := loop_of(point)) is not None]
    write("closed-loops", "\n".join(page(loops)), arguments.out)


if __name__ == "__main__":
    main()
