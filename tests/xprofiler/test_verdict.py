"""The verdict on a profile's own numbers: what is counted, and the sentence a person reads."""

import itertools
import math
from dataclasses import replace

import pytest
from profiles import profile

from xgpt.core import catalog
from xprofiler.doubt import Cell, Shape, doubt_of, measured_cells
from xprofiler.points import SPREAD_LIMIT, Kind, Point, judge, noise_words, noisy_points
from xprofiler.profile import NOISE_LIMIT, Sample, TableKey
from xprofiler.profile_timing import MOST_NOISE, ProfileTiming
from xprofiler.roofline import Roofline

DECODE, REST = Point(Kind.DECODE, 9, 130), Point(Kind.REST, 260)


def sample(x: float, *samples_s: float, y: float = 0.0) -> Sample:
    return Sample(x=x, y=y, samples_s=samples_s)


def quiet(x: float, seconds: float, y: float = 0.0) -> Sample:
    return sample(x, *(seconds * (1 + 0.001 * i) for i in range(-3, 4)), y=y)


def loud(x: float, seconds: float) -> Sample:
    return sample(x, *(seconds * (1 + 0.2 * i) for i in range(-3, 4)))


def steady(count: int, first: int = 1) -> list[Sample]:
    return [quiet(x, 1e-3 * x) for x in range(first, first + count)]


def apart(share: float) -> Sample:
    """Quartiles that lie apart by this share of the limit."""
    width = share * SPREAD_LIMIT / 2
    return sample(1, 1 - 9 * width, 1 - width, 1.0, 1 + width, 1 + 9 * width)


@pytest.mark.parametrize(("tables", "counts", "words"), [
    ({"layer_rest": steady(10), "head": steady(9)}, {"noisy": 0}, "good: 19 of 19 points within"),
    ({}, {}, "nothing measured"),
    ({"head": [apart(0.98)]}, {"noisy": 0}, "good"),
    ({"head": [apart(1.02)]}, {"noisy": 1}, "noisy"),
    ({"layer_rest": [sample(x, 1e-3 * x) for x in (1, 2)]}, {}, "2 have too few samples")])
def test_what_is_counted_and_said_of_points(tables, counts, words):
    got = judge(profile(**tables))
    assert {name: getattr(got, name) for name in counts} == counts
    assert words in got.sentence
    assert (got.grade == "good") <= bool(tables)


def test_only_operators_that_count_in_a_step_are_judged():
    noise = {TableKey(*key): (loud(1, 1.0),) for key in (
        ("embed",), ("kv_compaction",), ("step_overhead",), ("transfer", 1, "near"),
        ("all_reduce", 2, "near"))}
    plain = profile(layer_rest=steady(5))
    assert judge(replace(plain, tables={**plain.tables, **noise})) == judge(plain)


@pytest.mark.parametrize(("noisy", "grade"), [
    (0, "good"), (1, "good"), (2, "usable"), (4, "usable"), (5, "noisy"), (20, "noisy")])
def test_the_grade_is_the_share_of_points_whose_quartiles_lie_apart(noisy, grade):
    table = [loud(x, 1e-3 * x) for x in range(1, noisy + 1)] + steady(20 - noisy, noisy + 1)
    got = judge(profile(layer_rest=table))
    assert (got.grade, got.noisy, got.points) == (grade, noisy, 20)
    assert got.sentence.startswith(f"{grade}: {20 - noisy} of 20 points within 10%")
    assert ("is something else running here?" in got.sentence) == (grade == "noisy")
    assert got.sentence.split(";")[0] == got.brief


def wild(x: float, seconds: float, y: float = 0.0):
    return sample(x, seconds, 2 * seconds, 4 * seconds, y=y)


def test_what_disagrees_is_noisy_and_what_scatters_a_little_is_not():
    calm = profile(layer_rest=[quiet(9, 1e-3), quiet(260, 2e-2)],
                   decode_attention=[quiet(9, 1e-3, y=130)])
    assert noisy_points(calm, 1, [DECODE, REST]) == [] and noise_words([]) is None
    found = noisy_points(profile(layer_rest=[quiet(9, 1e-3), wild(260, 2e-2)],
                          decode_attention=[wild(9, 1e-3, y=130)]), 1, [DECODE, REST])
    assert [one.point for one in found] == [REST, DECODE], "the worst first"
    words = noise_words(found)
    assert words is not None and "2 sizes could not be timed well" in words
    assert f"encoding 260 tokens in all ({found[0].apart:.0%})" in words
    assert "decoding 9 requests of up to 130 tokens" in words


