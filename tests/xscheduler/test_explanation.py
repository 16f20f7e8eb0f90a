"""Three sentences on a choice agree with the figures; offers for relaxed limits."""

import math
from dataclasses import replace

import pytest
from problems import MEMORY, estimate_of, roofline_of, schedule_of, toy_problem

from xgpt.core.controls import Adjustment, Admission, FixedSchedule
from xgpt.core.errors import InfeasibleError
from xgpt.core.schedule import Rejected
from xgpt.core.units import format_bytes
from xscheduler.explanation import binding_limits, explain_choice
from xscheduler.planner import PlanOptions, plan
from xscheduler.price import price
from xscheduler.space import NOTHING
from xsimulator import memory
from xsimulator.memory import capacity_bytes


def rejected(kind, subject, qps=None, words="", latency_s=1.0, is_unsure=False):
    return Rejected(kind=kind, subject=subject, words=words, throughput_qps=qps,
                    latency_s=qps and latency_s, reason="x", is_unsure=is_unsure)


ROWS = (rejected("policy", "waa-c", 80.0, "encode_batch 3, decode_micro_batches 2"),
        rejected("policy", "waa-m"), rejected("tp_degree", "2", 90.0, "encode_batch 4"),
        rejected("tp_degree", "4"),
        rejected("without a latency bound", "", 200.0, "encode_batch 9", latency_s=7.0))
NOT_SURE = rejected("policy", "waa-c", 125.0, "encode_batch 3", is_unsure=True)
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
    (0, {}, "answers 100 requests/s in steady state; WAA-C 80 (encode_batch 3, "
            "decode_micro_batches 2)"),
    (0, {}, "WAA-M has no schedule"),
    (0, {"rejected": (rejected("policy", "waa-c", 125.0),)},
     "answers 100 requests/s in steady state; WAA-C 125"),
    (0, {"rejected": (NOT_SURE,)}, "WAA-C 125 (encode_batch 3; not sure enough to keep the bound)"),
    (0, {"rejected": ROWS[:1], "policy_bounds": (("rra", 101.0), ("waa-c", 95.0))},
     "WAA-C between 80 (encode_batch 3, decode_micro_batches 2) and 95"),
    (0, {"rejected": ROWS[:1], "policy_bounds": (("rra", 101.0), ("waa-c", 80.4))},
     "WAA-C 80 (encode_batch 3, decode_micro_batches 2)"),
    (0, {"rejected": ()}, "no other policy was compared"),
    (0, {"rejected": (), "given": {**BOUND, "fixed": FIXED}}, "the job fixes the policy"),
    (0, {"rejected": ROWS[1:2]}, "only policy that can be used"),
    (0, {"encode_s": 0.5, "period_s": 2.0}, "encoding for 25% of the time"),
    # the variables, with what they keep at work
    (1, {"encode_batch": 6, "decode_iterations": 5},
     "6 requests are encoded together once every 5 iterations"),
    (1, {"decode_batch": 17.4}, "keeps 17 decoding"),
    (1, {}, "one group for each of 4 decoding stages"),
    (1, {}, "degree 2, the next best, would lose 10.0%"), (1, {}, "1 to 2 layers each"),
    (1, {"encode_batch": 1}, "One request is"),
    (1, {"decode_micro_batches": 1}, "75% of the stages idle"),
    (1, {"decode_micro_batches": 3}, "25% of the stages idle"),
    (1, {"decode_micro_batches": 5}, "decoding stages, 1 more waits its turn"),
    (1, {"decode_micro_batches": 8}, "decoding stages, 4 more wait their turn"),
    # the cost of the limit, and the binding limits
    (2, {"unbounded_qps": 200.0}, "the limit costs 50% of the 200 requests/s"),
    (2, {"unbounded_qps": 200.0}, "at 7.00 s"), (2, {"unbounded_qps": 100.1}, "no more than 100.1"),
    (2, {"given": {}}, "there is no latency limit"),
    (2, {"unbounded_qps": 200.0, **FULL}, "Throughput is bound by the latency limit and memory"),
    (2, {"unbounded_qps": 100.1, **FULL},
     "Throughput is bound by memory; the latency limit is reached, too, and costs"),
    (2, {"unbounded_qps": 100.1, "latency_s": 1.995},
     "The latency limit is reached, but costs nothing")])
