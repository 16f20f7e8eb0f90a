"""What a little more of each limit brings: asked of the right problems, told in the right words."""

import math
from dataclasses import replace

import pytest
from problems import MEMORY, roofline_of, schedule_of, toy_problem

from xgpt.core.errors import InfeasibleError
from xgpt.core.job import FixedSchedule
from xgpt.core.units import format_bytes
from xscheduler.planner import PlanOptions, plan
from xscheduler.price import NOTHING, price
from xsimulator.memory import capacity_bytes


class Recorder:
    """A search that answers by a function of the problem, and remembers what it was asked."""

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
    assert more == replace(problem, cluster=problem.cluster.with_nodes(devices_per_node=5))
    device = replace(problem.cluster.device, memory_bytes=round(MEMORY * 1.1))
    assert roomier == replace(problem, cluster=problem.cluster.with_nodes(device=device))
    assert format_bytes(capacity_bytes(device)) + " per rank" in offers[2].what
    assert [offer.what.split(" (")[0] for offer in offers] == [
        "10% more latency", "one more GPU", "10% more memory"]


def test_gpus_come_in_nodes():
    offers, asked = offers_of(toy_problem(nodes=2, per_node=2, latency_s=2.0))
    assert len(asked) == 4 and asked[2].cluster.num_nodes == 3
    assert asked[2].cluster.devices_per_node == 2 and "6 GPUs" in offers[1].what


def test_no_latency_is_offered_where_there_is_no_bound():
    offers, asked = offers_of(toy_problem())
    assert len(offers) == 2 and len(asked) == 3
    assert not any("latency" in offer.what for offer in offers)


def test_no_device_is_offered_where_the_workers_share_a_machine():
    offers, asked = offers_of(toy_problem(kind="cpu"))
    assert len(asked) == 2 and offers[0].throughput_qps is None
    assert "share this machine's cores" in offers[0].sentence


def test_gains_and_losses_are_shares_of_the_base():
    def qps(problem):
        return (13.0 if problem.cluster.num_devices == 5 else
                8.0 if problem.constraint.latency_s > 2.0 else 10.0)

    (later, gpu, memory), _ = offers_of(toy_problem(latency_s=2.0), qps)
    assert gpu.gain == pytest.approx(0.3) and gpu.reason is None and "+30.0%" in gpu.sentence
    assert later.gain == pytest.approx(-0.2) and "alone brings nothing" in later.reason
    assert memory.gain == 0.0 and "alone brings nothing" in memory.sentence
    (_, gpu, _), _ = offers_of(toy_problem(latency_s=2.0),
                               lambda p: 9.0 if p.cluster.num_devices == 5 else 10.0)
    assert "all devices must be used" in gpu.reason


@pytest.mark.parametrize("gain", [0.0, NOTHING / 2])
def test_a_gain_within_the_searchs_gap_is_none(gain):
    (_, gpu, _), _ = offers_of(toy_problem(latency_s=2.0), lambda p: (
        10.0 * (1 + gain) if p.cluster.num_devices == 5 else 10.0))
    assert gpu.reason is not None


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
    assert gpu.throughput_qps == 7.0 and gpu.gain is None and "no schedule now" in gpu.sentence
    for offer in (later, memory):
        assert offer.throughput_qps is None and offer.reason.startswith("no schedule then either")


def test_what_the_job_fixes_may_not_go_with_another_gpu():
    # the toy has six layers: six single devices are the most that a copy can have
    fixed = FixedSchedule(policies=("rra",), tp_degree=1, tp_gpus=0, replicas=1)
    problem = toy_problem(per_node=6, latency_s=math.inf, fixed=fixed)
    gpu, _ = price(problem, searched)
    assert gpu.gain is None or gpu.gain <= 0.02


def test_the_real_search_finds_each_offers_worth():
    fixed = FixedSchedule(policies=("rra",), tp_degree=1, tp_gpus=0, decode_iterations=4)
    free = searched(toy_problem(fixed=fixed))
    problem = toy_problem(fixed=fixed, latency_s=free.estimate.figures.latency_s / 3)
    later, gpu, memory = price(problem, searched)
    relaxed = replace(
        problem,
        constraint=problem.constraint.with_latency(limit_s=problem.constraint.latency_s * 1.1),
    )
    expected = searched(relaxed).figures.throughput_qps
    assert later.throughput_qps == expected and later.gain > 0.01
    assert gpu.gain is not None and memory.gain == pytest.approx(0.0, abs=0.006)
