"""Steps taken apart into the profile's tables, and a measurement that goes on where it stopped."""

from typing import Any

import numpy as np
import pytest
from profiles import profile

pytest.importorskip("torch", reason="measuring needs the extra `run`")

from xprofiler.measure.probe import StepParts  # noqa: E402
from xprofiler.measure.recorder import MAX_SAMPLES, Recorder  # noqa: E402
from xprofiler.measure.worker import MeasureRequest, messages_between  # noqa: E402
from xprofiler.points import Kind, Point  # noqa: E402
from xprofiler.profile import (  # noqa: E402
    STEP_OVERHEAD,
    TRANSFER,
    Profile,
    Sample,
    TableKey,
)
from xprofiler.timing import Operator  # noqa: E402

EMPTY = profile()
LAYERS = 3


def parts(scale: float = 1.0) -> StepParts:
    """A step of three layers: 3 (2 + 1 + 0.5) + 0.25 + 0.75 and 1.5 besides."""
    plain = StepParts(whole_s=13.0, rest_s=2.0, attention_s=1.0, embed_s=0.25, head_s=0.75,
                  cross_s=0.5, cross_kv_s=0.125)
    return StepParts(*(value and scale * value for value in plain))


def recorded(point: Point, rows: int, queries: int, **how: Any) -> Profile:
    recorder = Recorder(EMPTY)
    recorder.add_step(point, 2, rows, queries, how.get("steps", [parts()]), LAYERS)
    return recorder.profile(spent_s=1.0)


def points(recorder: Recorder, operator: Operator) -> tuple[Sample, ...]:
    return recorder.profile(spent_s=0.0).table(operator.value)


def medians(profile: Profile) -> dict[tuple[str, int], tuple[float, float, float]]:
    """(x, y, seconds) of the one point of each (table, degree)."""
    found = {}
    for key, table in profile.tables.items():
        assert len(table) == 1, key
        found[key.name, key.tp_degree] = (table[0].x, table[0].y, table[0].median_s)
    return found


@pytest.mark.parametrize(("point", "rows", "queries", "tables"), [
    (Point(Kind.DECODE, 4, 100), 4, 4, {
        ("decode_attention", 2): (4, 100, 1.0), ("layer_rest", 2): (4, 0, 2.0),
        ("head", 2): (4, 0, 0.75), ("embed", 2): (4, 0, 0.25), (STEP_OVERHEAD, 1): (0, 0, 1.5)}),
    # attention is one query's share
    (Point(Kind.ENCODE, 20, 4), 80, 4, {
        ("encode_attention", 2): (20, 4, 1.0 / 4), ("embed", 2): (80, 0, 0.25)}),
    (Point(Kind.REST, 300), 300, 4, {
        ("layer_rest", 2): (300, 0, 2.0), ("embed", 2): (300, 0, 0.25)}),
    (Point(Kind.ENCODER, 20, 2), 40, 2, {
        ("encode_attention", 2): (20, 2, 0.5), ("encoder_rest", 2): (40, 0, 2.0),
        ("cross_kv", 2): (40, 0, 0.125), ("embed", 2): (40, 0, 0.25)})],
    ids=lambda value: value.kind.value if isinstance(value, Point) else "")
def test_a_step_becomes_the_tables_of_its_parts(point, rows, queries, tables):
    assert medians(recorded(point, rows=rows, queries=queries)) == tables


def test_a_steps_tables_add_up_to_the_step():
    found = medians(recorded(Point(Kind.CROSS, 4, 100), rows=4, queries=4))
    seconds = {name: s for (name, _), (_, _, s) in found.items()}
    layer_s = sum(seconds[name] for name in ("decode_attention", "cross_attention", "layer_rest"))
    ends_s = sum(seconds[name] for name in ("embed", "head", STEP_OVERHEAD))
    assert LAYERS * layer_s + ends_s == parts().whole_s


def test_overheads_of_all_degrees_and_points_are_one_table():
    recorder = Recorder(EMPTY)
    for degree, scale in ((1, 1.0), (2, 2.0)):
        recorder.add_step(Point(Kind.DECODE, 4, 9), degree, 4, 4, [parts(scale)], LAYERS)
    found = recorder.profile(spent_s=0.0)
    assert [key for key in found.tables if key.name == STEP_OVERHEAD] == [TableKey(STEP_OVERHEAD)]
    assert sorted(found.table(STEP_OVERHEAD)[0].samples_s) == [1.5, 3.0]


