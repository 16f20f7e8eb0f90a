"""Three sentences about a choice: each says what the figures say, and nothing else."""

import math

import pytest
from problems import estimate_of, schedule_of, toy_problem

from xgpt.core.job import FixedSchedule
from xgpt.core.schedule import Rejected
from xscheduler.explanation import binding_limits, explain_choice
from xscheduler.shown import why_not
from xsimulator import memory

ROWS = (
    Rejected(label="policy waa-c: encode_batch 3, decode_micro_batches 2", throughput_qps=80.0,
             latency_s=1.0, reason="lower throughput"),
    Rejected(label="policy waa-m", throughput_qps=None, latency_s=None, reason="memory"),
    Rejected(label="tp_degree 2: encode_batch 4", throughput_qps=90.0, latency_s=1.0, reason="x"),
    Rejected(label="tp_degree 4", throughput_qps=None, latency_s=None, reason="x"),
    Rejected(label="without a latency bound: encode_batch 9", throughput_qps=200.0, latency_s=7.0,
             reason="latency above 1 s"),
)


def sentences(problem=None, *, rejected=ROWS, unbounded_qps=None, **figures):
    problem = problem or toy_problem(latency_s=2.0)
    figures = {"throughput_qps": 100.0, "latency_s": 1.0, **figures}
    schedule = schedule_of(problem, **figures).changed(rejected=rejected,
                       unbounded_qps=unbounded_qps)
    return explain_choice(schedule, problem)


def test_the_policy_is_compared_with_each_other_one():
    policy = sentences()[0]
    assert policy.startswith("RRA (every device encodes and decodes in turn")
    assert "25.0% more than the best of WAA-C (encode_batch 3, decode_micro_batches 2)" in policy
    assert "WAA-M has no schedule" in policy


@pytest.mark.parametrize(("qps", "words"), [(125.0, "20.0% less than the best of WAA-C"),
                                            (100.0, "as many as the best of WAA-C")])
def test_a_policy_is_never_said_to_be_better_than_it_is(qps, words):
    row = Rejected(label="policy waa-c", throughput_qps=qps, latency_s=1.0, reason="x")
    assert words in sentences(rejected=(row,))[0]


def test_a_quicker_policy_is_said_not_to_be_sure_enough():
    row = Rejected(label="policy waa-c: encode_batch 3", throughput_qps=125.0, latency_s=1.0,
                   reason=why_not(125.0, 100.0))
    assert ("less than the best of WAA-C (encode_batch 3; not sure enough to keep the bound)"
            in sentences(rejected=(row,))[0])


def test_a_policy_that_was_not_searched_to_its_best_is_said_to_have_been_seen():
    problem = toy_problem(latency_s=2.0)
    schedule = schedule_of(problem, throughput_qps=100.0, latency_s=1.0).changed(
        rejected=ROWS[:1], policy_bounds=(("rra", 101.0), ("waa-c", 95.0)))
    assert ("more than the best seen of WAA-C (encode_batch 3, decode_micro_batches 2; no more "
            "than 95 queries/s)") in explain_choice(schedule, problem)[0]
    searched = schedule.changed(policy_bounds=(("rra", 101.0), ("waa-c", 80.4)))
    assert "more than the best of WAA-C" in explain_choice(searched, problem)[0]


def test_without_rows_of_other_policies_none_is_compared():
    assert "no other policy was compared" in sentences(rejected=())[0]
    fixed = toy_problem(latency_s=2.0, fixed=FixedSchedule(policies=("rra",)))
    assert "the job fixes the policy" in sentences(fixed, rejected=())[0]
    assert "only policy that can be used" in sentences(rejected=ROWS[1:2])[0]


def test_a_policy_that_was_not_looked_into_is_not_said_to_have_no_schedule():
    row = Rejected(label="policy waa-m", throughput_qps=None, latency_s=None,
                   reason="not looked into: no more than 90 queries/s")
    for rejected in ((ROWS[0], row), (row,)):
        words = sentences(rejected=rejected)[0]
        assert words.endswith("WAA-M was not looked into: no more than 90 queries/s.")
        assert "no schedule" not in words and "only policy" not in words


def test_the_share_of_encoding_is_that_of_the_period():
    assert "encoding for 25% of the time" in sentences(encode_s=0.5, period_s=2.0)[0]


