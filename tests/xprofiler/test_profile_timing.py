"""A profile as a TimingSource: each table in its own shape, refusals and marks in words."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from profiles import amdahl, metadata, profile_of

from xgpt.core import catalog
from xgpt.core.cluster import Link
from xgpt.core.errors import XgptError
from xprofiler.profile import (
    ALL_REDUCE,
    ENGINE_START,
    HANDOVER,
    HANDOVER_DIRECT,
    STEP_OVERHEAD,
    STREAMED,
    STREAMED_PARTS,
    TRANSFER,
    LearnedSteps,
    Profile,
    Sample,
    TableKey,
)
from xprofiler.profile_timing import Factor, ProfileTiming, Retimed, table_shape
from xprofiler.raised import Raised
from xprofiler.roofline import Roofline
from xprofiler.timing import MessageKind, Operator, of_role

REDUCE, SEND, HAND_OVER = MessageKind.ALL_REDUCE, MessageKind.TRANSFER, MessageKind.HANDOVER

METADATA = metadata(device="cpu worker", ranks=2, threads_per_rank=3, date="2026-11-21")
NEAR = Link(name="near", bandwidth_bytes_per_s=1e9, latency_s=1e-6)
FAR = Link(name="far", bandwidth_bytes_per_s=1e8, latency_s=1e-5)
FALLBACK = Roofline(catalog.model("opt-125m"), catalog.device("A100-80"), "float16")


def points(*triples: tuple[float, float, float]) -> tuple[Sample, ...]:
    """Points whose median is the third figure, whatever the other samples are."""
    return tuple(Sample(x=x, y=y, samples_s=(9e9, s, 0.0)) for x, y, s in triples)


LINE = points((1, 0, 1.0), (4, 0, 4.0), (8, 0, 6.0))
TABLES = {
    TableKey("layer_rest"): LINE, TableKey("layer_rest", 4): LINE, TableKey("head"): LINE,
    TableKey("decode_attention"): points((1, 10, 1.0), (4, 10, 3.0), (1, 20, 2.0), (4, 20, 7.0)),
    TableKey("encode_attention"): points((10, 1, 1.0), (20, 1, 4.0), (10, 4, 3.0), (20, 4, 12.0)),
    TableKey(STEP_OVERHEAD): points((0, 0, 0.25))}
MESSAGES = {
    TableKey(TRANSFER, 1, "near"): points((100, 0, 0.5), (1100, 0, 1.5)),
    TableKey(ALL_REDUCE, 4, "near"): points((100, 0, 2.0), (1100, 0, 3.0)),
    TableKey(HANDOVER, 1, "near"): points((100, 0, 1.0), (1100, 0, 5.0)),
    TableKey(HANDOVER_DIRECT, 1, "near"): points((100, 0, 2.0), (1100, 0, 3.0))}


def timing(tables: Any = None, *, refused: dict[int, str] | None = None,
           fallback: Roofline | None = None, marks: tuple[str, ...] = ()) -> ProfileTiming:
    tables = {**TABLES, **MESSAGES} if tables is None else tables
    return ProfileTiming(Profile(metadata=METADATA, tables=tables, refused=refused or {}),
                         fallback, marks)


@pytest.mark.parametrize(("operator", "x", "y", "degree", "seconds"), [
    # joined by lines through zero; further arguments of a call do not count
    (Operator.LAYER_REST, [0, 0.5, 1, 2.5, 4, 8, 16, 33], 0, 1, [0, 0.5, 1, 2.5, 4, 6, 10, np.inf]),
    (Operator.HEAD, 4, [1, 99], 1, [4, 4]), (Operator.LAYER_REST, 8, 0, 4, 2),
    # bilinear, and growing with the context
    (Operator.DECODE_ATTENTION, [1, 4, 2.5, 4, 4], [10, 20, 15, 30, 81], 1,
     [1, 7, 3.25, 11, np.inf]),
    # joined by powers, and settling with the batch
    (Operator.ENCODE_ATTENTION, [10, 15, 40, 10, 10], [0, 1, 1, 2.5, 999], 1,
     [1, 1.5**2, 16, 2, 3]),
    (Operator.LAYER_REST, np.ones((2, 3)), 0, 1, np.ones((2, 3)))])
def test_each_table_has_its_own_shape(operator, x, y, degree, seconds):
    source = timing({**TABLES, TableKey("layer_rest", 4): points((1, 0, 0.5), (8, 0, 2.0))})
    found = source.operator_s(operator, x, y, tp_degree=degree)
    assert found == pytest.approx(np.array(seconds)) and source.profile.tp_degrees == (1, 4)


def test_messages_cost_their_latency_and_then_by_the_byte():
    source = timing()
    assert source.message_s(SEND, np.array([0, 100, 600, 2100]), NEAR).tolist() == [
        0.5, 0.5, 1, 2.5]
    assert source.message_s(REDUCE, np.array([50, 600]), NEAR, tp_degree=4).tolist() == [2, 2.5]
    assert source.message_s(REDUCE, np.array([50, 600]), FAR, tp_degree=1).tolist() == [0, 0]
    assert source.message_s(SEND, 11_100, NEAR) == pytest.approx(11.5), "of any size"
    assert source.message_s(SEND, np.ones((4, 2)), NEAR).shape == (4, 2)


def test_a_handover_takes_the_quicker_way_that_was_measured():
    ways = {k: v for k, v in MESSAGES.items() if k.name != HANDOVER_DIRECT}
    assert timing().message_s(HAND_OVER, np.array([100, 600, 1100]), NEAR).tolist() == [1, 2.5, 3]
    assert timing(ways).message_s(HAND_OVER, np.array([100, 600, 1100]), NEAR).tolist() == [1, 3, 5]


def test_an_engines_start_is_known_by_degree_of_as_many_at_once_as_were_measured():
    starts = {TableKey(ENGINE_START, 2): points((1, 0, 9.0)),
              TableKey(ENGINE_START): points((1, 0, 5.0), (2, 0, 8.0))}
    assert timing({**TABLES, **starts}).facts.start_s == {1: 8.0, 2: 9.0}
    assert not timing().facts.start_s


def test_the_hosts_share_is_the_overheads_median():
    assert timing().facts.step_overhead_s == 0.25 and timing().facts.is_padded
    plain = Profile(metadata=replace(METADATA, is_padded=False), tables=TABLES)
    assert not ProfileTiming(plain).facts.is_padded, "as the measured kernels are"
    none = {k: v for k, v in TABLES.items() if k.name != STEP_OVERHEAD}
    assert timing(none).facts.step_overhead_s == 0
    helped = timing(none, fallback=FALLBACK).facts
    assert helped.step_overhead_s == FALLBACK.facts.step_overhead_s > 0


@pytest.mark.parametrize("call", [
    lambda source, link: source.message_s(SEND, 600, link),
    lambda source, link: source.message_s(REDUCE, 600, link, tp_degree=4),
    lambda source, link: source.message_s(HAND_OVER, 600, link)],
    ids=["transfer", "all_reduce", "handover"])
def test_the_fallback_answers_for_links_alone_that_were_not_measured(call):
    both = timing(fallback=FALLBACK)
    assert call(both, FAR) == call(FALLBACK, FAR)
    assert call(both, NEAR) == call(timing(), NEAR) != call(FALLBACK, NEAR)
    with pytest.raises(XgptError, match="'far'.*; it has: near"):
        call(timing(), FAR)
    with pytest.raises(XgptError, match="it has: none"):
        call(timing(TABLES), NEAR)


def test_the_fallback_never_answers_for_an_operator():
    source = timing(fallback=FALLBACK)
    for ask in (lambda: source.operator_s(Operator.EMBED, 1),
                lambda: source.reach(Operator.EMBED, 1)):
        with pytest.raises(XgptError, match=r"\(measured\) has no table 'embed'"):
            ask()


def test_a_degree_that_was_not_measured_is_told_from_one_that_cannot_be():
    source = timing(refused={3: "12 heads cannot be split by 3"})
    with pytest.raises(XgptError, match="no tensor-parallel degree 2; it has: 1, 4"):
        source.operator_s(Operator.HEAD, 1, tp_degree=2)
    with pytest.raises(XgptError, match="degree 3: 12 heads cannot be split by 3"):
        source.operator_s(Operator.HEAD, 1, tp_degree=3)
    with pytest.raises(XgptError, match="no table 'head'"):
        source.operator_s(Operator.HEAD, 1, tp_degree=4)


def test_reach_is_the_largest_measured_size_where_more_is_extrapolated():
    source = timing()
    assert source.reach(Operator.LAYER_REST, 1) == (8, np.inf)
    assert source.reach(Operator.DECODE_ATTENTION, 1) == (4, 20)
    assert source.reach(Operator.ENCODE_ATTENTION, 1) == (20, np.inf)  # shares settle


def test_provenance_says_whose_numbers_these_are_and_how_they_differ():
    assert timing().provenance() == (
        "measured on cpu worker, float32, 2 ranks x 3 threads, 2026-11-21")
    assert "not of what will run" not in timing().provenance().lower()
    marked = timing(marks=("kernels 'a' instead of 'b'", "ranks 2 instead of 4")).provenance()
    assert marked.endswith(
        "; NOT OF WHAT WILL RUN: kernels 'a' instead of 'b'; ranks 2 instead of 4")
    helped = timing(TABLES, fallback=FALLBACK)
    assert FALLBACK.provenance() not in helped.provenance(), "not asked for anything yet"
    helped.message_s(SEND, 100, NEAR)
    assert helped.provenance().endswith(f"; transfer over near: {FALLBACK.provenance()}")


@pytest.mark.parametrize("operator", Operator)
def test_only_messages_have_a_cost_without_work(operator):
    assert table_shape(TableKey(operator.value)).through_zero
    assert not table_shape(TableKey(TRANSFER, 1, "near")).through_zero


@pytest.mark.parametrize(("device", "rows", "encoder", "times"), [
    ("cpu-1c-x", 2080, False, 16), ("cpu-1c-x", 2080, True, 1), ("A100-80", 2080, False, 1),
    ("cpu-1c-x", 2000, False, 1)])  # the last is no whole piece
def test_rows_that_go_in_pieces_count_as_measured(device, rows, encoder, times):
    tables = {TableKey("layer_rest"): points((100, 0, 1.0), (rows, 0, 10.0)),
              **({TableKey("encoder_rest"): points((100, 0, 1.0))} if encoder else {})}
    source = ProfileTiming(Profile(metadata=replace(METADATA, device=device), tables=tables))
    assert source.reach(Operator.LAYER_REST, 1).x == times * rows
    if times > 1:
        assert source.operator_s(Operator.LAYER_REST, 8 * rows) == pytest.approx(80.0)
        assert np.isinf(source.operator_s(Operator.LAYER_REST, 4.1 * times * rows))


def test_widening_has_one_speed_however_much_is_widened():
    source = timing({TableKey("unpack"): points((2**18, 0, 1e-3), (2**22, 0, 14e-3))})
    assert source.operator_s(Operator.UNPACK, 2**40) == pytest.approx(14e-3 * 2**18)
    assert source.operator_s(Operator.UNPACK, 2**18) == pytest.approx(1e-3)


def streamed(copies: list[float], computing: list[float], both: list[float]) -> ProfileTiming:
    """Times of a layer whose weights are copied beside the computing, at rising numbers of rows."""
    return timing({**TABLES, **{
        TableKey(STREAMED, link=part): tuple(Sample(x=2**place, samples_s=(2 * s, s, 0.9 * s))
                                             for place, s in enumerate(seconds))
        for part, seconds in zip(STREAMED_PARTS, (copies, computing, both), strict=True)}})


@pytest.mark.parametrize("share", [0.0, 0.04, 0.45, 1.0])
def test_the_share_that_does_not_overlap_is_that_of_the_times(share):
    """By the median of each part's turns."""
    copies, computing = [5.0, 5.0, 4.0], [1.0, 5.5, 12.0]
    both = [(1 - share) * max(pair) + share * sum(pair)
            for pair in zip(copies, computing, strict=True)]
    assert streamed(copies, computing, both).facts.serial_share == pytest.approx(share)