def test_a_sentence_says_what_the_figures_say(place, changes, words):
    sentence = sentences(**changes)[place]
    assert words in sentence


def test_a_waa_schedule_names_its_pools():
    problem = toy_problem(latency_s=2.0)
    found = estimate_of(problem, "waa-c", encode_batch=4, decode_micro_batches=2)
    encode = found.deployment.encoding.num_devices
    policy, variables, _ = explain_choice(schedule_of(problem, found), problem)
    assert policy.startswith("WAA-C") and f"while {4 - encode} decode" in policy
    assert policy.count(f"{encode} device") == 1
    assert "4 requests are encoded at a time" in variables
    assert f"which keeps {found.figures.decode_batch:.0f} decoding" in variables


# --- what binds -------------------------------------------------------------------------------


@pytest.mark.parametrize(("figures", "binds"), [
    ({"latency_s": 1.995}, ["the latency limit"]), ({"latency_s": 1.9}, []),
    ({"latency_s": 1.0, "memory_bytes": FULL["memory_bytes"]}, ["memory"]),
    (FULL, ["the latency limit", "memory"])])
def test_a_limit_binds_if_little_of_it_is_left(figures, binds):
    problem = toy_problem(latency_s=2.0)
    schedule = schedule_of(problem, **figures)
    assert binding_limits(schedule, problem, 2.0) == binds
    assert ("No limit is reached" in explain_choice(schedule, problem)[2]) == (not binds)


def test_memory_binds_if_another_request_does_not_fit():
    problem = toy_problem()
    found = schedule_of(problem).estimate
    weights = memory.weight_bytes(problem.model, found.deployment.stages, problem.dtype)[0]
    room = found.figures.memory_capacity_bytes - weights
    # of two requests in a batch each takes half of what is not weights: a third needs as much
    for share, binds in ((0.70, ["memory"]), (0.62, [])):
        used = int(weights + room * share)
        schedule = schedule_of(problem, encode_batch=2, memory_bytes=(used, 1, 1, 1))
        assert binding_limits(schedule, problem, math.inf) == binds


def test_the_number_of_queries_binds_where_another_batch_would_exceed_it():
    schedule = schedule_of(toy_problem(), encode_batch=4, decode_batch=10.0)
    assert binding_limits(schedule, toy_problem(num_queries=11), math.inf) == [
        "the number of requests"]
    assert binding_limits(schedule, toy_problem(num_queries=20), math.inf) == []


def test_a_margin_is_a_limit_of_its_own():
    problem = toy_problem(latency_s=2.0)
    schedule = schedule_of(problem, latency_s=1.79)
    words = explain_choice(schedule, problem, latency_limit_s=1.8)[2]
    assert words.startswith("Throughput is bound by the latency limit (")
    assert "1.80 s with its margin" in words
    assert explain_choice(schedule, problem)[2].startswith("No limit is reached")


# --- what a little more of each limit brings --------------------------------------------------


class Recorder:
    """A search that answers by a function of the problem, and records the problems."""

    def __init__(self, qps):
        self.asked, self._qps = [], qps

    def __call__(self, problem):
        self.asked.append(problem)
        return schedule_of(problem, throughput_qps=self._qps(problem))


def offers_of(problem, qps=lambda _: 10.0):
    search = Recorder(qps)
    return price(problem, search), search.asked


def searched(problem):
    return plan(problem, roofline_of(problem), PlanOptions(horizon="steady", is_brief=True))


def test_each_offer_relaxes_one_limit_and_nothing_else():
    problem = toy_problem(latency_s=2.0)
    offers, asked = offers_of(problem)
    base, later, more, roomier = asked
    assert base == problem and len(offers) == 3
    assert later == replace(problem, constraint=problem.constraint.with_latency(limit_s=2.0 * 1.1))
    assert more == replace(problem, cluster=replace(problem.cluster, devices_per_node=5))
    device = replace(problem.cluster.device, memory_bytes=round(MEMORY * 1.1))
    assert roomier == replace(problem, cluster=replace(problem.cluster, device=device))
    assert format_bytes(capacity_bytes(device)) + " per rank" in offers[2].what
    assert [offer.what.split(" (")[0] for offer in offers] == [
        "10% more latency", "one more GPU", "10% more memory"]


