"""Held-out points and full steps, predicted from a profile measured moments before.

    python benchmarks/profile_accuracy.py [--models smollm2-135m opt-125m] [--budget 45s]
                                          [--ranks 2] [--out benchmarks/results]

Per model: a fresh profile within the budget, for degree 1 and one shard of a larger degree; then,
on the same ranks, random batches, lengths and degrees that are not on the profile's grid, taken
apart as the profiler does (operators), and steps of the whole model timed from outside, without
marks (steps). The machine must be otherwise idle.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from xgpt.app.local_profile import local_profile, wanted_profile
from xgpt.app.opened import open_file
from xgpt.core.deployment import StageAssignment
from xgpt.core.lengths import empirical
from xgpt.core.local import detect
from xgpt.core.model import refuse_tp_degree
from xgpt.core.units import parse_seconds
from xgpt.launch.launcher import RankProgram
from xgpt.launch.local import LocalLauncher
from xprofiler.measure.bench import LayerBench
from xprofiler.measure.clock import CpuClock
from xprofiler.measure.probe import StepParts
from xprofiler.measure.ranks import Ranks, connect, own_device
from xprofiler.profile import Profile
from xprofiler.profile_file import load_profile, save_profile
from xprofiler.profile_timing import ProfileTiming
from xprofiler.timing import Operator
from xsimulator.layer_times import LayerTimes
from xsimulator.stage_times import StageTimes

BATCHES = (1, 2, 4, 7, 11, 16, 23, 32, 45, 64)
DECODE_POINTS, ENCODE_POINTS, WORST = 24, 14, 6
OPERATORS = {"layer rest": "rest_s", "attention": "attention_s", "head": "head_s"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["smollm2-135m", "opt-125m"])
    parser.add_argument("--budget", type=parse_seconds, default=45.0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    texts = [one_model(name, arguments) for name in arguments.models]
    device = detect(arguments.ranks).device.name
    head = (f"# Profile against held-out points, {device}, {arguments.ranks} ranks, "
            f"torch {torch.__version__}, {time.strftime('%Y-%m-%d')}\n")
    text = "\n".join([head, *texts])
    print(text)
    if arguments.out is not None:
        path = arguments.out / f"profile-{device}-{time.strftime('%Y-%m-%d')}.md"
        path.write_text(text, encoding="utf-8")


def one_model(name: str, arguments: argparse.Namespace) -> str:
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job.yaml"
        job.write_text(f"model: {name}\ncluster: local\nrun: {{ranks: {arguments.ranks}}}\n"
                       "workload: {requests: {count: 64},\n"
                       "  input_tokens: {mean: 90, std: 60, max: 300},\n"
                       "  output_tokens: {mean: 60, std: 30, max: 200}}\n")
        session = open_file(job)
        spec = session.problem.model
        larger = next(d for d in (2, 3, 4, 5) if refuse_tp_degree(spec, d) is None)
        began = time.monotonic()
        wanted = wanted_profile(session.job, session.problem, (1, larger))
        # two degrees, so twice the budget of a job that runs one
        profile = local_profile(wanted, session.tell, budget_s=2 * arguments.budget, again=True)
        took_s = time.monotonic() - began
        save_profile(profile, Path(folder) / "profile.json")
        request = Path(folder) / "request.json"
        request.write_text(json.dumps({"profile": str(Path(folder) / "profile.json"),
                                       "found": str(Path(folder) / "found.json"),
                                       "degrees": [1, larger], "seed": arguments.seed}))
        ranks = RankProgram(module="benchmarks.profile_accuracy", argument=request,
                            count=arguments.ranks)
        LocalLauncher().run(ranks, watch=lambda: None)
        found = json.loads((Path(folder) / "found.json").read_text())
    return report(name, session.problem.dtype, took_s, profile, found)


def report(name: str, dtype: str, took_s: float, profile: Profile, found: dict[str, Any]) -> str:
    lines = [f"## {name}, {dtype}", "",
             f"Profiled degrees {', '.join(map(str, profile.tp_degrees))} in {took_s:.0f} s "
             f"({sum(len(t) for t in profile.tables.values())} points).", "",
             "| held out | points | median error | 95th percentile | bias |",
             "|---|---|---|---|---|"]
    pooled: list[Any] = []
    for row, pairs in found["operators"].items():
        pooled += pairs
        lines.append(_row(row, pairs))
    worst = sorted(((abs(p / m - 1), name, where, p, m)
                    for name, pairs in found["operators"].items()
                    for p, m, where in pairs), reverse=True)[:WORST]
    lines += [_row("**all of these**", pooled), "", "Furthest off: " + "; ".join(
        f"{name} ({where}): {p * 1e6:.0f} us predicted, {m * 1e6:.0f} us measured"
        for _, name, where, p, m in worst) + ".", "",
              "| full step, whole model | batches | median error | 95th percentile | bias |",
              "|---|---|---|---|---|"]
    lines += [_row(row, pairs) for row, pairs in found["steps"].items()]
    for row, pairs in found["steps"].items():
        ratios = ", ".join(f"{m / p:.3f}" for p, m in pairs)
        lines.append(f"\n{row}, measured / predicted at batch {', '.join(map(str, BATCHES))}: "
                     f"{ratios}")
    return "\n".join(lines) + "\n"


def _row(name: str, pairs: list[Any]) -> str:
    ratios = np.array([m / p for p, m, *_ in pairs])
    errors = np.abs(1 / ratios - 1)
    return (f"| {name} | {len(pairs)} | {np.median(errors):.1%} | {np.quantile(errors, .95):.1%} | "
            f"{np.median(ratios) - 1:+.1%} |")


# --- on the ranks -------------------------------------------------------------------------------

def measure(request: dict[str, Any]) -> None:
    profile = load_profile(Path(request["profile"]))
    assert profile.model is not None
    ranks, of = connect(profile.metadata.ranks), profile.metadata
    torch.set_num_threads(of.threads_per_rank)
    timing, rng = ProfileTiming(profile), np.random.default_rng(request["seed"])
    found: dict[str, Any] = {"operators": {}, "steps": {}}
    with torch.inference_mode():
        for degree in request["degrees"]:
            bench = LayerBench(profile.model, getattr(torch, of.dtype), num_stages=of.ranks,
                               tp_degree=degree, device=own_device(of.device, ranks))
            for phase, points in (("decode", _decodes(rng, profile)), ("encode", _encodes(rng))):
                for lengths in points:
                    held_out(ranks, bench, timing, phase, lengths, degree, found["operators"])
        full_steps(ranks, profile, timing, rng, found["steps"])
    if ranks.rank == 0:
        Path(request["found"]).write_text(json.dumps(found))


def _decodes(rng: np.random.Generator, profile: Profile) -> list[list[int]]:
    """Random batches with ragged contexts; sizes the profile measured are passed over."""
    table = profile.table(Operator.DECODE_ATTENTION.value)
    known_x, known_y = {p.x for p in table}, {p.y for p in table}
    points: list[list[int]] = []
    while len(points) < DECODE_POINTS:
        queries = round(float(np.exp(rng.uniform(0, np.log(130)))))
        longest = round(float(np.exp(rng.uniform(np.log(12), np.log(500)))))
        if longest in known_y or (queries in known_x and queries > 2):
            continue
        contexts = rng.integers(max(longest // 4, 1), longest + 1, queries)
        contexts[0] = longest
        points.append([int(c) for c in contexts])
    return points


def _encodes(rng: np.random.Generator) -> list[list[int]]:
    points = []
    for _ in range(ENCODE_POINTS):
        queries = round(float(np.exp(rng.uniform(0, np.log(16)))))
        longest = min(round(float(np.exp(rng.uniform(np.log(12), np.log(500))))), 2000 // queries)
        points.append([int(n) for n in rng.integers(max(longest // 3, 3), longest + 1, queries)])
    return points


def held_out(ranks: Ranks, bench: LayerBench, timing: ProfileTiming, phase: str,
             lengths: list[int], degree: int, found: dict[str, Any]) -> None:
    """Predicted and measured seconds of each operator of one step."""
    step = bench.decode(lengths) if phase == "decode" else bench.encode(lengths)
    steps = ranks.steady(step)
    rows = len(lengths) if phase == "decode" else sum(lengths)
    predicted = StepParts(
        whole_s=0.0, embed_s=0.0, rest_s=_seconds(timing, Operator.LAYER_REST, degree, rows),
        head_s=_seconds(timing, Operator.HEAD, degree, len(lengths)),
        attention_s=_seconds(timing, Operator.DECODE_ATTENTION, degree, rows, max(lengths) + 1)
        if phase == "decode" else _seconds(timing, Operator.ENCODE_ATTENTION, degree, lengths,
                                           len(lengths)))
    for name, part in OPERATORS.items():
        measured_s = float(np.median([getattr(s, part) for s in steps]))
        sizes = f"{len(lengths)} queries, longest {max(lengths)}, {sum(lengths)} tokens"
        found.setdefault(f"{phase} {name}, degree {degree}", []).append(
            (getattr(predicted, part), measured_s, sizes))


def _seconds(timing: ProfileTiming, operator: Operator, degree: int, x: Any, y: Any = 0) -> float:
    return float(np.sum(timing.operator_s(operator, x, y, tp_degree=degree)))


class Whole:
    """Times a step from outside alone, with no mark in it (see xprofiler.measure.probe.Probe)."""

    def time(self, step: Callable[[], object]) -> StepParts:
        clock = CpuClock()
        start = clock.mark()
        step()
        return StepParts(whole_s=clock.seconds(start, clock.mark()), rest_s=0.0, attention_s=0.0,
                         embed_s=0.0, head_s=0.0)


def full_steps(ranks: Ranks, profile: Profile, timing: ProfileTiming, rng: np.random.Generator,
               found: dict[str, Any]) -> None:
    """Steps of the whole model on each rank, from outside; predicted by the simulator's sum."""
    spec, of = profile.model, profile.metadata
    assert spec is not None
    bench = LayerBench(spec, getattr(torch, of.dtype), num_stages=1)
    bench.probe = Whole()
    stage = StageAssignment(index=0, ranks=(0,), first_layer=0, num_layers=spec.num_layers)
    cluster = detect(of.ranks)
    times = StageTimes(LayerTimes(spec, timing, cluster.intra_link, of.dtype, empirical([1])),
                       cluster, [stage])
    for batch in BATCHES:
        inputs = [int(n) for n in rng.integers(15, max(min(150, 2600 // batch), 16), batch)]
        contexts = [int(n) for n in rng.integers(40, 300, batch)]
        measured_s = _outside_s(ranks, bench.encode(inputs))
        each_s = times.encode_attention_s(np.array(inputs), batch)
        attention = {d: np.sum(s) for d, s in each_s.items()}
        found.setdefault("encode step", []).append((float(times.encode_s(
            float(sum(inputs)), float(batch), attention)[0]), measured_s))
        measured_s = _outside_s(ranks, bench.decode(contexts))
        found.setdefault("decode step", []).append((float(times.decode_s(
            float(batch), float(max(contexts) + 1))[0]), measured_s))


def _outside_s(ranks: Ranks, step: Any) -> float:
    return float(np.median([s.whole_s for s in ranks.steady(step)]))


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].endswith("request.json"):
        measure(json.loads(Path(sys.argv[1]).read_text()))
    else:
        main()
