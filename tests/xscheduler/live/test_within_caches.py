"""What a run changes to stays within the caches that it has, however much more would be quicker."""

from typing import Any

import pytest
from problems import estimate_of, roofline_of, schedule_of, toy_problem

from xgpt.core.controls import max_in_system
from xgpt.core.schedule import Estimate
from xscheduler.live.at_once import revise_at_once
from xscheduler.live.reschedule import revise

SHORTER = (5, 2, 12)
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "waa": ("waa-c", {"encode_batch": 4, "decode_micro_batches": 2}),
    "waa in chunks": ("waa-c", {"encode_batch": 4, "decode_micro_batches": 2, "encode_chunk": 24}),
    "orca": ("orca", {"max_active": 24}),
    "vllm": ("vllm", {"max_active": 24, "token_budget": 200}),
    "sarathi": ("sarathi", {"max_active": 24, "token_budget": 60}),
}


def began_of(name: str) -> Estimate:
    policy, variables = RUNS[name]
    return estimate_of(toy_problem(), policy, **variables)


def assert_is_within(now: Estimate, began: Estimate) -> None:
    assert now.deployment == began.deployment, "stages, groups and KV tokens"
    assert max_in_system(now.controls) <= max_in_system(began.controls)
    for name in ("encode_batch", "token_budget"):
        if (most := getattr(began.controls, name, None)) is not None:
            assert getattr(now.controls, name) <= most
    if hasattr(began.controls, "encode_chunk"):
        assert now.controls.encode_chunk == began.controls.encode_chunk  # type: ignore[union-attr]
    assert now.figures.memory_bytes == began.figures.memory_bytes


@pytest.mark.parametrize("name", RUNS)
def test_limits_only_fall(name: str) -> None:
    """Shorter outputs leave room that was not there when the caches were made."""
    began, problem = began_of(name), toy_problem(outputs=SHORTER)
    found = revise(schedule_of(problem, began), problem, roofline_of(problem), began=began, worth=0)
    if found.estimate is not None:
        assert_is_within(found.estimate, began)
    assert found.keep.estimate is not None and found.is_kept
    assert_is_within(found.keep.estimate, began)


@pytest.mark.parametrize("name", RUNS)
def test_a_tight_bound_is_kept_with_less(name: str) -> None:
    began, free = began_of(name), toy_problem()
    keep = revise(schedule_of(free, began), free, roofline_of(free), began=began).keep
    assert keep.estimate is not None
    problem = toy_problem(latency_s=0.93 * keep.estimate.figures.latency_s)
    for revised in (revise, revise_at_once):
        given: dict[str, Any] = {"most_present": None} if revised is revise_at_once else {}
        found = revised(schedule_of(problem, began), problem, roofline_of(problem), began=began,
                        **given)
        assert found is not None and found.estimate is not None and found.keep.qps == 0
        assert found.keep.reason is not None and found.keep.reason.startswith("latency would be ")
        assert_is_within(found.estimate, began)
        assert found.estimate.figures.latency_s <= problem.constraint.latency_s
    # and back again, no further than the caches of the beginning
    back = revise(schedule_of(free, found.estimate), free, roofline_of(free), began=began)
    assert back.estimate is not None
    assert_is_within(back.estimate, began)
    assert back.estimate.figures.throughput_qps >= 0.98 * keep.qps


@pytest.mark.parametrize("chunk", [0, 50])
def test_rra_takes_up_no_more_queries_than_its_caches_hold(chunk: int) -> None:
    problem = toy_problem(outputs=SHORTER)
    now = estimate_of(toy_problem(), encode_batch=8, decode_iterations=8, encode_chunk=chunk)
    free, held = (revise(schedule_of(problem, now), problem, roofline_of(problem),
                         most_present=most).estimate for most in (None, 60))
    assert free is not None and held is not None
    assert held.figures.decode_batch <= 60.5 < free.figures.decode_batch
    for found in (free, held):
        assert found.deployment.stages == now.deployment.stages
        assert found.deployment.num_groups == now.deployment.num_groups
        assert (found.controls.encode_chunk > 0) == (chunk > 0)  # type: ignore[union-attr]
        assert found.figures.fits