def test_streamed_layers_of_two_machines_overlap_more_than_the_papers():
    """An H200 whose layers come from its host, and two cores of an EPYC that read a disk."""
    gpu = streamed([4.85] * 4, [1.57, 4.80, 9.69, 19.42], [4.91, 5.07, 9.87, 19.39])
    cpu = streamed([106.0] * 5, [7.0, 12.0, 59.0, 77.0, 112.0], [106.0, 110.0, 114.0, 109.0, 134.0])
    assert gpu.facts.serial_share == pytest.approx(0.0257, abs=1e-3)
    assert cpu.facts.serial_share == pytest.approx(0.148, abs=1e-3)


def test_times_that_no_share_explains_count_for_nothing():
    quiet = streamed([5.0], [4.0], [5.8]).facts.serial_share
    assert quiet == pytest.approx(0.2)
    disturbed = [5.0, 5.0, 5.0], [4.0, 4.0, 1.0], [5.8, 19.0, 4.0]
    assert streamed(*disturbed).facts.serial_share == pytest.approx(quiet)
    assert streamed([5.0], [4.0], [19.0]).facts.serial_share == timing().facts.serial_share == 0.45
    assert streamed([5.0], [4.0], [4.9]).facts.serial_share == 0.0, "quicker than it can be"


def learned(**by_kind: tuple[float, float]) -> ProfileTiming:
    """As runs took since: by kind of step, (rows, factor)."""
    return ProfileTiming(Profile(metadata=METADATA, tables=TABLES, learned=tuple(
        LearnedSteps(kind=kind, rows=rows, factor=factor, spread=0.1, steps=99, date="2026-11-23")
        for kind, (rows, factor) in by_kind.items())))