def test_offers_are_of_limits_that_can_be_relaxed():
    offers, asked = offers_of(toy_problem(nodes=2, per_node=2, latency_s=2.0))
    assert len(asked) == 4 and asked[2].cluster.num_nodes == 3, "GPUs come in nodes"
    assert asked[2].cluster.devices_per_node == 2 and "6 GPUs" in offers[1].what
    offers, asked = offers_of(toy_problem())  # no bound
    assert len(offers) == 2 and len(asked) == 3
    assert not any("latency" in offer.what for offer in offers)
    offers, asked = offers_of(toy_problem(kind="cpu"))  # whose workers share a machine
    assert len(asked) == 2 and offers[0].throughput_qps is None
    assert "share this machine's cores" in offers[0].sentence


def test_gains_and_losses_are_shares_of_the_base():
    def qps(problem):
        return (13.0 if problem.cluster.num_devices == 5 else
                8.0 if problem.constraint.latency_s > 2.0 else 10.0)

    (later, gpu, memory), _ = offers_of(toy_problem(latency_s=2.0), qps)
    assert gpu.gain == pytest.approx(0.3) and gpu.reason is None and "+30.0%" in gpu.sentence
    assert later.gain == pytest.approx(-0.2) and "no gain from that alone" in later.reason
    assert memory.gain == 0.0 and "no gain from that alone" in memory.sentence
    for with_more in (9.0, 10.0, 10.0 * (1 + NOTHING / 2)):
        (_, gpu, _), _ = offers_of(toy_problem(latency_s=2.0), lambda p, more=with_more: (
            more if p.cluster.num_devices == 5 else 10.0))
        assert gpu.reason is not None, "a gain within the search's gap is none"
        assert ("all devices must be used" in gpu.reason) == (with_more < 10)


def test_changed_variables_are_named():
    problem = toy_problem(latency_s=2.0)

    def search(asked):
        more = asked.constraint.latency_s > 2.0
        return schedule_of(asked, throughput_qps=12.0 if more else 10.0,
                           encode_batch=9 if more else 4)

    later, _, _ = price(problem, search)
    assert [str(change) for change in later.changes] == ["encode_batch 4 -> 9"]
    assert "(encode_batch 4 -> 9)" in later.sentence


def test_an_infeasible_problem_is_told_what_would_make_it_feasible():
    problem = toy_problem(latency_s=2.0)

    def search(asked):
        if asked.cluster.num_devices < 5:
            raise InfeasibleError("the tightest that can be met is 2.5 s")
        return schedule_of(asked, throughput_qps=7.0)

    first, later, gpu, memory = price(problem, search)
    assert "2.5 s" in first.sentence and first.throughput_qps is None
    assert gpu.throughput_qps == 7.0 and gpu.gain is None and (
        "without it there is no schedule" in gpu.sentence)
    for offer in (later, memory):
        assert offer.throughput_qps is None and offer.reason.startswith("no schedule then either")


def test_the_real_search_finds_each_offers_worth():
    # the toy has six layers: six single devices are the most that a replica can have
    one = FixedSchedule(policies=("rra",), tp_degree=1, tp_gpus=0, replicas=1)
    gpu, _ = price(toy_problem(per_node=6, fixed=one), searched)
    assert gpu.gain is None or gpu.gain <= 0.02
    fixed = FixedSchedule(policies=("rra",), tp_degree=1, tp_gpus=0, decode_iterations=4)
    reserves = Adjustment(admission=Admission(rule="reserve"))
    free = searched(replace(toy_problem(fixed=fixed), adjustment=reserves))
    problem = replace(toy_problem(fixed=fixed, latency_s=free.estimate.figures.latency_s / 3),
                      adjustment=reserves)
    later, gpu, memory = price(problem, searched)
    relaxed = replace(problem, constraint=problem.constraint.with_latency(
        limit_s=problem.constraint.latency_s * 1.1))
    expected = searched(relaxed).figures.throughput_qps
    assert later.throughput_qps == expected and later.gain > 0.01
    assert gpu.gain is not None and memory.gain == pytest.approx(0.0, abs=0.006)
