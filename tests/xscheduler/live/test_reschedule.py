"""Keep, adjust or redeploy: the search on given stages against configurations drawn at random, and
the choice."""

import math
from dataclasses import replace

import numpy as np
import pytest
from examples import some
from problems import estimate_of, roofline_of, schedule_of, toy_problem

from xgpt.core.errors import InfeasibleError, InputError
from xgpt.core.job import FixedSchedule
from xscheduler.evaluator import Evaluator
from xscheduler.live.deployment import redeployment
from xscheduler.live.given_stages import GivenStages
from xscheduler.live.reschedule import break_even, reschedule

LONGER, SHORTER = (14, 6, 30), (6, 3, 14)
DRAWN, MOST_DRAWN = 60, 200  # configurations, and the largest batch of them
BELOW = 0.02  # by so much may the search stay below the best of them


def rra(problem=None, **variables):
    return estimate_of(problem or toy_problem(), "rra", **{
        "encode_batch": 6, "decode_iterations": 5, **variables})


def waa(policy="waa-c", **variables):
    return estimate_of(toy_problem(), policy, **{
        "encode_batch": 6, "decode_micro_batches": 2, **variables})


def uneven():
    """RRA on stages that no lengths would suggest."""
    found = rra()
    counts, first, stages = [3, 1, 1, 1], 0, []
    for stage, count in zip(found.deployment.stages, counts, strict=True):
        stages.append(replace(stage, first_layer=first, num_layers=count))
        first += count
    (pool,) = found.deployment.pools
    return found.changed(pools=(replace(pool, stages=tuple(stages)),))


def given(deployed, problem):
    return GivenStages(deployed, problem, roofline_of(problem))


def adjusted(deployed, problem):
    return given(deployed, problem).best(problem.constraint, has_margin=False)


def drawn(deployed, problem):
    """Figures of configurations drawn at random that have room on the stages of `deployed`."""
    rng, found = np.random.default_rng(5), []
    chunked = [name for name, value in deployed.variables.items() if value]
    most = min(problem.num_queries or MOST_DRAWN, MOST_DRAWN)
    for _ in range(DRAWN):
        own = FixedSchedule(
            encode_batch=round(most ** rng.random()),
            encode_chunk=int(rng.choice([4, 16, 40, 100])) if "encode_chunk" in chunked else 0,
            **({"decode_iterations": int(rng.integers(1, problem.lengths.outputs.max))}
               if deployed.policy == "rra" else
               {"decode_micro_batches": int(rng.integers(1, 7))}))
        way = adjusted(deployed, replace(problem, fixed=own))
        if way.qps:
            found.append(way.estimate.figures)
    return found


DEPLOYED = {
    "rra": rra, "rra in groups": lambda: rra(tp_degree=2, tp_gpus=4),
    "rra in part": lambda: rra(tp_degree=2, tp_gpus=2),
    "rra in chunks": lambda: rra(encode_chunk=50), "uneven": uneven, "waa-c": waa,
    "waa-m": lambda: waa("waa-m"), "waa in groups": lambda: waa(tp_degree=2, tp_gpus=2),
}


CASES = [(LONGER, {"tightness": 1.05}), (SHORTER, {"tightness": 1.6, "num_queries": 70}),
         (SHORTER, {"tightness": math.inf, "memory": 1.6e8})]


# each kind of deployment with one of the cases
@pytest.mark.parametrize(("name", "outputs", "case"), some(
    [(name, *case) for name in DEPLOYED for case in CASES],
    lambda one: list(DEPLOYED).index(one[0]) % 3 == CASES.index(one[1:])))