def factors(source: ProfileTiming, operator: Operator, x: Any, y: Any = 0) -> list[float]:
    return [round(float(f), 6) for f in np.atleast_1d(
        source.operator_s(operator, x, y) / timing().operator_s(operator, x, y))]


@pytest.mark.parametrize(("by_kind", "encode", "decode", "rows_2_to_32"), [
    # a kind of which nothing was learned keeps its times; mixed steps are made of both
    ({"decode": (4, 0.5)}, 1.0, 0.5, [0.5, 0.5, math.sqrt(0.5), 1.0, 1.0]),
    ({"encode": (16, 2.0)}, 2.0, 1.0, [1.0, 1.0, math.sqrt(2), 2.0, 2.0]),
    ({"mixed": (8, 2.0)}, 2.0, 2.0, [2.0] * 5),
    ({"decode": (4, 0.5), "mixed": (16, 2.0)}, 2.0, 0.5, [0.5, 0.5, 1.0, 2.0, 2.0]),
    ({"encode": (16, 2.0), "mixed": (4, 0.5)}, 2.0, 0.5, [0.5, 0.5, 1.0, 2.0, 2.0]),
    ({"decode": (4, 0.5), "encode": (16, 2.0)}, 2.0, 0.5, [0.5, 0.5, 1.0, 2.0, 2.0]),
    ({"decode": (0.5, 0.5)}, 1.0, 0.5, [math.sqrt(0.5), 1.0, 1.0, 1.0, 1.0])])
