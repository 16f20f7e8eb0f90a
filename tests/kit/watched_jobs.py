"""Jobs whose output lengths the launcher watches, and what their heads would write meanwhile."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from problems import timing_of

from xgpt.app.opened_job import OpenedJob, open_file
from xgpt.app.running.follow import Rescheduler, rescheduler_of
from xgpt.app.schedule import executable
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate, Schedule
from xgpt.job.resolve import resolve
from xprofiler.timing import TimingSource
from xrunner.files.heartbeat import HEARTBEATS, RankState, ReportedStep
from xrunner.files.launcher_link import OBSERVED_FILE
from xscheduler.live.step_monitor import expected_s
from xscheduler.replicas import problem_of_replica
from xsimulator.replay.step_clock import StepClocks


def session_of(folder: Path, *, outputs: str = "{mean: 30, std: 15, max: 100}", bound: str = "6",
               schedule: str = "policy: rra, encode_chunk: 0", count: int = 3000, request: str = "",
               run: str = "") -> OpenedJob:
    lines = [f'{{"id": "q{i}", "tokens": {[7] * (20 + i % 40)}{request}}}' for i in range(count)]
    (folder / "requests.jsonl").write_text("\n".join(lines))
    path = folder / "job.yaml"
    path.write_text(f"model: opt-13b\ncluster: a40-4\n"
                    f"workload: {{requests: requests.jsonl, output_tokens: {outputs}, "
                    f"max_tokens: 200}}\nconstraint: {{latency_s: {bound}}}\n"
                    f"schedule: {{{schedule}}}\nrun: {{{run}}}\noutput: out\n")
    (folder / "out").mkdir(exist_ok=True)
    session = executable(open_file(path))
    assert session.requests is not None
    requests = replace(session.requests, are_tokenised=True)  # as of a run, which fetches the model
    problem = resolve(session.job, requests=requests)
    return replace(session, problem=replace(session.problem, queries=problem.queries))


def write_state(session: OpenedJob, lengths: Sequence[int], *, per_phase: int = 60,
                iterations: int = 10, phases: int = 16, first: int = 0) -> None:
    """As the head would, after so many phases of these outputs."""
    finished, active = [], []
    for index in range(min(per_phase * phases, len(lengths))):
        age = (phases - index // per_phase) * iterations
        is_done = lengths[index] <= age
        (finished if is_done else active).append(
            (first + index, 20 + index % 40, int(min(lengths[index], age))))
    (session.job.output / OBSERVED_FILE).write_text(json.dumps(
        {"first": first, "finished": finished, "active": active}))


def follow(session: OpenedJob, schedule: Schedule, num_queries: int | None = None,
           **changes: Any) -> Rescheduler:
    """`changes`: of the decider."""
    made = rescheduler_of(session, timing_of(session), schedule)
    assert made is not None
    made._waits = True
    decider = made.decider
    if num_queries is not None:
        decider.followed = replace(decider.followed, problem=replace(
            decider.followed.problem, num_queries=num_queries))
    for name, value in changes.items():
        setattr(decider, name, value)
    return made


def outputs_of(mean: float, std: float = 15.0, count: int = 3000, seed: int = 1) -> list[int]:
    drawn = np.random.default_rng(seed).normal(mean, std, count)
    return np.clip(np.rint(drawn), 1, 200).astype(int).tolist()


Factors = Callable[[str, int], float]  # (kind, stage)


def steps_of(problem: Problem, timing: TimingSource, estimate: Estimate, factor: Factors,
             count: int = 24) -> dict[int, list[ReportedStep]]:
    """By stage, `count` steps of each kind that its pool takes, of sizes about those planned."""
    clocks, lengths = StepClocks(problem_of_replica(problem, estimate), timing), problem.lengths
    found: dict[int, list[ReportedStep]] = {}
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
                step = ReportedStep(kind, *sizes, seconds=0.0)
                seconds = expected_s(clock, step)
                for own, expected in zip(pool.stages, seconds, strict=True):
                    found.setdefault(own.index, []).append(step._replace(
                        seconds=expected * factor(kind, own.index)))
    return found


def write_heartbeats(output: Path, estimate: Estimate, steps: dict[int, list[ReportedStep]],
                now_s: float) -> None:
    """As the first rank of each stage would at `now_s`."""
    (output / HEARTBEATS).mkdir(exist_ok=True)
    for stage in estimate.deployment.stages:
        state = RankState(rank=stage.ranks[0], stage=stage.index, pool="all", elapsed_s=now_s,
                          busy_s=now_s, recent_share=1.0, queries=1,
                          steps=tuple(steps.get(stage.index, ())))
        (output / HEARTBEATS / f"{stage.ranks[0]}.json").write_text(json.dumps(asdict(state)))


def tell_all(output: Path, estimate: Estimate, steps: dict[int, list[ReportedStep]],
             times_s: Sequence[float], look: Callable[[], bool]) -> list[bool]:
    """Writes the same steps at each of the times, and looks after each."""
    looks = []
    for now_s in times_s:
        write_heartbeats(output, estimate, steps, now_s)
        looks.append(look())
    return looks
