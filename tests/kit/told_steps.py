"""What ranks would tell of their steps, were these `factor` times as long as a source says."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate
from xprofiler.timing import TimingSource
from xrunner.io.beat import BEATS, RankState, ToldStep
from xscheduler.copies import problem_for
from xscheduler.live.pace import expected_s
from xsimulator.replay.step_clock import StepClocks

Factors = Callable[[str, int], float]  # (kind, stage)


def steps_of(problem: Problem, timing: TimingSource, estimate: Estimate, factor: Factors,
             count: int = 24) -> dict[int, list[ToldStep]]:
    """By stage, `count` steps of each kind that its pool takes, of sizes about those planned."""
    clocks, lengths = StepClocks(problem_for(problem, estimate), timing), problem.lengths
    found: dict[int, list[ToldStep]] = {}
    for pool in estimate.deployment.pools:
        clock = clocks.of(pool.stages, 1000)
        groups = max(pool.num_groups, 1)
        rows = max(round(estimate.figures.decode_batch / groups), 1)
        inputs = max(round(lengths.inputs.mean), 1)
        context = lengths.inputs.mean + lengths.outputs.mean / 2
        batch = max(round((estimate.figures.encode_batch or 1) / (
            groups if pool.role == "both" else 1)), 1)
        kinds = {"both": ("encode", "decode"), "encode": ("encode",), "decode": ("decode",)}
        for place in range(count):
            for kind in kinds[pool.role]:
                more = place % 3
                sizes = (batch, batch * inputs, 0, 0.0, 0, float(inputs)) if kind == "encode" else (
                    rows + more, rows + more, rows + more, context + more, int(context) + more, 0.0)
                step = ToldStep(kind, *sizes, seconds=0.0)
                seconds = expected_s(clock, step)
                for own, expected in zip(pool.stages, seconds, strict=True):
                    found.setdefault(own.index, []).append(step._replace(
                        seconds=expected * factor(kind, own.index)))
    return found


def write_beats(output: Path, estimate: Estimate, steps: dict[int, list[ToldStep]],
                now_s: float) -> None:
    """As the first rank of each stage would at `now_s`."""
    (output / BEATS).mkdir(exist_ok=True)
    for stage in estimate.deployment.stages:
        state = RankState(rank=stage.ranks[0], stage=stage.index, pool="all", elapsed_s=now_s,
                          busy_s=now_s, recent_share=1.0, queries=1,
                          steps=tuple(steps.get(stage.index, ())))
        (output / BEATS / f"{stage.ranks[0]}.json").write_text(json.dumps(asdict(state)))


def tell_all(output: Path, estimate: Estimate, steps: dict[int, list[ToldStep]],
             times_s: Sequence[float], look: Callable[[], bool]) -> list[bool]:
    """Writes the same steps at each of the times, and looks after each."""
    looks = []
    for now_s in times_s:
        write_beats(output, estimate, steps, now_s)
        looks.append(look())
    return looks