def test_a_part_that_is_short_beside_the_rest_of_its_step_may_scatter():
    small = profile(layer_rest=[quiet(9, 1e-2)], decode_attention=[wild(9, 1e-4, y=130)])
    assert noisy_points(small, 1, [DECODE]) == []
    alone = profile(decode_attention=[wild(9, 1e-2, y=130)])
    assert noisy_points(alone, 1, [DECODE])[0].apart > NOISE_LIMIT
    assert noisy_points(profile(decode_attention=[wild(9, 1e-5, y=130)]), 1, [DECODE]) == []


@pytest.mark.parametrize(("points", "is_noisy"), [([quiet(1, 1.0), quiet(2, 2.0)], False),
                                                  ([wild(1, 1.0), wild(2, 2.0)], True)])
def test_no_more_than_a_tenth_of_noise_is_reckoned_with(points, is_noisy):
    timing = ProfileTiming(profile(layer_rest=points))
    error = timing.table_errors()[TableKey("layer_rest")]
    assert error.is_noisy == is_noisy and error.noise <= MOST_NOISE
    assert (error.noise == MOST_NOISE) == is_noisy


# --- doubt about computed times ---------------------------------------------------------------


SEEN = Cell("vllm", "H100", Shape(32, 4096, 32, 8, 14336, 0), "", 2)


@pytest.mark.parametrize(("change", "level", "words"), [
    ({}, "same cell", ()),
    ({"tp_degree": 4}, "neighbour", ("degree 4",)),
    ({"gpu": "H200"}, "neighbour", ("this device",)),
    ({"shape": Shape(80, 8192, 64, 8, 28672, 0)}, "neighbour", ("this shape",)),
    ({"engine": "vllm-0.12"}, "neighbour", ("this version of the engine",)),
    ({"weights": "fp8"}, "neighbour", ("this dtype of the weights",)),
    ({"gpu": "H200", "tp_degree": 8}, "far", ("this device", "degree 8")),
    ({"engine": "sglang"}, "unknown engine", ("no run of sglang",)),
    ({"engine": "vllm-0.2"}, "unknown engine", ("no run of vllm-0.2",)),  # other constants
    ({"shape": Shape(32, 4096, 32, 8, 14336, 8)}, "far", ("this mixture of experts",))])
def test_the_level_of_doubt_counts_what_differs_from_the_nearest_measured_cell(
        monkeypatch, change, level, words):
    monkeypatch.setattr("xprofiler.doubt.measured_cells", lambda: (SEEN,))
    doubt_of.cache_clear()
    found = doubt_of(SEEN._replace(**change))
    doubt_of.cache_clear()
    assert found.level == level and all(one in found.why for one in words)
    assert found.why.startswith("runs of this model") != bool(words)


def test_pipelines_are_far_from_all_that_was_measured_and_own_measurements_are_near():
    cell = measured_cells()[0]
    assert doubt_of(cell).level == "same cell" and doubt_of(cell, "pipeline stages").level == "far"
    new = cell._replace(gpu="L4", engine="deepspeed")
    assert doubt_of(new).level == "unknown engine"
    assert doubt_of(new, own=(new,)).level == "same cell"


def test_margins_grow_with_the_confidence_and_with_the_distance():
    cell = measured_cells()[0]
    near = cell._replace(tp_degree=64)
    far, unknown = near._replace(gpu="L4"), near._replace(engine="deepspeed")
    confidences = (0.3, 0.5, 0.8, 0.9, 0.95, 0.99, 0.999)
    rows = [[doubt_of(one).factor(c) for c in confidences] for one in (cell, near, far, unknown)]
    for factors in rows:
        assert factors[:2] == [1, 1] and factors == sorted(factors) and factors[-1] > factors[-2]
    for nearer, further in itertools.pairwise(rows):
        assert all(a <= b for a, b in zip(nearer, further, strict=True))
    assert doubt_of(far).typical > doubt_of(cell).typical


def test_a_promise_is_the_share_of_left_out_runs_that_kept_it():
    found = doubt_of(measured_cells()[0])
    for confidence, log in found.quantiles:
        assert confidence <= 0.5 or found.factor(confidence) == pytest.approx(
            max(math.exp(log), 1.0))


@pytest.mark.parametrize("engine", catalog.names("engine"))
def test_there_is_a_doubt_about_every_engine_on_every_gpu(engine):
    model = catalog.model("llama-3.1-8b")
    for device in map(catalog.device, catalog.names("device")):
        found = Roofline(model, device, "float16", engine=engine).doubt(2)
        assert found.factor(0.9) > 1 and found.words.startswith(found.level)
