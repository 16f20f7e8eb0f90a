"""Three sentences about a choice: each says what the figures say, and nothing else."""

import math

import pytest
from problems import estimate_of, schedule_of, toy_problem

from xgpt.core.job import FixedSchedule
from xgpt.core.schedule import Rejected
from xscheduler.explanation import binding_limits, explain_choice
from xscheduler.shown import why_not
from xsimulator import memory


def rejected(label, qps=None, reason="x", latency_s=1.0):
    return Rejected(label=label, throughput_qps=qps, latency_s=qps and latency_s, reason=reason)


ROWS = (rejected("policy waa-c: encode_batch 3, decode_micro_batches 2", 80.0),
        rejected("policy waa-m"), rejected("tp_degree 2: encode_batch 4", 90.0),
        rejected("tp_degree 4"),
        rejected("without a latency bound: encode_batch 9", 200.0, latency_s=7.0))
NOT_SURE = rejected("policy waa-c: encode_batch 3", 125.0, why_not(125.0, 100.0))
UNSEEN = rejected("policy waa-m", None, "not looked into: no more than 90 queries/s")
BOUND = {"latency_s": 2.0}
FIXED = FixedSchedule(policies=("rra",))
FULL = {"latency_s": 1.995, "memory_bytes": (10, 10, 536_000_000, 10)}


def sentences(given=BOUND, *, rejected=ROWS, unbounded_qps=None, policy_bounds=(), **figures):
    problem = toy_problem(**given)
    schedule = schedule_of(problem, **{"throughput_qps": 100.0, "latency_s": 1.0, **figures})
    return explain_choice(schedule.changed(
        rejected=rejected, unbounded_qps=unbounded_qps,
        **({"policy_bounds": policy_bounds} if policy_bounds else {})), problem)


@pytest.mark.parametrize(("place", "changes", "words"), [
    # the policy, compared with each other one, is never said to be better than it is
    (0, {}, "RRA (every device encodes and decodes in turn"),
    (0, {}, "25.0% more than the best of WAA-C (encode_batch 3, decode_micro_batches 2)"),
    (0, {}, "WAA-M has no schedule"),
    (0, {"rejected": (rejected("policy waa-c", 125.0),)}, "20.0% less than the best of WAA-C"),
    (0, {"rejected": (rejected("policy waa-c", 100.0),)}, "as many as the best of WAA-C"),
    (0, {"rejected": (NOT_SURE,)},
     "less than the best of WAA-C (encode_batch 3; not sure enough to keep the bound)"),
    (0, {"rejected": ROWS[:1], "policy_bounds": (("rra", 101.0), ("waa-c", 95.0))},
     "more than the best seen of WAA-C (encode_batch 3, decode_micro_batches 2; no more than 95 "
     "queries/s)"),
    (0, {"rejected": ROWS[:1], "policy_bounds": (("rra", 101.0), ("waa-c", 80.4))},
     "more than the best of WAA-C"),
    (0, {"rejected": ()}, "no other policy was compared"),
    (0, {"rejected": (), "given": {**BOUND, "fixed": FIXED}}, "the job fixes the policy"),
    (0, {"rejected": ROWS[1:2]}, "only policy that can be used"),
    (0, {"rejected": (ROWS[0], UNSEEN)}, "WAA-M was not looked into: no more than 90 queries/s."),
    (0, {"rejected": (UNSEEN,)}, "WAA-M was not looked into: no more than 90 queries/s."),
    (0, {"encode_s": 0.5, "period_s": 2.0}, "encoding for 25% of the time"),
    # the variables, with what they keep at work
    (1, {"encode_batch": 6, "decode_iterations": 5},
     "6 queries are encoded together once every 5 iterations"),
    (1, {"decode_batch": 17.4}, "keeps 17 decoding"),
    (1, {}, "4 groups on 4 decoding stages: each has one to work on"),
    (1, {}, "degree 2, the next best, would lose 10.0%"), (1, {}, "1 to 2 layers each"),
    (1, {"encode_batch": 1}, "One query is"),
    (1, {"decode_micro_batches": 1}, "75% of the stages idle"),
    (1, {"decode_micro_batches": 3}, "25% of the stages idle"),
    (1, {"decode_micro_batches": 5}, "one to work on, 1 more waits its turn"),
    (1, {"decode_micro_batches": 8}, "one to work on, 4 more wait their turn"),
    # what the bound costs, and what limits the speed
    (2, {"unbounded_qps": 200.0}, "the bound costs 50% of the 200 queries/s"),
    (2, {"unbounded_qps": 200.0}, "at 7.00 s"), (2, {"unbounded_qps": 100.1}, "no more than 100.1"),
    (2, {"given": {}}, "there is no latency bound"),
    (2, {"unbounded_qps": 200.0, **FULL}, "The latency bound and memory limit the speed"),
    (2, {"unbounded_qps": 100.1, **FULL},
     "Memory limits the speed; the latency bound is reached, too, and costs"),
    (2, {"unbounded_qps": 100.1, "latency_s": 1.995},
     "The latency bound is reached, but costs nothing")])
def test_a_sentence_says_what_the_figures_say(place, changes, words):
    sentence = sentences(**changes)[place]
    assert words in sentence
    if UNSEEN in changes.get("rejected", ()):
        assert "no schedule" not in sentence and "only policy" not in sentence


def test_a_waa_schedule_names_its_pools():
    problem = toy_problem(latency_s=2.0)
    found = estimate_of(problem, "waa-c", encode_batch=4, decode_micro_batches=2)
    encode = found.deployment.encoding.num_devices
    policy, variables, _ = explain_choice(schedule_of(problem, found), problem)
    assert policy.startswith("WAA-C") and f"while {4 - encode} decode" in policy
    assert policy.count(f"{encode} device") == 1
    assert "4 queries are encoded at a time" in variables
    assert f"which keeps {found.figures.decode_batch:.0f} decoding" in variables


# --- what binds -------------------------------------------------------------------------------


@pytest.mark.parametrize(("figures", "binds"), [
    ({"latency_s": 1.995}, ["the latency bound"]), ({"latency_s": 1.9}, []),
    ({"latency_s": 1.0, "memory_bytes": FULL["memory_bytes"]}, ["memory"]),
    (FULL, ["the latency bound", "memory"])])
def test_what_binds_by_what_is_left(figures, binds):
    problem = toy_problem(latency_s=2.0)
    schedule = schedule_of(problem, **figures)
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
