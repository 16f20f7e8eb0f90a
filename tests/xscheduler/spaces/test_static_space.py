"""Static batches in the search: no configuration of a box is better than the box's bounds, nothing
that brute force finds is better than what is found, and `auto` takes one where it is best."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from problems_suite import Planted, toy_case, toy_problem
from problems_suite import roofline_of as toy_roofline
from test_bounds import case_of, inside, ranges, some_always, some_plan

from xgpt.core import catalog
from xgpt.core.cluster import uniform_cluster
from xgpt.core.constraint import Bound, Metric, latency_constraint
from xgpt.core.errors import InfeasibleError
from xgpt.core.job import FixedSchedule
from xgpt.core.lengths import JointLengths, empirical
from xgpt.core.problem import Problem
from xprofiler.interpolation import REFUSED_BEYOND
from xprofiler.roofline import Roofline
from xprofiler.timing import TimingSource
from xscheduler.over_copies import CopiesSearch
from xscheduler.search import GAP, Scheduler
from xscheduler.spaces.space import Effort
from xscheduler.spaces.static import MOST_PARTS, StaticSpace
from xscheduler.tensor_plans import TensorPlan, tensor_plans
from xsimulator.policies import make_policy
from xsimulator.policies.static.bounds import StaticBounds
from xsimulator.policies.static.boxes import StaticBoxes
from xsimulator.policies.static.config import StaticConfig
from xsimulator.policies.static.room import may_fit, most_queries


def seen_by_tables(timing: TimingSource) -> TimingSource:
    """Without defects of a single large size: the closed form of static batches asks for each, and
    the tables that bounds rest on have none of them between two nodes."""
    if isinstance(timing, Planted):
        timing._defects = {operator: tuple(one for one in own if one.low < 32 or (
            one.high > 1.1 * one.low)) for operator, own in timing._defects.items()}
    return timing


def some_problem(seed: int) -> tuple[Problem, TimingSource, TensorPlan, np.random.Generator]:
    """One in three has outputs that are all, or nearly, as long."""
    rng, case = np.random.default_rng([11, seed]), case_of("rra", seed)
    kind = str(rng.choice(["sequence", "queries"]))
    problem = replace(case.problem, num_queries=None, constraint=latency_constraint(
        latency_s=math.inf, kind=kind, quantile=case.problem.constraint.quantile))
    if rng.random() < 0.4:
        inputs, most = problem.lengths.inputs, problem.lengths.outputs.max
        one = int(rng.integers(1, most + 1))
        problem = replace(problem, lengths=JointLengths(
            inputs=inputs if rng.random() < 0.5 else empirical([round(inputs.mean)]),
            outputs=empirical([one, *([min(one + 1, most)] if rng.random() < 0.4 else [])])))
    plan = some_plan(replace(case, problem=problem), rng)
    return problem, seen_by_tables(case.timing), plan, rng


def check_boxes(seed: int) -> int:
    problem, timing, plan, rng = some_problem(seed)
    form = make_policy("dsi", problem, timing)
    stages = form.plans.both(*plan)
    least, most = ranges(rng, 800, 3.0)
    fewest, highest = ranges(rng, 2 * len(stages.stages), 2.0)
    parts, most_parts = ranges(rng, 8, 1.5)
    batch = inside(rng, least, most, (False, False, True, True))
    groups = inside(rng, fewest, highest, (False, True, False, True))
    steps = inside(rng, parts, most_parts, (False, True, True, False))
    found = form.evaluate([StaticConfig(
        encode_batch=int(b), decode_micro_batches=int(g), encode_parts=int(p),
        tp_degree=plan.tp_degree, tp_gpus=plan.tp_gpus) for b, g, p in zip(
            batch.ravel(), groups.ravel(), steps.ravel(), strict=True)])
    bounds, boxes = StaticBounds(form), StaticBoxes.of(*(
        (low.astype(float), up.astype(float)) for low, up in (
            (least, most), (fewest, highest), (parts, most_parts))))
    limit, least_s = bounds.throughput_qps(stages, boxes), bounds.latency_s(stages, boxes)
    first_s, per_token_s = bounds.first_token_s(stages, boxes), bounds.per_token_s(stages, boxes)
    fits = may_fit(form, stages, boxes)
    is_timed = (found.stretch <= REFUSED_BEYOND).reshape(batch.shape)
    for row in np.flatnonzero(is_timed.any(axis=1)):
        qps, latency_s, own = (figures.reshape(batch.shape)[row][is_timed[row]] for figures in (
            found.throughput_qps, found.latency_s, found.fits))
        box = (problem.model.name, plan, least[row], most[row], fewest[row], highest[row],
               parts[row], most_parts[row])
        assert qps.max() <= limit[row] and least_s[row] <= latency_s.min(), box
        for of_tokens, least_of in ((found.ttft_s, first_s), (found.tpot_s, per_token_s)):
            assert least_of[row] <= of_tokens.reshape(batch.shape)[row][is_timed[row]].min(), box
        assert fits[row] or not own.any(), box
        assert batch[row][is_timed[row]][own].max(initial=0) <= most_queries(form, stages), box
    return int(is_timed.any(axis=1).sum())


@pytest.mark.parametrize("seed", some_always(24))
def test_static_boxes(seed: int) -> None:
    check_boxes(seed)


def test_static_boxes_are_not_all_beyond_what_is_timed() -> None:
    assert sum(check_boxes(seed) for seed in range(30, 36)) > 60


def test_bounds_of_single_points_are_near_them() -> None:
    """Where a bound is far above what there is, points are evaluated for nothing."""
    problem = toy_problem(outputs=(120, 10, 160))
    form = make_policy("dsi", problem, toy_roofline(problem))
    stages = form.plans.both(1, 0)
    configs = [StaticConfig(encode_batch=batch, decode_micro_batches=groups, encode_parts=parts)
               for batch, groups, parts in product((8, 40, 200), (1, 4), (1, 3))]
    batch, groups, parts = (np.array([getattr(config, name) for config in configs], float)
                            for name in ("encode_batch", "decode_micro_batches", "encode_parts"))
    bounds, own = StaticBounds(form), form.evaluate(configs)
    boxes = StaticBoxes.of((batch, batch), (groups, groups), (parts, parts))
    assert (bounds.throughput_qps(stages, boxes) <= 1.04 * own.throughput_qps).all()
    assert (bounds.latency_s(stages, boxes) >= 0.9 * own.latency_s).all()


@pytest.mark.parametrize("metric", ["ttft", "tpot"])
def test_what_cannot_keep_a_bound_on_tokens_is_not_looked_into(metric: Metric) -> None:
    """Under a bound on these alone tens of thousands of boxes were, most of a minute."""
    problem = toy_problem(outputs=(120, 10, 160))
    timing = toy_roofline(problem)
    form, plans = make_policy("dsi", problem, timing), tensor_plans(problem, timing)
    figures = form.evaluate([StaticConfig(
        encode_batch=1, decode_micro_batches=1, encode_parts=1, tp_degree=degree, tp_gpus=gpus)
        for degree, gpus in plans])
    least_s = float(getattr(figures, f"{metric}_s").min())
    for share, is_able in ((0.05, False), (1.5, True)):
        asked = replace(problem, constraint=latency_constraint(
            math.inf, further=(Bound(metric=metric, limit_s=share * least_s),)))
        space = StaticSpace("dsi", asked, timing, plans)
        most = [space.grid(plan).limit(math.inf, 0.0).max() for plan in range(len(plans))]
        assert (max(most) > 0) == is_able


@pytest.mark.parametrize("seed", some_always(18))
def test_nothing_that_brute_force_finds_is_better(seed: int) -> None:
    case, rng = toy_case(seed), np.random.default_rng([12, seed])
    outputs = case.problem.lengths.outputs
    few = [int(rng.integers(1, outputs.max + 1))] if seed % 2 else outputs.support.tolist()
    problem = replace(case.problem, num_queries=36, lengths=JointLengths(
        inputs=case.problem.lengths.inputs, outputs=empirical(few)),
        fixed=FixedSchedule(policies=("ft", "dsi")))
    timing = seen_by_tables(case.timing)
    plans = tensor_plans(problem, timing)
    form = make_policy("dsi", problem, timing)
    configs = [StaticConfig(encode_batch=batch, decode_micro_batches=groups, encode_parts=parts,
                            tp_degree=degree, tp_gpus=gpus) for degree, gpus in plans
               for batch, groups, parts in product(
                   range(1, 37), range(1, 2 * len(form.plans.both(degree, gpus).stages) + 1),
                   range(1, MOST_PARTS + 1))]
    figures = form.evaluate(configs)
    able = figures.fits & (figures.stretch <= REFUSED_BEYOND) & (figures.throughput_qps > 0)
    scheduler = Scheduler(problem, timing)
    if not able.any():
        return
    for bound_s in (*np.quantile(figures.latency_s[able], [0, 0.05, 0.4]), math.inf):
        most = figures.throughput_qps[able & (figures.latency_s <= bound_s)].max()
        found = scheduler.find(float(bound_s))
        assert most / (1 + GAP) <= found.figures.throughput_qps <= most * (1 + 1e-9)
        assert found.proof.bound_qps >= most and found.proof.gap <= GAP
        assert found.figures.latency_s <= bound_s * (1 + 1e-12) and found.figures.fits


@pytest.mark.parametrize(("policy", "fixed"), [
    ("ft", {}), ("dsi", {}), ("dsi", {"encode_micro_batches": 12}),
    ("dsi", {"encode_micro_batches": 6, "decode_micro_batches": 3}),
    ("ft", {"decode_micro_batches": 2}), ("dsi", {"encode_batch": 11})])
def test_a_policy_named_alone_keeps_what_the_job_fixes_and_every_bound(
        policy: str, fixed: dict[str, int]) -> None:
    free = toy_problem(num_queries=36, outputs=(30, 10, 60), fixed=FixedSchedule(
        policies=(policy,), **fixed))  # type: ignore[arg-type]
    timing = toy_roofline(free)
    form = make_policy(policy, free, timing)
    plans, steps = tensor_plans(free, timing), fixed.get("encode_micro_batches")
    configs = [StaticConfig(
        encode_batch=batch, decode_micro_batches=groups, tp_degree=degree, tp_gpus=gpus,
        encode_parts=None if policy == "ft" else parts) for degree, gpus in plans
        for batch, groups, parts in product(
            [fixed.get("encode_batch")] if "encode_batch" in fixed else range(1, 37),
            range(1, 2 * len(form.plans.both(degree, gpus).stages) + 1),
            range(1, 2 if policy == "ft" else 1 + (steps or MOST_PARTS)))
        if steps in (None, groups * parts) and fixed.get("decode_micro_batches") in (None, groups)]
    figures = form.evaluate(configs)
    for latency, ttft, tpot in ((math.inf, math.inf, math.inf), (0.7, math.inf, math.inf),
                                (math.inf, 0.3, math.inf), (0.9, 0.6, 0.5)):
        limits = [float(np.quantile(own, share)) if share < 1 else math.inf for own, share in (
            (figures.latency_s, latency), (figures.ttft_s, ttft), (figures.tpot_s, tpot))]
        problem = replace(free, constraint=latency_constraint(limits[0], further=tuple(
            Bound(metric=metric, limit_s=limit_s) for metric, limit_s in (
                ("ttft", limits[1]), ("tpot", limits[2])) if limit_s < math.inf)))
        able = (figures.fits & (figures.latency_s <= limits[0]) & (figures.ttft_s <= limits[1])
                & (figures.tpot_s <= limits[2]))
        most = figures.throughput_qps[able].max()
        found = Scheduler(problem, timing).find()
        assert most / (1 + GAP) <= found.figures.throughput_qps <= most * (1 + 1e-9)
        assert found.proof.bound_qps >= most and found.proof.gap <= GAP
        assert found.estimate.policy == policy and {
            name: found.estimate.variables[name] for name in fixed} == fixed


def test_what_is_evaluated_beside_a_batch_does_not_change_it() -> None:
    """Where a quantile lies at a step of the distribution of rounds, rounding decided which side
    of the step it was on, and that hung on how many batches were evaluated together."""
    problem = toy_problem(kind="batch", quantile=0.5, devices=2)
    problem = replace(problem, lengths=replace(
        problem.lengths, outputs=empirical(list(range(1, 21)))))
    form = make_policy("dsi", problem, toy_roofline(problem))
    configs = [StaticConfig(encode_batch=1, decode_micro_batches=groups, encode_parts=1)
               for groups in range(1, 7)]
    alone = [form.evaluate([config]).latency_s[0] for config in configs]
    np.testing.assert_allclose(form.evaluate(configs).latency_s, alone, rtol=1e-12)


def test_where_the_quickest_is_too_slow_there_is_none() -> None:
    problem = toy_problem(fixed=FixedSchedule(policies=("ft", "dsi")))
    with pytest.raises(InfeasibleError, match="by policy ft"):
        Scheduler(problem, toy_roofline(problem)).find(1e-5)


def on_gpus(model: str, device: str, devices: int, latency_s: float,
            lengths: JointLengths) -> Problem:
    return Problem(
        model=catalog.model(model), dtype="float16", lengths=lengths, num_queries=None,
        cluster=uniform_cluster(
            name="x", device=catalog.device(device), num_nodes=1, devices_per_node=devices,
            intra_link=catalog.link({"A40": "pcie4-x16", "A100-80": "nvlink3"}.get(
                device, "nvlink4")), inter_link=catalog.link("ib-400g")),
        fixed=FixedSchedule(), constraint=latency_constraint(latency_s=latency_s),
        default_max_tokens=lengths.outputs.max)


def searched(problem: Problem, timing: TimingSource, *names: str) -> tuple[str, float, float]:
    """(policy, queries/s, bound) of the best of these policies, or of all."""
    own = replace(problem, fixed=replace(problem.fixed, policies=names))
    found = CopiesSearch(own, timing, Effort(gap=GAP), is_brief=True).best(
        problem.constraint.latency_s, has_margin=False)
    return found.estimate.policy, found.figures.throughput_qps, found.proof.bound_qps


@pytest.mark.parametrize(("model", "device", "devices", "inputs", "outputs", "latency_s", "best"), [
    # by DSI, as by vLLM, whose cohorts are batches then, 162 queries/s; by all others 140
    ("qwen2.5-0.5b", "A100-80", 3, 855, 262, 0.7936, "dsi"),
    ("opt-13b", "A40", 4, 512, 100, 2.976, "dsi"),
    ("llama-3.1-8b", "H100", 2, 300, 20, 0.2998, "waa-m")])
def test_auto_has_what_static_batches_have_where_all_outputs_are_as_long(
        model: str, device: str, devices: int, inputs: int, outputs: int, latency_s: float,
        best: str) -> None:
    problem = on_gpus(model, device, devices, latency_s, JointLengths(
        inputs=empirical([inputs]), outputs=empirical([outputs])))
    timing = Roofline(problem.model, problem.cluster.device, problem.dtype)
    _, qps, bound_qps = searched(problem, timing)
    alone = max(searched(problem, timing, name)[1] for name in ("ft", "dsi"))
    assert qps * (1 + GAP) >= alone and bound_qps >= alone
    others = ("rra", "waa-c", "waa-m", "sarathi", "orca")
    policy, most, _ = searched(problem, timing, *others, "ft", "dsi")
    without, less, _ = searched(problem, timing, *others)
    assert policy == best and less <= most <= qps * (1 + GAP)
    assert (most > 1.1 * less) is (best == "dsi") and without not in ("ft", "dsi")


def test_where_outputs_scatter_no_static_batch_is_evaluated() -> None:
    problem = on_gpus("opt-13b", "A40", 4, 11.5, catalog.task("S"))
    timing = Roofline(problem.model, problem.cluster.device, problem.dtype)
    scheduler = Scheduler(problem, timing)
    found = scheduler.find()
    static = [space for space in scheduler.spaces if isinstance(space, StaticSpace)]
    assert [space.name for space in static] == ["ft", "dsi"]
    assert sum(space.num_evaluated for space in static) == 0
    assert {"ft", "dsi"} <= dict(found.proof.policy_bounds).keys()
    rows = [row for row in found.rejected if row.label in ("policy ft", "policy dsi")]
    assert all(row.reason.startswith("not looked into: no more than") for row in rows) and rows
