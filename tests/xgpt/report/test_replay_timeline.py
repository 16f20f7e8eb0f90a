"""Timelines of a replay: boxes where the steps were, gaps where none was, and files that parse."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import numpy as np
import pytest

from xgpt.core.queries import QueryTimes
from xgpt.core.schedule import Pool, StageAssignment
from xgpt.report import plots
from xgpt.report.output import LoggedStep
from xgpt.report.timeline import draw, stage_names, steady_window
from xrunner.rules.steps import Step, StepKind
from xsimulator.replay.records import HandoverRecords, PoolRecords, ReplayResult

KINDS = {"E": StepKind.ENCODE, "D": StepKind.DECODE, "M": StepKind.MIXED}
SVG = "{http://www.w3.org/2000/svg}"


def pool(starts_s, ends_s, steps, name="both", first_stage=0):
    """steps: 'E0.1' is the encoding of group 0 in phase 1; starts_s, ends_s: [steps, stages]."""
    made = [Step(kind=KINDS[text[0]], group=int(text[1:].split(".")[0]),
                 phase=int(text.split(".")[1]), iteration=int(text[0] != "E")) for text in steps]
    starts_s, ends_s = np.array(starts_s, float), np.array(ends_s, float)
    count = len(made)
    return PoolRecords(
        name=name, role=name, stages=tuple(range(first_stage, first_stage + starts_s.shape[1])),
        steps=tuple(made), decoded=np.full(count, 4), encoded=np.full(count, 2),
        tokens=np.full(count, 100), context=np.full(count, 50.0), start_s=starts_s, end_s=ends_s,
        memory_s=starts_s[:, 0], memory_tokens=np.arange(count) % 90, kv_tokens=100)


def result(*pools, handovers=()):
    end_s = max(p.end_s.max() for p in pools)
    times = QueryTimes(arrival_s=np.zeros(1), start_s=np.zeros(1), first_token_s=np.ones(1),
                       last_token_s=np.full(1, end_s))
    return ReplayResult(pools=pools, handovers=handovers, times=times,
                        output_tokens=np.ones(1, int), preemptions=0)


def rra(phases=20, groups=2, iterations=3, stages=2, pause_s=0.0):
    """Encodings of 0.2 s and decodings of 0.1 s, each stage one step behind the one before."""
    steps = [f"{'D' if u else 'E'}{g}.{p}" for p in range(phases) for u in range(iterations + 1)
             for g in range(groups)]
    lengths = np.array([0.2 if step[0] == "E" else 0.1 for step in steps])
    ends = np.cumsum(lengths + pause_s)[:, None] + 0.2 * np.arange(stages)
    return result(pool(ends - lengths[:, None], ends, steps))


def root(drawing):
    return ElementTree.fromstring(drawing.standalone().encode())


def rectangles(drawing):
    """(colour, left, width, height) of every box."""
    return [(path.get("fill"), *map(float, box)) for path in root(drawing).iter(f"{SVG}path")
            if path.get("fill") not in (None, "none") and "h" in path.get("d")
            for box in re.findall(r"M([\d.]+) [\d.]+h([\d.]+)v([\d.]+)h", path.get("d"))]


def texts(drawing):
    return ["".join(text.itertext()) for text in root(drawing).iter(f"{SVG}text")]


ENCODE, DECODE = "#d9822b", "#3b6fb6"


def test_a_box_lies_where_its_step_was():
    drawing = draw(result(pool([[0.0], [3.0]], [[2.0], [4.0]], ["E0.0", "D0.0"])), 0.0, 4.0)
    (_, first, first_width, _), (_, second, second_width, _) = rectangles(drawing)
    lane = root(drawing).find(f"{SVG}g/{SVG}rect")
    left, width = float(lane.get("x")), float(lane.get("width"))
    assert [first - left, second - left] == pytest.approx([0, width * 0.75], abs=0.02)
    assert [first_width, second_width] == pytest.approx([width / 2, width / 4], abs=0.02)
    assert {colour for colour, *_ in rectangles(drawing)} == {ENCODE, DECODE}
    assert "75 %" in texts(drawing)  # the gap from 2 s to 3 s stays open


def test_a_step_that_does_both_has_both_colours_one_above_the_other():
    drawing = draw(result(pool([[0.0]], [[1.0]], ["M0.0"])), 0.0, 1.0)
    (_, left, width, height), (_, other_left, other_width, other_height) = rectangles(drawing)
    assert (left, width, height) == (other_left, other_width, other_height)
    assert {colour for colour, *_ in rectangles(drawing)} == {ENCODE, DECODE}
    assert "both in one step" in texts(drawing) and "decode" not in texts(drawing)


def test_boxes_are_cut_at_the_window_and_ids_are_the_micro_batches():
    drawing = draw(rra(), 1.0, 2.0)
    assert all(0 <= left <= 1060 and left + width <= 1060 - 52 + 0.02
               for _, left, width, _ in rectangles(drawing))
    ids = [span.text for span in root(drawing).iter(f"{SVG}tspan")]
    assert set(ids) == {"0", "1"} and len(ids) >= 16


@pytest.mark.parametrize("pause_s", [0.0, 0.1])
def test_thousands_of_steps_become_few_boxes_of_the_same_total(pause_s):
    replay = rra(phases=2000, stages=1, pause_s=pause_s)  # 16,000 steps, about 0.06 units each
    drawing = draw(replay, 0.0, replay.makespan_s)
    boxes = rectangles(drawing)
    steps = replay.pools[0]
    length_s = (steps.end_s - steps.start_s)[:, 0]
    width = float(root(drawing).find(f"{SVG}g/{SVG}rect").get("width"))
    assert len(boxes) < 2100
    for colour, is_decode in ((ENCODE, False), (DECODE, True)):
        drawn = sum(box[2] for box in boxes if box[0] == colour) / width
        is_own = [(step.kind is StepKind.DECODE) == is_decode for step in steps.steps]
        share = length_s[is_own].sum() / replay.makespan_s
        assert drawn == pytest.approx(share, rel=0.05)
    assert not list(root(drawing).iter(f"{SVG}tspan"))


@pytest.mark.parametrize("stages", [2, 48])
def test_every_stage_has_its_lane_and_label_within_the_picture(stages):
    drawing = draw(rra(stages=stages), 4.0, 8.0,
                   [f"stage {index} · GPU {index}" for index in range(stages)])
    tops = [float(re.findall(r"[\d.]+", g.get("transform"))[1])
            for g in root(drawing).iter(f"{SVG}g")]
    assert len(tops) == stages and tops == sorted(tops)
    assert min(np.diff(tops)) >= 13 and tops[-1] + 13 < drawing.height < 720
    assert {f"stage {index} · GPU {index}" for index in range(stages)} <= set(texts(drawing))


def two_pools(count=40):
    starts = 0.5 * np.arange(count)[:, None]
    encode = pool(starts, starts + 0.5, [f"E0.{i}" for i in range(count)], "encode")
    decode = pool(starts + 0.6, starts + 1.0, [f"D0.{i}" for i in range(count)], "decode", 1)
    sent_s = encode.end_s[:, 0]
    return result(encode, decode, handovers=(HandoverRecords(
        source="encode", target="decode", step=np.arange(count), start_s=sent_s,
        end_s=sent_s + 0.1),))


def test_handovers_are_arrows_between_the_pools():
    drawing = draw(two_pools(), 5.0, 8.0)
    lines = [path.get("d") for path in root(drawing).iter(f"{SVG}path")
             if path.get("stroke-width") == "0.9"]
    assert len(lines) == 1 and lines[0].count("M") == 6  # sent at 5.0, 5.5, .. 7.5
    y0, y1 = (float(y) for y in re.findall(r" ([\d.]+)", lines[0])[:2])
    assert y0 < y1
    assert {"stage 0 · encode", "stage 1 · decode", "KV entries handed over"} <= set(texts(drawing))


def test_the_inline_form_takes_its_colours_from_the_page():
    inline = draw(rra(), 1.0, 2.0).inline()
    ElementTree.fromstring(inline)
    assert inline.startswith('<svg role="img" aria-label="') and 'class="plot"' in inline
    assert "var(--encode)" in inline and not re.search(r"#[0-9a-f]{6}", inline)
    assert "var(" not in draw(rra(), 1.0, 2.0).standalone()


def test_names_are_text_not_markup(tmp_path):
    drawing = draw(rra(stages=1), 1.0, 2.0, ["<script>&"])
    drawing.write(tmp_path / "timeline.svg")
    written = ElementTree.parse(tmp_path / "timeline.svg").getroot()
    assert "<script>&" in ["".join(text.itertext()) for text in written.iter(f"{SVG}text")]


@pytest.mark.parametrize(("start_s", "end_s", "expected"), [
    (0.0, 4.0, "seconds since the start of the job"),
    (0.1, 0.9, "milliseconds since the start of the job"),
    (5000.301, 5000.302, "microseconds since 5,000.301 s after the start of the job")])
def test_the_axis_counts_in_a_unit_that_suits_its_length(start_s, end_s, expected):
    replay = result(pool([[start_s]], [[end_s]], ["E0.0"]))
    assert expected in texts(draw(replay, start_s, end_s))


@pytest.mark.parametrize("phases", [20, 21])
@pytest.mark.parametrize("iterations", [3, 5])
def test_the_steady_window_is_three_periods_from_the_middle(phases, iterations):
    replay = rra(phases, iterations=iterations)
    period_s = 2 * 0.2 + 2 * iterations * 0.1
    start_s, end_s = steady_window(replay)
    assert end_s - start_s == pytest.approx(3 * period_s)
    assert (start_s + end_s) / 2 == pytest.approx(replay.makespan_s / 2, abs=period_s)
    first = np.flatnonzero(np.isclose(replay.pools[0].start_s[:, 0], start_s))
    step = replay.pools[0].steps[int(first[0])]
    assert step.kind is StepKind.ENCODE and step.group == 0
    longer = steady_window(replay, periods=5)
    assert longer[1] - longer[0] == pytest.approx(5 * period_s)


def test_the_steady_window_knows_phases_of_several_encodings_a_group():
    steps = [f"{kind}0.{p}" for p in range(20) for kind in "EEEEDD"]
    ends_s = 0.1 * np.arange(1, 1 + len(steps))[:, None]
    start_s, end_s = steady_window(result(pool(ends_s - 0.1, ends_s, steps)))
    assert end_s - start_s == pytest.approx(3 * 0.6)


def test_the_steady_window_of_two_pools_holds_a_few_steps_of_each():
    start_s, end_s = steady_window(two_pools())
    assert end_s - start_s == pytest.approx(6 * 0.5)
    for steps in two_pools().pools:
        assert ((steps.start_s >= start_s - 1e-9) & (steps.end_s <= end_s + 1e-9)).sum() >= 4


def test_a_short_job_is_its_own_window():
    replay = rra(phases=2)
    assert steady_window(replay) == (0.0, replay.makespan_s)
    once = result(pool([[0.0], [1.0]], [[1.0], [2.0]], ["E0.0", "D0.0"]))
    assert steady_window(once) == (0.0, 2.0)


def test_stage_names_say_devices_and_role():
    stages = (StageAssignment(index=0, ranks=(0, 1, 2, 5), first_layer=0, num_layers=1),
              StageAssignment(index=1, ranks=(6,), first_layer=1, num_layers=1))
    both, decode = (Pool(name=role, role=role, stages=(stage,), num_groups=1, kv_tokens=0)
                    for role, stage in zip(("both", "decode"), stages, strict=True))
    assert stage_names([both, decode]) == ["stage 0 · GPU 0-2, 5", "stage 1 · GPU 6 · decode"]


def test_a_measured_run_is_drawn_the_same_way():
    steps = [LoggedStep(stage=stage, kind=kind, queries=2, tokens=2, start_s=at + stage,
                        end_s=at + stage + 1)
             for stage in (0, 1) for at, kind in ((10.0, "encode"), (12.0, "decode"), (13.0, "?"))]
    inline = plots.timeline(steps, 10.0, 14.0, origin_s=10.0)
    assert inline is not None
    assert inline.count("<g ") == 2 and "seconds since the first step" in inline
    assert plots.timeline(steps, 100.0, 101.0, origin_s=10.0) is None
    assert "stage 1<" in inline and "· encode<" not in inline
    pools = [replace(step, pool=("encode", "decode")[step.stage]) for step in steps]
    named = plots.timeline(pools, 10.0, 14.0, origin_s=10.0)
    assert named is not None and "stage 0 · encode<" in named and "stage 1 · decode<" in named