def test_a_waa_schedule_names_its_pools():
    problem = toy_problem(latency_s=2.0)
    found = estimate_of(problem, "waa-c", encode_batch=4, decode_micro_batches=2)
    encode = found.deployment.encoding.num_devices
    policy, variables, _ = explain_choice(schedule_of(problem, found), problem)
    assert policy.startswith("WAA-C") and f"while {4 - encode} decode" in policy
    assert policy.count(f"{encode} device") == 1
    assert "4 queries are encoded at a time" in variables
    assert f"which keeps {found.figures.decode_batch:.0f} decoding" in variables


def test_the_control_variables_are_said_with_what_they_keep_at_work():
    words = sentences(decode_batch=17.4, encode_batch=6, decode_iterations=5)[1]
    assert "6 queries are encoded together once every 5 iterations" in words
    assert "keeps 17 decoding" in words
    assert "4 groups on 4 decoding stages: each has one to work on" in words
    assert "degree 2, the next best, would lose 10.0%" in words
    assert "1 to 2 layers each" in words
    assert "One query is" in sentences(encode_batch=1)[1]


@pytest.mark.parametrize(("groups", "words"), [(1, "75% of the stages idle"),
                                               (3, "25% of the stages idle"),
                                               (5, "one to work on, 1 more waits its turn"),
                                               (8, "one to work on, 4 more wait their turn")])
def test_bubbles_are_told(groups, words):
    assert words in sentences(decode_micro_batches=groups)[1]


def test_the_cost_of_the_bound_is_against_none():
    assert "the bound costs 50% of the 200 queries/s" in sentences(unbounded_qps=200.0)[2]
    assert "at 7.00 s" in sentences(unbounded_qps=200.0)[2]
    assert "no more than 100.1" in sentences(unbounded_qps=100.1)[2]
    assert "there is no latency bound" in sentences(toy_problem())[2]


def test_a_bound_that_costs_nothing_is_not_what_limits_the_speed():
    full = {"latency_s": 1.995, "memory_bytes": (10, 10, 536_000_000, 10)}
    costly, free = (sentences(toy_problem(latency_s=2.0), unbounded_qps=qps, **full)[2]
                    for qps in (200.0, 100.1))
    assert costly.startswith("The latency bound and memory limit the speed")
    assert free.startswith("Memory limits the speed; the latency bound is reached, too, and costs")
    alone = sentences(toy_problem(latency_s=2.0), unbounded_qps=100.1, latency_s=1.995)[2]
    assert alone.startswith("The latency bound is reached, but costs nothing")


# --- what binds -------------------------------------------------------------------------------


@pytest.mark.parametrize(("figures", "binds"), [
    ({"latency_s": 1.995}, ["the latency bound"]), ({"latency_s": 1.9}, []),
    ({"memory_bytes": (10, 10, 536_000_000, 10)}, ["memory"]),
    ({"latency_s": 1.995, "memory_bytes": (10, 10, 536_000_000, 10)},
     ["the latency bound", "memory"]),
])
def test_what_binds_by_what_is_left(figures, binds):
    problem = toy_problem(latency_s=2.0)
    schedule = schedule_of(problem, **{"latency_s": 1.0, **figures})
    assert binding_limits(schedule, problem, 2.0) == binds
    assert ("No limit is reached" in explain_choice(schedule, problem)[2]) == (not binds)


def test_memory_binds_where_another_query_would_not_find_room():
    problem = toy_problem()
    found = schedule_of(problem).estimate
    weights = memory.weight_bytes(problem.model, found.deployment.stages, problem.dtype)[0]
    room = found.figures.memory_capacity_bytes - weights
    # of two queries in a batch each takes half of what is not weights: a third needs as much
    for share, binds in ((0.70, ["memory"]), (0.62, [])):
        used = int(weights + room * share)
        schedule = schedule_of(problem, encode_batch=2, memory_bytes=(used, 1, 1, 1))
        assert binding_limits(schedule, problem, math.inf) == binds


def test_the_number_of_queries_binds_where_another_batch_would_exceed_it():
    schedule = schedule_of(toy_problem(), encode_batch=4, decode_batch=10.0)
    assert binding_limits(schedule, toy_problem(num_queries=11), math.inf) == [
        "the number of queries"]
    assert binding_limits(schedule, toy_problem(num_queries=20), math.inf) == []


def test_a_margin_is_a_limit_of_its_own():
    problem = toy_problem(latency_s=2.0)
    schedule = schedule_of(problem, latency_s=1.79)
    words = explain_choice(schedule, problem, latency_limit_s=1.8)[2]
    assert words.startswith("The latency bound limits") and "1.80 s with its margin" in words
    assert explain_choice(schedule, problem)[2].startswith("No limit is reached")