def test_points_of_a_table_come_in_order_whatever_the_order_they_were_measured_in():
    recorder = Recorder(EMPTY)
    for x, y in ((9, 100), (1, 17), (3, 100), (3, 17)):
        recorder.add_step(Point(Kind.DECODE, x, y), 1, x, x, [parts()], LAYERS)
    found = recorder.profile(spent_s=0.0)
    assert [(p.x, p.y) for p in found.table("decode_attention")] == [
        (1, 17), (3, 17), (3, 100), (9, 100)]
    assert list(found.tables) == sorted(found.tables)
    # one number of rows at several contexts: one point of what depends on the rows alone
    rest = found.table("layer_rest")
    assert [p.x for p in rest] == [1, 3, 9] and len(rest[1].samples_s) == 2


def test_many_samples_are_kept_as_order_statistics():
    values = np.random.default_rng(0).lognormal(size=400)
    recorder = Recorder(EMPTY)
    recorder.add(TableKey("head"), 1, 0, values)
    kept = points(recorder, Operator.HEAD)[0]
    assert len(kept.samples_s) == MAX_SAMPLES
    assert list(kept.samples_s) == sorted(kept.samples_s)
    assert (kept.samples_s[0], kept.samples_s[-1]) == (values.min(), values.max())
    assert kept.median_s == pytest.approx(np.median(values))
    few = [3.0, 1.0, 2.0]
    recorder.add(TableKey("embed"), 1, 0, few)
    assert points(recorder, Operator.EMBED)[0].samples_s == tuple(few)


def stopped() -> Profile:
    """What a measurement that was stopped left."""
    recorder = Recorder(EMPTY)
    recorder.add_step(Point(Kind.DECODE, 4, 100), 2, 4, 4, [parts()], LAYERS)
    recorder.add_network({TableKey(TRANSFER, 1, "near"): (Sample(x=8, samples_s=(0.5,)),)})
    return recorder.profile(spent_s=7.0)


def test_a_measurement_goes_on_where_it_stopped():
    again = Recorder(stopped())
    assert again.has(Point(Kind.DECODE, 4, 100), 2)
    for other, degree in ((Point(Kind.DECODE, 4, 100), 1), (Point(Kind.DECODE, 5, 100), 2),
                          (Point(Kind.DECODE, 4, 99), 2), (Point(Kind.ENCODE, 4, 100), 2)):
        assert not again.has(other, degree)
    assert Point(Kind.DECODE, 4, 100) in again.done(2) and not again.done(1)
    assert again.has_network(TableKey(TRANSFER, 1, "near"))
    assert not again.has_network(TableKey(TRANSFER, 1, "far"))


def test_a_session_adds_its_points_and_keeps_the_earlier_ones():
    before = stopped()
    assert Recorder(before).profile(spent_s=7.0) == before, "which adds nothing"
    again = Recorder(before)
    again.add_step(Point(Kind.DECODE, 9, 100), 2, 9, 9, [parts(2.0)], LAYERS)
    after = again.profile(spent_s=11.0)
    assert [p.x for p in after.table("decode_attention", 2)] == [4, 9]
    assert after.table("decode_attention", 2)[0] == before.table("decode_attention", 2)[0]
    assert after.table(TRANSFER, 1, "near") == before.table(TRANSFER, 1, "near")
    assert after.spent_s == 11.0 and after.metadata == before.metadata
    known = before.table(STEP_OVERHEAD)[0].samples_s
    assert after.table(STEP_OVERHEAD)[0].samples_s == (*known, 3.0), "one point tells little"


def test_transfers_wanted_are_those_that_the_ranks_can_measure():
    def wanted(ranks: int, nodes: int) -> list[str]:
        request = MeasureRequest(
            metadata={}, model={}, refused={}, degrees=[1, 2], needs={}, own={}, is_quick=False,
            patience_s=0.0, near="near", far="far", target="",
            progress="", stop="", ranks=ranks)
        return [f"{k.name} {k.tp_degree} {k.link}"
                for k in messages_between(request, ranks, nodes)]

    assert wanted(2, 1) == ["transfer 1 near", "all_reduce 2 near"]
    assert wanted(4, 2) == ["transfer 1 near", "transfer 1 far", "all_reduce 2 near"]
    assert wanted(2, 2) == ["transfer 1 far"]


def test_repeats_that_disagree_give_way_to_those_that_agree_better():
    recorder = Recorder(EMPTY)
    key = TableKey("layer_rest", 1)
    recorder.add(key, 9, 0, [1.0, 2.0, 4.0])
    recorder.add(key, 9, 0, [1.0, 1.01, 1.02])
    known = recorder.profile(spent_s=0)
    assert sorted(known.tables[key][0].samples_s) == [1.0, 1.01, 1.02]
    again = Recorder(known)  # and more samples join the earlier ones, which are left alone
    again.add(key, 9, 0, [1.015])
    assert points(again, Operator.LAYER_REST)[0].samples_s[-1] == 1.015
    assert len(known.tables[key][0].samples_s) == 3
    recorder.add(key, 9, 0, [1.5])
    assert len(recorder.profile(spent_s=0).tables[key][0].samples_s) == 4