def test_kinds_of_steps_that_no_run_told_of_keep_their_times(by_kind, encode, decode, rows_2_to_32):
    source = learned(**by_kind)
    assert factors(source, Operator.ENCODE_ATTENTION, 20, 1) == [encode]
    assert factors(source, Operator.DECODE_ATTENTION, 2, 20) == [decode]
    assert factors(source, Operator.LAYER_REST, [2, 4, 8, 16, 32]) == pytest.approx(
        rows_2_to_32, abs=1e-6)
    assert "scaled by later runs here" in source.provenance()


def test_what_slows_a_run_slows_the_kinds_that_were_not_seen():
    slowed = Retimed(timing(), {"decode": Factor(rows=4, factor=2.0)})
    assert slowed.operator_s(Operator.ENCODE_ATTENTION, 20, 1) == 8.0
    assert slowed.operator_s(Operator.LAYER_REST, 32) == 2 * timing().operator_s(
        Operator.LAYER_REST, 32)


def test_a_pool_of_one_phase_takes_the_times_of_its_own_steps():
    """Of WAA's pools one may be on a core that another program shares, and the other not."""
    slowed = Retimed(timing(), {"decode": Factor(rows=4, factor=2.0),
                                "encode": Factor(rows=32, factor=1.0)})
    for operator, rows in ((Operator.LAYER_REST, 32), (Operator.LAYER_REST, 4),
                           (Operator.HEAD, 4)):
        as_measured = timing().operator_s(operator, rows)
        assert of_role(slowed, "encode").operator_s(operator, rows) == as_measured
        assert of_role(slowed, "decode").operator_s(operator, rows) == 2 * as_measured
    assert of_role(slowed, "both") is slowed and of_role(timing(), "decode") is not slowed
    # what was made of it for a margin goes along, and what nothing was seen of
    raised = Raised(slowed, TableKey(Operator.LAYER_REST.value, 1), 1.1)
    assert of_role(raised, "decode").operator_s(Operator.LAYER_REST, 4) == pytest.approx(
        2.2 * timing().operator_s(Operator.LAYER_REST, 4))
    mixed = Retimed(timing(), {"mixed": Factor(rows=8, factor=1.5)})
    assert of_role(mixed, "encode") is mixed


@pytest.mark.parametrize(("ranks", "origin", "expected"), [
    (2, "measured", True), (1, "measured", False), (2, "imported from vidur", False),
    (2, "derived from 1x2 and 2x1", True)])
def test_messages_within_groups_are_our_runners(ranks, origin, expected):
    profile = profile_of(catalog.model("opt-125m"), ranks, 1, amdahl(0.1))
    timing = ProfileTiming(replace(profile, metadata=replace(profile.metadata, origin=origin)))
    assert timing.facts.sends_in_groups is expected
