"""The verdict on a profile's own numbers: what is counted, and the sentence a person reads."""

import math
from dataclasses import replace

import numpy as np
import pytest
from profiles import profile
from scipy.stats import t as student

from xgpt.core import catalog
from xprofiler.constants import engine_errors
from xprofiler.points import SPREAD_LIMIT, Kind, Point, judge, noise_words, noisy_points
from xprofiler.profile import NOISE_LIMIT, Sample, TableKey
from xprofiler.profile_timing import MOST_NOISE, ProfileTiming
from xprofiler.roofline import Roofline
from xprofiler.source_errors import (
    CARRIED,
    UNCALIBRATED,
    GroupError,
    OperatorGroup,
    Raised,
    SourceErrors,
    group_of,
    sizes_of,
    student_quantile,
)
from xprofiler.timing import MessageKind, Operator

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


# --- errors of computed times -----------------------------------------------------------------


PRODUCTS, ATTENTION = OperatorGroup.PRODUCTS, OperatorGroup.DECODE_ATTENTION
ERRORS = SourceErrors(kind="calibrated", checked="", common=0.03, groups={
    PRODUCTS: GroupError(0.04, 0.0), ATTENTION: GroupError(0.0, 0.12)})


@pytest.mark.parametrize("share", [0.01, 0.3, 0.5, 0.9, 0.95, 0.999])
def test_the_quantile_is_that_of_students_distribution_of_four_degrees(share):
    assert student_quantile(share) == pytest.approx(student.ppf(share, 4), abs=1e-9)


def test_groups_count_by_their_share_and_add_as_squares_to_what_is_common():
    assert ERRORS.spread({}) == 0.03
    assert ERRORS.spread({PRODUCTS: 1.0}) == pytest.approx(0.05)
    assert ERRORS.spread({PRODUCTS: 0.5, ATTENTION: 0.5}) == pytest.approx(
        math.hypot(0.03, 0.02, 0.06))


def test_what_single_sizes_miss_by_averages_over_sizes_and_what_is_common_does_not():
    """A context that grows fourfold has steps of three sizes that do not miss alike."""
    assert sizes_of(100, 300) == pytest.approx(3.0) and sizes_of(100, 0) == 1.0
    assert ERRORS.spread({ATTENTION: 1.0}, 4) == pytest.approx(math.hypot(0.03, 0.06))
    assert ERRORS.spread({PRODUCTS: 1.0}, 4) == ERRORS.spread({PRODUCTS: 1.0})


def test_the_group_that_counts_most_is_named_where_it_is_more_than_what_is_common():
    assert ERRORS.weakest({PRODUCTS: 0.7, ATTENTION: 0.3}) is ATTENTION
    assert ERRORS.weakest({PRODUCTS: 0.7, ATTENTION: 0.1}) is None


def test_margins_grow_with_the_confidence_from_nothing():
    factors = [ERRORS.factor({PRODUCTS: 1.0}, c) for c in (0.5, 0.8, 0.9, 0.95, 0.99)]
    assert factors[0] == 1 and factors == sorted(factors)
    assert factors[2] == pytest.approx(math.exp(0.05 * student.ppf(0.9, 4)))


def test_a_group_that_leans_to_shorter_times_takes_its_share_of_that_off_the_margin():
    """Never below none; and the least factor is below that of any shares and sizes, and reached."""
    straight = replace(ERRORS, groups={PRODUCTS: GroupError(0.04),
                                       ATTENTION: GroupError(0.12, 0.1)})
    leaning = replace(ERRORS, groups={PRODUCTS: GroupError(0.04),
                                      ATTENTION: GroupError(0.12, 0.1, -0.06)})
    assert leaning.lean({PRODUCTS: 0.5, ATTENTION: 0.5}) == pytest.approx(-0.03)
    shares = {PRODUCTS: 0.7, ATTENTION: 0.3}
    assert leaning.factor(shares, 0.9) == pytest.approx(
        straight.factor(shares, 0.9) * math.exp(-0.018))
    assert leaning.factor({ATTENTION: 1.0}, 0.55) == 1.0
    rng = np.random.default_rng(1)
    for confidence in (0.6, 0.8, 0.95):
        least = leaning.least_factor(confidence)
        drawn = [leaning.factor({PRODUCTS: 1 - share, ATTENTION: share}, confidence, sizes)
                 for share, sizes in zip(rng.uniform(0, 1, 200), rng.uniform(1, 9, 200),
                                         strict=True)]
        assert 1 <= least <= min(drawn) + 1e-12
    near = min(leaning.factor({ATTENTION: share}, 0.95, 1e9) for share in np.linspace(0, 1, 1001))
    assert near == pytest.approx(leaning.least_factor(0.95), rel=1e-6)


def test_every_table_belongs_to_a_group():
    tables = [operator.value for operator in Operator] + [kind.value for kind in MessageKind]
    assert {group_of(name) for name in tables} | {group_of("step_overhead")} == set(OperatorGroup)


@pytest.mark.parametrize("engine", catalog.names("engine"))
def test_every_engine_has_errors_on_every_gpu(engine):
    for device in map(catalog.device, catalog.names("device")):
        errors = engine_errors(device, engine)
        assert errors.checked and 0 < errors.spread(dict.fromkeys(OperatorGroup, 0.2)) < 0.5


def test_an_error_carried_over_to_another_generation_is_wider_and_one_of_nobody_widest():
    hopper, ada = (engine_errors(catalog.device(name), "vllm") for name in ("H100", "L4"))
    ampere = engine_errors(catalog.device("A100-80"), "vllm")
    assert ada.common == pytest.approx(math.hypot(ampere.common, CARRIED))
    assert "carried over" in ada.checked and "carried over" not in hopper.checked
    assert engine_errors(catalog.device("H100"), "xgpt") is UNCALIBRATED
    assert engine_errors(catalog.device("H100"), "sglang") == hopper  # that it is like


def test_a_group_is_raised_with_all_of_its_tables():
    source = Roofline(catalog.model("opt-13b"), catalog.device("A40"), "float16")
    raised, table = Raised(source, PRODUCTS, 1.5), Raised(source, TableKey("head"), 1.5)
    for operator, factor in ((Operator.LAYER_REST, 1.5), (Operator.HEAD, 1.5),
                             (Operator.DECODE_ATTENTION, 1.0)):
        plain = source.operator_s(operator, 8.0, 100.0)
        assert raised.operator_s(operator, 8.0, 100.0) == pytest.approx(factor * plain)
    assert table.operator_s(Operator.LAYER_REST, 8.0) == source.operator_s(Operator.LAYER_REST, 8.0)
    host = Raised(source, OperatorGroup.HOST, 2.0).facts.step_overhead_s
    assert host == pytest.approx(2 * source.facts.step_overhead_s)