@pytest.mark.parametrize(("attempts", "taken"), [
    ([(1.0, 1.0, 1.0)], 1), ([(1.0, 2.0, 4.0), (1.0, 1.01, 1.0)], 2),
    ([(1.0, 2.0, 4.0), (1.0, 1.5, 2.0), (1.0, 2.0, 4.0)], 3)])
def test_a_point_that_is_measured_briefly_is_measured_again_where_its_repeats_disagree(
        attempts, taken, monkeypatch):
    from xprofiler.measure import ranks

    monkeypatch.setattr(ranks, "_BRIEF_POINT_S", 0.0)  # as few steps as there may be
    monkeypatch.setattr(ranks, "_SLOW_STEP_S", 100.0)
    seconds = [1.0, *(s for attempt in attempts for s in attempt)]  # a warm-up first
    steps = iter([parts()._replace(whole_s=s) for s in seconds])
    got = ranks.Ranks(None).measure_step(lambda: next(steps), is_brief=True)
    best = min(attempts[:taken], key=lambda own: max(own) - min(own))
    assert [step.whole_s for step in got] == list(best)
    assert next(steps, None) is None


def test_what_was_disturbed_makes_way_for_what_was_not_and_is_dated():
    key = TableKey("layer_rest")
    recorder = Recorder(EMPTY)

    def known() -> Sample:
        return recorder.profile(spent_s=0.0).table("layer_rest")[0]

    recorder.add(key, 9, 0, [3.0, 3.0, 3.0], 0.5)
    assert (known().missing, known().is_disturbed, len(known().date)) == (0.5, True, 10)
    recorder.add(key, 9, 0, [4.0, 4.0, 4.0], 0.8)
    assert known().samples_s == (3.0, 3.0, 3.0), "what is more disturbed changes nothing"
    recorder.add(key, 9, 0, [1.0, 1.0, 1.0], 0.0)
    assert (known().samples_s, known().missing) == ((1.0, 1.0, 1.0), 0.0)
    recorder.add(key, 9, 0, [1.1, 1.1, 1.1], 0.05)
    assert len(known().samples_s) == 6 and not known().is_disturbed


def test_how_often_a_bad_point_was_measured_anew_is_kept():
    key = TableKey("layer_rest")
    profile = EMPTY
    for tries, missing in ((1, 0.5), (2, 0.4), (3, 0.6), (4, 0.0), (4, 0.0)):
        recorder = Recorder(profile)
        for _ in range(2):  # points of a session may have a place in common
            recorder.add(key, 9, 0, [3.0, 3.0, 3.0], missing)
        if profile is EMPTY:
            recorder = Recorder(EMPTY)
            recorder.add(key, 9, 0, [3.0, 3.0, 3.0], missing)
        profile = recorder.profile(spent_s=0.0)
        assert profile.table("layer_rest")[0].tries == tries


def test_layers_of_captured_steps_have_a_table_beside_those_that_are_launched():
    recorder = Recorder(EMPTY)
    recorder.add_step(Point(Kind.DECODE, 4, 100), 1, 4, 4,
                      [parts()._replace(captured_rest_s=0.5)], LAYERS)
    recorder.add_step(Point(Kind.REST, 75), 1, 75, 1, [parts()], LAYERS)
    assert [(s.x, s.samples_s) for s in points(recorder, Operator.DECODE_REST)] == [(4, (0.5,))]
    assert [s.x for s in points(recorder, Operator.LAYER_REST)] == [4, 75]


def test_captured_steps_are_forgotten_where_one_could_not_be():
    recorder = Recorder(EMPTY)
    assert recorder.has_captured(1) is None
    steps = [parts()._replace(captured_rest_s=1.0)]
    recorder.add_step(Point(Kind.DECODE, 3, 40), 1, 3, 3, steps, 4)
    assert recorder.has_captured(1) and points(recorder, Operator.DECODE_REST)
    recorder.forget_decoded(1)
    assert recorder.has_captured(1) is None and not points(recorder, Operator.DECODE_REST)
    assert points(recorder, Operator.LAYER_REST) and not points(recorder, Operator.HEAD)
    recorder.add_step(Point(Kind.DECODE, 3, 40), 1, 3, 3, [parts()], 4)
    assert recorder.has_captured(1) is False