def test_the_search_on_given_stages_is_not_below_what_is_drawn(name, case, outputs):
    deployed, case = DEPLOYED[name](), dict(case)
    tightness = case.pop("tightness")
    problem = toy_problem(outputs=outputs, **case)
    ways = drawn(deployed, problem)
    assert len(ways) >= 5, "else this test shows nothing"
    limit_s = tightness * min(figures.latency_s for figures in ways)
    problem = toy_problem(outputs=outputs, latency_s=limit_s, **case)
    best_qps = max(figures.throughput_qps for figures in ways if figures.latency_s <= limit_s)
    found = adjusted(deployed, problem)
    assert found.reason is None and found.estimate is not None
    assert found.qps >= (1 - BELOW) * best_qps
    assert found.estimate.figures.latency_s <= limit_s and found.estimate.figures.fits
    assert found.estimate.policy == deployed.policy
    assert found.estimate.deployment.stages == deployed.deployment.stages


@pytest.mark.parametrize("name", ["rra", "rra in part", "waa-c", "waa-m", "waa in groups"])
def test_what_runs_has_the_figures_of_its_replay(name):
    deployed, problem = DEPLOYED[name](), toy_problem()
    way = given(deployed, problem).as_it_is(problem.constraint, has_margin=False)
    assert (way.estimate.controls, way.estimate.deployment) == (
        deployed.controls, deployed.deployment)
    shown = Evaluator(problem, roofline_of(problem)).shown(deployed).figures  # of fewer queries
    assert way.qps == pytest.approx(shown.throughput_qps, rel=0.01)
    assert way.estimate.figures.latency_s == pytest.approx(shown.latency_s, rel=0.01)


def test_stages_stay_where_new_lengths_would_place_layers_elsewhere():
    deployed = uneven()
    found = adjusted(deployed, toy_problem(outputs=LONGER))
    assert found.estimate.deployment.stages == deployed.deployment.stages
    # the fullest stage holds half of the layers: an even split must be quicker
    even = adjusted(rra(), toy_problem(outputs=LONGER))
    assert even.qps > found.qps * 1.1


def test_out_of_reach_names_the_tightest_latency():
    deployed, problem = rra(), toy_problem(outputs=LONGER)
    least_s = min(figures.latency_s for figures in drawn(deployed, problem))
    found = adjusted(deployed, toy_problem(outputs=LONGER, latency_s=0.5 * least_s))
    assert found.qps == 0.0 and found.estimate.figures.latency_s <= 1.02 * least_s
    assert f"{found.estimate.figures.latency_s:.4g} s" in found.reason
    assert "encode_batch" in found.reason


def test_what_the_job_fixes_stays_fixed():
    fixed = FixedSchedule(decode_iterations=3, decode_micro_batches=2, encode_batch=5)
    found = adjusted(rra(), toy_problem(outputs=LONGER, fixed=fixed)).estimate
    assert (
        found.figures.decode_iterations,
        found.deployment.num_groups,
        found.figures.encode_batch,
    ) == (3, 2, 5)
    other = adjusted(rra(), toy_problem(fixed=FixedSchedule(policies=("waa-c",))))
    assert other.estimate is None and "policy waa-c" in other.reason


def test_too_little_memory_for_any_batch_is_said():
    found = adjusted(rra(), toy_problem(memory=2e7))
    assert found.qps == 0.0 and "memory" in found.reason


# --- the choice -------------------------------------------------------------------------------


def answer(problem, estimate):
    return schedule_of(problem, estimate)


def test_break_even_is_where_both_have_answered_as_many():
    queries = break_even(10.0, 15.0, 2.0)
    assert queries / 10 == pytest.approx(2.0 + queries / 15)
    assert math.isinf(break_even(10.0, 10.0, 2.0)) and break_even(0.0, 5.0, 2.0) == 0.0


