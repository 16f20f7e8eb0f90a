"""Times of stages whose groups are joined by different links, and of groups over several nodes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from problems import roofline_of, toy_problem
from published.runs import Shape, static_batch_s, superpod_link

from xgpt.core import catalog
from xgpt.core.cluster import Cluster, places_of
from xgpt.core.job import FixedSchedule
from xgpt.core.model import ModelSpec
from xprofiler.links import link_kind
from xprofiler.roofline import Roofline
from xprofiler.timing import MessageKind
from xscheduler.tensor_plans import tensor_plans
from xsimulator.plans import StagePlans

BRIDGE, BUS = catalog.link("nvlink3-bridge"), catalog.link("pcie4-x16")
A40 = catalog.cluster("a40-4").with_nodes(intra_link=BUS)
# Published: FasterTransformer's guide (docs/gpt_guide.md of 2022), Megatron 530B on nodes of eight
# A100-80, NVSwitch inside and 8 x 200 Gb/s between; ms of 60 tokens in and 20 out, by batch
MEGATRON = ModelSpec(name="megatron-530b", family="gpt2", num_layers=105, hidden_size=20480,
                     num_heads=128, vocab_size=51200, intermediate_size=4 * 20480)
PUBLISHED_MS = {16: {1: 1379, 4: 1512, 16: 1868, 64: 3383, 128: 5406},
                32: {1: 1037, 4: 1198, 16: 1454, 64: 2646, 128: 4099, 256: 7203}}


def _joined(*groups: tuple[int, ...]) -> Cluster:
    return A40.with_nodes(**places_of(4, {BRIDGE: groups}))


def _step_s(cluster: Cluster, degree: int) -> NDArray[np.float64]:
    """[stages] of decoding 64 queries."""
    problem = replace(toy_problem(), cluster=cluster)
    plan = StagePlans(problem, roofline_of(problem)).both(degree, 4 if degree > 1 else 0)
    return plan.times.decode_s(64.0, 99.0)


def test_sums_of_a_pair_go_over_its_bridge_and_those_of_four_over_the_bus() -> None:
    bus, pairs = A40, _joined((0, 1), (2, 3))
    assert (_step_s(pairs, 2) < _step_s(bus, 2)).all()
    assert _step_s(pairs, 4).tolist() == _step_s(bus, 4).tolist()
    # single devices: two of three edges go over a bridge, and the way back over the bus
    single, faster = _step_s(bus, 1), _step_s(pairs, 1)
    assert [a < b for a, b in zip(faster, single, strict=True)] == [True, False, True, False]


def test_groups_of_one_degree_over_different_links_take_their_own_time() -> None:
    problem = replace(toy_problem(), cluster=_joined((2, 3)))
    first, second = StagePlans(problem, roofline_of(problem)).both(2, 4).stages
    assert first.num_layers > second.num_layers, "ranks 0 and 1 have the bridge"
    mixed, bus, pairs = (_step_s(cluster, 2) for cluster in (
        problem.cluster, A40, _joined((0, 1), (2, 3))))
    more, fewer = first.num_layers - 3, 3 - second.num_layers  # than where both have the same
    of_bridge, of_bus = (mixed[0] - pairs[0]) / more, (bus[1] - mixed[1]) / fewer
    layers = StagePlans(problem, roofline_of(problem)).layers
    for link, layer_s in ((BRIDGE, of_bridge), (BUS, of_bus)):
        assert layer_s == pytest.approx(float(
            layers.decode_rest_s(64.0, 2, link) + layers.decode_attention_s(64.0, 99.0, 2)))
    assert of_bus > 1.2 * of_bridge


@pytest.mark.parametrize(("degree", "at_first", "at_last"), [(1, 0, 0), (2, 1, 1), (4, 2, 2)])
def test_our_ranks_tell_their_group_each_step_and_gather_what_its_heads_choose(
        degree: int, at_first: int, at_last: int) -> None:
    problem = replace(toy_problem(), cluster=_joined((0, 1), (2, 3)))
    plain, ours = roofline_of(problem), roofline_of(problem)
    ours.facts = replace(ours.facts, sends_in_groups=True)
    added = []
    for work in (lambda times: times.decode_s(64.0, 99.0), lambda times: times.encode_s(
            64.0, 64.0, {degree: np.zeros(())})):
        without, with_them = (work(StagePlans(problem, timing).both(
            degree, 4 if degree > 1 else 0).times) for timing in (plain, ours))
        added.append(with_them - without)
    link = BRIDGE if degree == 2 else BUS
    message_s = float(plain.message_s(MessageKind.TRANSFER, 8 * 64.0, link))
    for each in added:
        assert each[0] == pytest.approx(at_first * message_s, abs=1e-12)
        assert each[-1] == pytest.approx(at_last * message_s, abs=1e-12)
        assert (each[1:-1] == 0).all() or degree == 4, "what is passed on was charged before"


def test_a_bridge_of_four_lanes_counts_as_nvlink() -> None:
    assert link_kind(BRIDGE) == "nvlink" and link_kind(BUS) == "pcie"
    assert link_kind(catalog.link("ib-400g")) == "network"


@pytest.mark.parametrize("degree", PUBLISHED_MS)
def test_groups_over_nodes_take_what_was_published_of_megatron_530b(degree: int) -> None:
    source = Roofline(MEGATRON, catalog.device("A100-80"), "float16", engine="fastertransformer")
    found = np.array([static_batch_s(source, MEGATRON, superpod_link(degree), Shape(
        degree, batch, 60, 20)) for batch in PUBLISHED_MS[degree]])
    errors = 1e3 * found / np.array([*PUBLISHED_MS[degree].values()]) - 1
    assert np.abs(errors).mean() < 0.12, errors
    assert abs(errors.mean()) < 0.05, errors


def test_a_group_over_nodes_is_looked_at_where_it_is_asked_for_or_needed() -> None:
    problem = toy_problem(nodes=2, per_node=2)
    timing = roofline_of(problem)
    assert {plan.tp_degree for plan in tensor_plans(problem, timing)} == {1, 2}
    asked = replace(problem, fixed=FixedSchedule(tp_degree=4))
    assert {plan.tp_degree for plan in tensor_plans(asked, timing)} == {4}
    device = replace(problem.cluster.device, memory_bytes=500_000_000)
    wide = replace(problem.model, hidden_size=8192, intermediate_size=4 * 8192, num_layers=1)
    full = replace(problem, model=wide, cluster=problem.cluster.with_nodes(device=device))
    assert 4 in {plan.tp_degree for plan in tensor_plans(full, timing)}
