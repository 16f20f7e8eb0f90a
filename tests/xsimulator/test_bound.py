"""No schedule exceeds xsimulator.bound: random problems of every policy, replayed."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
from problems import TOY, TOY_T5, replay_checked, roofline_of, toy_problem, uniform_problem

from xgpt.core import catalog
from xgpt.core.constraint import Bound, latency_constraint
from xgpt.core.controls import FixedSchedule
from xgpt.core.errors import XgptError
from xgpt.core.lengths import JointLengths, joint_empirical, truncated_normal
from xgpt.core.problem import Problem
from xprofiler.roofline import Roofline
from xprofiler.timing import TimingSource
from xscheduler.search_planner import SearchPlanner
from xscheduler.tensor_plans import tensor_plans
from xsimulator.bound import Kind, UpperBound
from xsimulator.replay.job import planned_queries, replay_job
from xsimulator.replay.steady_state import SteadyFigures
from xsimulator.replay.step_clock import StepClocks
from xsimulator.roofline_limit import roofline_limit_qps, work_per_request
from xsimulator.rough.formulas import fixed_estimate

SCATTER = 1.01  # of a replay's throughput over seeds
KINDS: tuple[Kind, ...] = ("one pool", "two pools")
CONFIRMED = 20_000  # requests of a replay that tells what one of few came to
POLICIES = ("rra", "waa-c", "waa-m", "ft", "dsi", "orca", "vllm", "sarathi")
MODELS = {"opt-1.3b": 5e9, "llama-3.1-8b": 20e9, "opt-13b": 34e9}  # and bytes that hold it


class Drawn(NamedTuple):
    """A configuration that fits, and the figures of its replay."""

    policy: str
    config: Any
    figures: SteadyFigures

    @property
    def kind(self) -> Kind:
        return "two pools" if self.policy.startswith("waa") else "one pool"


def draw_problem(rng: np.random.Generator) -> Problem:
    """A random problem of 1 to 6 devices, some of little memory, with lengths of many shapes."""
    model = str(rng.choice(list(MODELS)))
    devices = int(rng.integers(1, 7))
    device = catalog.device(str(rng.choice(["A40", "A100-80", "H100", "L4"])))
    least = MODELS[model] / devices
    room = 10 ** rng.uniform(0.05, 1.0)  # times what holds the weights
    device = replace(device, memory_bytes=int(min(
        max(room * least, least + 2e9), 90e9)))
    link = str(rng.choice(["pcie4-x16", "nvlink3"]))
    lengths = draw_lengths(rng)
    # of two clusters, few hundred requests have no certain 99 %
    kind = "queries" if lengths.pairs is None and rng.random() < 0.5 else "sequence"
    problem = uniform_problem(model, device.name, devices, lengths, link=link)
    return replace(problem, cluster=replace(problem.cluster, device=device),
                   constraint=latency_constraint(latency_s=math.inf, kind=kind))


def draw_lengths(rng: np.random.Generator) -> JointLengths:
    """Random lengths: normal, equal, or of two clusters (some long requests among short ones)."""
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


def upper_bound(problem: Problem, timing: TimingSource, plans: Iterable[tuple[int, int]],
                kinds: Sequence[Kind] = ("one pool", "two pools")) -> float:
    """The upper bound of any of these plans and kinds, requests/s."""
    bound, most_qps, plans = UpperBound(problem, timing), 0.0, list(plans)
    for kind in kinds:
        for plan in plans:
            most_qps = bound.of_plan(plan, kind, cutoff_qps=most_qps)
    return most_qps


def draw_config(policy: str, problem: Problem, plan: tuple[int, int],
                rng: np.random.Generator) -> Any:
    given: dict[str, Any] = {"tp_degree": plan[0], "tp_gpus": plan[1]}
    stages = problem.cluster.num_devices - plan[1] + plan[1] // plan[0]
    batch, groups = size(rng, 1024), int(rng.integers(1, 2 * stages + 1))
    if policy == "rra":
        return FixedSchedule(
            encode_batch=size(rng, 256), decode_iterations=size(rng, problem.lengths.outputs.max),
            decode_micro_batches=None if rng.random() < 0.5 else groups,
            encode_chunk=0 if rng.random() < 0.5 else size(rng, 4096, 64), **given)
    if policy in ("ft", "dsi"):
        parts = int(rng.integers(1, 9)) * groups if policy == "dsi" else None
        return FixedSchedule(encode_batch=max(min(batch, 400), groups),
                            decode_micro_batches=groups, encode_micro_batches=parts, **given)
    if policy in ("orca", "vllm", "sarathi"):
        budget = 0 if policy == "orca" else size(rng, 8192, 32)
        return FixedSchedule(max_active=max(batch, stages), token_budget=budget, **given)
    return FixedSchedule(encode_batch=size(rng, 64), decode_micro_batches=groups,
                     encode_chunk=0 if rng.random() < 0.5 else size(rng, 2048, 32), **given)


def size(rng: np.random.Generator, most: int, least: int = 1) -> int:
    return round(math.exp(rng.uniform(math.log(least), math.log(max(most, least)))))


def drawn(problem: Problem, timing: Roofline, count: int,
          rng: np.random.Generator) -> Iterator[Drawn]:
    """Replays of random configurations that fit."""
    plans, clocks = tensor_plans(problem, timing), StepClocks(problem, timing)
    for _ in range(count):
        name = str(rng.choice(POLICIES))
        try:
            config = draw_config(name, problem, plans[rng.integers(len(plans))], rng)
            estimate = fixed_estimate(name, problem, timing, config)
            if not estimate.figures.fits:
                continue
            figures = replay_checked(problem, timing, estimate, int(rng.integers(1 << 30)), clocks)
        except XgptError:  # no two pools on these devices, or a request that never fits
            continue
        if figures is not None and math.isfinite(figures.latency_s):
            yield Drawn(name, config, figures)


def whole_job_qps(problem: Problem, timing: Roofline, one: Drawn) -> float:
    """Requests/s of a job so long that ramp-up and drain are negligible. The window of a short job
    holds too many ends if all requests end together."""
    estimate = fixed_estimate(one.policy, problem, timing, one.config)
    inputs, outputs = problem.lengths.sample(CONFIRMED, np.random.default_rng(0))
    result = replay_job(problem, timing, estimate, planned_queries(problem, inputs, outputs))
    return CONFIRMED / result.makespan_s


def exceeded(problem: Problem, count: int, rng: np.random.Generator) -> list[str]:
    """The schedules that exceed the bound at their own latency."""
    timing = Roofline(problem.model, problem.cluster.device, problem.dtype)
    bound, found = UpperBound(problem, timing), []
    for one in drawn(problem, timing, count, rng):
        plan = one.config.tp_degree, one.config.tp_gpus
        most_qps = bound.of_plan(plan, one.kind, one.figures.latency_s)
        if one.kind == "two pools":  # that of any division
            most_qps = min(most_qps, bound.of_two_pools((1, plan[0]), one.figures.latency_s))
        if one.figures.throughput_qps > most_qps * SCATTER and whole_job_qps(
                problem, timing, one) > most_qps * SCATTER:
            found.append(f"{most_qps:.4g} by {one.policy} {one.config}, {one.figures}")
    return found


def uniform(*given: Any) -> tuple[Problem, Roofline]:
    problem = uniform_problem(*given)
    return problem, Roofline(problem.model, problem.cluster.device, problem.dtype)


def test_the_bound_holds_if_requests_are_evicted():
    """A bound without preemption gave 3.21 requests/s, the optimum of this problem."""
    problem, timing = uniform("llama-2-13b", "A100-40", 3, JointLengths(
        inputs=truncated_normal(60, 25, 150), outputs=truncated_normal(1000, 400, 2000)), 222.0)
    config = FixedSchedule(max_active=232, token_budget=150, tp_degree=2, tp_gpus=2)
    estimate = fixed_estimate("sarathi", problem, timing, config)
    figures = replay_checked(problem, timing, estimate, 0)
    assert figures is not None
    most_qps = UpperBound(problem, timing).of_plan((2, 2), "one pool", figures.latency_s)
    assert figures.throughput_qps <= most_qps * SCATTER
    assert max(estimate.figures.throughput_qps, 3.26) <= upper_bound(
        problem, timing, tensor_plans(problem, timing))


def test_the_bound_is_of_one_replica_on_the_given_devices():
    """WAA-M on five of six devices answers 12.35 requests/s within this latency."""
    problem, timing = uniform("qwen2.5-32b", "A100-80", 5, JointLengths(
        inputs=truncated_normal(300, 100, 600), outputs=truncated_normal(300, 100, 600)), 16.94)
    assert upper_bound(problem, timing, tensor_plans(problem, timing), ["two pools"]) >= 12.35


def test_the_bound_holds_for_every_size_of_waas_chunks():
    problem, timing = uniform("opt-13b", "A100-80", 4, JointLengths(
        inputs=truncated_normal(300, 100, 600), outputs=truncated_normal(100, 40, 250)), math.inf)
    bound = UpperBound(problem, timing)
    for chunk in (0, 64, 256, 1024):
        estimate = fixed_estimate("waa-c", problem, timing, FixedSchedule(
            encode_batch=8, decode_micro_batches=3, encode_chunk=chunk))
        figures = replay_checked(problem, timing, estimate, 0)
        assert figures is not None
        assert figures.throughput_qps <= SCATTER * bound.of_plan(
            (1, 0), "two pools", figures.latency_s)


def test_a_tighter_limit_never_raises_the_bound():
    problem, timing = uniform("opt-13b", "A100-80", 2, JointLengths(
        inputs=truncated_normal(100, 30, 250), outputs=truncated_normal(100, 30, 250)), math.inf)
    bound = UpperBound(problem, timing)
    for kind in KINDS:
        qps = [bound.of_plan((1, 0), kind, limit_s) for limit_s in (0.1, 2.0, 4.0, 8.0, math.inf)]
        assert qps[0] == 0.0 and qps == sorted(qps) and qps[-1] > 0


def test_limits_on_ttft_and_tpot_tighten_the_bound():
    problem, timing = uniform("opt-13b", "A100-80", 2, JointLengths(
        inputs=truncated_normal(100, 30, 250), outputs=truncated_normal(100, 30, 250)), math.inf)
    free = upper_bound(problem, timing, [(1, 0)])
    for metric, some_s, none_s in (("tpot", 0.03, 0.001), ("ttft", 1.0, 0.001)):
        some, none = (upper_bound(replace(problem, constraint=latency_constraint(
            latency_s=math.inf, further=(Bound(metric=metric, limit_s=limit_s),))), timing,
            [(1, 0)], ["one pool"]) for limit_s in (some_s, none_s))
        assert 0.0 == none < some <= free


@pytest.mark.parametrize("seed", range(20))
def test_no_drawn_schedule_exceeds_the_bound(seed):
    rng = np.random.default_rng(seed)
    assert not exceeded(draw_problem(rng), 12, rng)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(500))
def test_no_schedule_of_thirty_problems_exceeds_the_bound(seed):
    rng = np.random.default_rng(1000 + seed)
    assert not exceeded(draw_problem(rng), 30, rng)


# --- what the devices could do at all ---------------------------------------------------------


def test_products_and_bytes_of_queries_of_one_length_are_those_counted_by_hand():
    problem = toy_problem(pairs=np.array([[4, 3]]))  # 4 rows encoded, then 2 iterations
    model, work = TOY, work_per_request(problem)
    seen = 1 + 2 + 3 + 4 + 5 + 6  # tokens that each row attends to
    flops = 2 * 6 * model.num_layers * model.decoder_layer_params + (
        4 * 1024 * model.num_layers * seen) + 2 * 3 * model.head_params
    assert work.flops == pytest.approx(flops)
    entry = model.num_layers * 2 * 1024 * 2  # bytes of a token
    assert work.kv_bytes == pytest.approx(entry * (6 + 5 + 6))


def test_weights_of_a_type_without_units_are_multiplied_at_the_runs_own_rate():
    problem = toy_problem(pairs=np.array([[400, 3]]))  # bound by products
    rates = dict(problem.cluster.device.flops_per_s)
    assert "fp8" not in rates and rates["float32"] < rates[problem.dtype]
    assert roofline_limit_qps(replace(problem, weight_dtype="fp8")) == roofline_limit_qps(problem)
    narrow = replace(problem, weight_dtype="int8")
    assert roofline_limit_qps(narrow) == pytest.approx(
        rates.get("int8", rates[problem.dtype]) / rates[problem.dtype]
        * roofline_limit_qps(problem))


@pytest.mark.parametrize("model", [TOY, TOY_T5], ids=lambda own: own.name)
def test_no_schedule_answers_more(model):
    problem = toy_problem(model=model, num_queries=100)
    found = SearchPlanner(problem, roofline_of(problem)).best(math.inf, has_margin=False)
    assert 0 < found.figures.throughput_qps < roofline_limit_qps(problem)