@pytest.mark.parametrize(("factor", "choice"), [(0.9, "adjust"), (1.1, "redeploy")])
def test_redeploys_where_queries_are_left_for_it_to_pay(factor, choice):
    problem = toy_problem(outputs=LONGER)
    # so slow that far more queries must be left than are ever present
    problem = replace(problem, cluster=problem.cluster.with_nodes(host_bytes_per_s=1e6))
    better = rra(problem, tp_degree=2, tp_gpus=4).changed(throughput_qps=1e5)
    free = reschedule(rra(), problem, roofline_of(problem), best=answer(problem, better))
    assert free.choice == "redeploy" and free.chosen == better and math.isinf(free.queries_left)
    assert free.loading == redeployment(
        rra().deployment.pools,
        better.deployment.pools,
        problem.model,
        problem.dtype,
        problem.cluster,
    )
    assert free.cost_s == free.loading.from_dram_s > 0
    left = replace(problem, num_queries=int(factor * free.break_even_queries))
    found = reschedule(rra(), left, roofline_of(problem), best=answer(left, better))
    assert found.adjust == free.adjust
    assert found.choice == choice
    assert ("pays after" in found.sentence) == (choice == "adjust")


def test_keeps_what_is_still_best():
    problem = toy_problem()
    best = adjusted(rra(), problem).estimate
    found = reschedule(schedule_of(problem, best), problem, roofline_of(problem),
                       best=answer(problem, best))
    assert found.choice == "keep" and found.chosen == best and found.loading is None
    assert found.redeploy.reason == "no layer would move" and found.cost_s == 0.0


def test_adjusts_where_the_current_variables_break_the_bound():
    old = rra(encode_batch=40, decode_iterations=2)
    tightest_s = adjusted(old, toy_problem(
        outputs=LONGER, latency_s=1e-9)).estimate.figures.latency_s
    problem = toy_problem(outputs=LONGER, latency_s=tightest_s * 1.3)

    none = InfeasibleError("no schedule")
    found = reschedule(old, problem, roofline_of(problem), best=none)
    assert found.keep.qps == 0.0 and found.keep.reason.startswith("latency")
    assert (
        found.choice == "adjust" and found.chosen.figures.latency_s <= problem.constraint.latency_s
    )
    assert found.redeploy.reason == "no schedule" and "latency" in found.sentence
    tighter = reschedule(old, problem, roofline_of(problem), best=none,
                         latency_limit_s=found.chosen.figures.latency_s * 0.9)
    assert tighter.adjust.estimate.figures.latency_s <= found.chosen.figures.latency_s * 0.9
    impossible = reschedule(old, problem, roofline_of(problem), best=none, latency_limit_s=1e-9)
    assert impossible.choice is None and impossible.chosen is None
    assert "No schedule meets the bound" in impossible.sentence


def test_redeploys_where_nothing_else_is_admissible():
    problem = toy_problem(outputs=LONGER, latency_s=1e-9)
    other = rra(problem, tp_degree=4, tp_gpus=4)
    found = reschedule(rra(), problem, roofline_of(problem), best=answer(problem, other))
    assert found.choice == "redeploy" and found.break_even_queries == 0.0
    assert "Without moving layers no schedule is admissible" in found.sentence


def test_the_real_search_never_loses_to_what_is_deployed():
    problem = toy_problem(outputs=SHORTER)
    found = reschedule(rra(), problem, roofline_of(problem))
    best = max(found.keep.qps, found.adjust.qps, found.redeploy.qps)
    assert found.chosen.figures.throughput_qps >= best * 0.99
    assert found.adjust.qps >= found.keep.qps > 0


def test_a_schedule_that_cannot_be_deployed_here_is_refused():
    problem = toy_problem()
    with pytest.raises(InputError, match="devices of cluster"):
        reschedule(rra(), toy_problem(per_node=2), roofline_of(problem))
    fewer = replace(problem, model=replace(problem.model, num_layers=5))
    with pytest.raises(InputError, match="layers of toy"):
        reschedule(rra(), fewer, roofline_of(fewer))
    with pytest.raises(InputError, match="policy"):
        reschedule(rra().changed(policy="ft"), problem, roofline_of(problem))


def test_the_same_question_has_the_same_answer():
    problem = toy_problem(outputs=LONGER)
    first, second = (adjusted(rra(), problem) for _ in range(2))
    assert first == second and np.isfinite(first.qps)
