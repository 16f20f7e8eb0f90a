"""No schedule exceeds xsimulator.bound: random problems of every policy, replayed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest

from xgpt.core import catalog
from xgpt.core.cluster import uniform_cluster
from xgpt.core.constraint import latency_constraint
from xgpt.core.errors import XgptError
from xgpt.core.job import FixedSchedule
from xgpt.core.lengths import JointLengths, joint_empirical, truncated_normal
from xgpt.core.problem import Problem
from xprofiler.roofline import Roofline
from xscheduler.spaces.tensor_plans import tensor_plans
from xsimulator.bound import Kind, UpperBound
from xsimulator.policies import make_policy
from xsimulator.policies.continuous.config import ContinuousConfig
from xsimulator.policies.rra.config import RraConfig
from xsimulator.policies.static.config import StaticConfig
from xsimulator.policies.waa.config import WaaConfig
from xsimulator.replay.predict import replay_checked
from xsimulator.replay.steady import SteadyFigures
from xsimulator.replay.step_clock import StepClocks

SCATTER = 1.01  # of a replay's throughput over seeds
POLICIES = ("rra", "waa-c", "waa-m", "ft", "dsi", "orca", "vllm", "sarathi")
MODELS = {"opt-1.3b": 5e9, "llama-3.1-8b": 20e9, "opt-13b": 34e9}  # and bytes that hold it


class Drawn(NamedTuple):
    """A configuration that fits, and what its replay comes to."""

    policy: str
    config: Any
    figures: SteadyFigures

    @property
    def kind(self) -> Kind:
        return "two pools" if self.policy.startswith("waa") else "one pool"


def draw_problem(rng: np.random.Generator) -> Problem:
    """Of 1 to 6 devices, some of little memory, and lengths of many shapes."""
    model = str(rng.choice(list(MODELS)))
    devices = int(rng.integers(1, 7))
    device = catalog.device(str(rng.choice(["A40", "A100-80", "H100", "L4"])))
    least = MODELS[model] / devices
    room = 10 ** rng.uniform(0.05, 1.0)  # times what holds the weights
    device = replace(device, memory_bytes=int(min(
        max(room * least, least + 2e9), 90e9)))
    cluster = uniform_cluster(
        name="drawn", device=device, num_nodes=1, devices_per_node=devices,
        intra_link=catalog.link(str(rng.choice(["pcie4-x16", "nvlink3"]))),
        inter_link=catalog.link("ib-400g"))
    lengths = draw_lengths(rng)
    return Problem(
        model=catalog.model(model), cluster=cluster, lengths=lengths, dtype="float16",
        num_queries=None, fixed=FixedSchedule(), default_max_tokens=lengths.outputs.max,
        constraint=latency_constraint(
            latency_s=math.inf,  # of two clusters, few hundred queries have no certain 99 %
            kind="queries" if lengths.pairs is None and rng.random() < 0.5 else "sequence"))


def draw_lengths(rng: np.random.Generator) -> JointLengths:
    """Normal, equal, or of two clusters: a share of long queries among short ones."""
    shape = rng.choice(["normal", "equal", "clusters"])
    inputs, outputs = (int(10 ** rng.uniform(1.0, 2.9)) for _ in range(2))
    if shape == "clusters":
        count = 400
        is_long = rng.random(count) < rng.uniform(0.02, 0.5)
        factors = 10 ** rng.uniform(-0.5, 1.0, 2)
        pairs = np.stack([
            np.maximum(rng.normal(mean, 0.2 * mean, count) * np.where(is_long, factor, 1.0), 1)
            for mean, factor in zip((inputs / 2, outputs / 2), factors, strict=True)], axis=1)
        return joint_empirical(np.rint(pairs).astype(np.int64))
    spread = 0.0 if shape == "equal" else rng.uniform(0.05, 0.45)
    return JointLengths(
        inputs=truncated_normal(inputs, spread * inputs, 3 * inputs),
        outputs=truncated_normal(outputs, spread * outputs, 3 * outputs))


def draw_config(policy: str, problem: Problem, plan: tuple[int, int],
                rng: np.random.Generator) -> Any:
    given: dict[str, Any] = {"tp_degree": plan[0], "tp_gpus": plan[1]}
    stages = problem.cluster.num_devices - plan[1] + plan[1] // plan[0]
    batch, groups = size(rng, 1024), int(rng.integers(1, 2 * stages + 1))
    if policy == "rra":
        return RraConfig(
            encode_batch=size(rng, 256), decode_iterations=size(rng, problem.lengths.outputs.max),
            decode_micro_batches=None if rng.random() < 0.5 else groups,
            encode_chunk=0 if rng.random() < 0.5 else size(rng, 4096, 64), **given)
    if policy in ("ft", "dsi"):
        parts = int(rng.integers(1, 9)) if policy == "dsi" else None
        return StaticConfig(encode_batch=max(min(batch, 400), groups),
                            decode_micro_batches=groups, encode_parts=parts, **given)
    if policy in ("orca", "vllm", "sarathi"):
        budget = 0 if policy == "orca" else size(rng, 8192, 32)
        return ContinuousConfig(max_active=max(batch, stages), token_budget=budget, **given)
    return WaaConfig(encode_batch=size(rng, 64), decode_micro_batches=groups,
                     encode_chunk=0 if rng.random() < 0.5 else size(rng, 2048, 32), **given)


def size(rng: np.random.Generator, most: int, least: int = 1) -> int:
    return round(math.exp(rng.uniform(math.log(least), math.log(max(most, least)))))


def drawn(problem: Problem, timing: Roofline, count: int,
          rng: np.random.Generator) -> Iterator[Drawn]:
    """Replays of random configurations that fit."""
    plans, clocks = tensor_plans(problem, timing), StepClocks(problem, timing)
    policies: dict[str, Any] = {}
    for _ in range(count):
        name = str(rng.choice(POLICIES))
        try:
            if name not in policies:
                policies[name] = make_policy(name, problem, timing)
            config = draw_config(name, problem, plans[rng.integers(len(plans))], rng)
            estimate = policies[name].estimate(config)
            if not estimate.figures.fits:
                continue
            figures = replay_checked(problem, timing, estimate, int(rng.integers(1 << 30)), clocks)
        except XgptError:  # no two pools on these devices, or a query that never fits
            continue
        if figures is not None and math.isfinite(figures.latency_s):
            yield Drawn(name, config, figures)


def exceeded(problem: Problem, count: int, rng: np.random.Generator) -> list[str]:
    """Of the schedules that exceed the bound at their own latency."""
    timing = Roofline(problem.model, problem.cluster.device, problem.dtype)
    bound, found = UpperBound(problem, timing), []
    for one in drawn(problem, timing, count, rng):
        plan = one.config.tp_degree, one.config.tp_gpus
        most_qps = bound.of_plan(plan, one.kind, one.figures.latency_s)
        if one.figures.throughput_qps > most_qps * SCATTER:
            found.append(f"{most_qps:.4g} by {one.policy} {one.config}, {one.figures}")
    return found


@pytest.mark.parametrize("seed", range(20))
def test_no_drawn_schedule_exceeds_the_bound(seed: int) -> None:
    rng = np.random.default_rng(seed)
    assert not exceeded(draw_problem(rng), 12, rng)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(500))
def test_none_of_thirty_exceeds_it(seed: int) -> None:
    rng = np.random.default_rng(1000 + seed)
    assert not exceeded(draw_problem(rng), 30, rng)
