"""The verdict on a profile's own numbers: what is counted, and the sentence a person reads."""

import math
from dataclasses import replace

import numpy as np
import pytest
from profiles import profile
from scipy.stats import t as student

from xgpt.core import catalog
from xprofiler.engines import engine_errors
from xprofiler.made_sources import Raised
from xprofiler.points import Kind, Point
from xprofiler.profile import NOISE_LIMIT, Sample, TableKey
from xprofiler.profile_timing import MOST_NOISE, ProfileTiming
from xprofiler.roofline import Roofline
from xprofiler.source_errors import (
    CARRIED,
    UNCALIBRATED,
    GroupError,
    OperatorGroup,
    SourceErrors,
    group_of,
    sizes_of,
    student_quantile,
)
from xprofiler.timing import MessageKind, Operator
from xprofiler.verdict import ERROR_LIMIT, SPREAD_LIMIT, judge, noise_words, noisy

DECODE, REST = Point(Kind.DECODE, 9, 130), Point(Kind.REST, 260)


def sample(x: float, *samples_s: float, y: float = 0.0) -> Sample:
    return Sample(x=x, y=y, samples_s=samples_s)


def quiet(x: float, seconds: float, y: float = 0.0) -> Sample:
    return sample(x, *(seconds * (1 + 0.001 * i) for i in range(-3, 4)), y=y)


def loud(x: float, seconds: float) -> Sample:
    return sample(x, *(seconds * (1 + 0.2 * i) for i in range(-3, 4)))


def steady(count: int, first: int = 1) -> list[Sample]:
    return [quiet(x, 1e-3 * x) for x in range(first, first + count)]


def test_a_quiet_profile_on_a_line_is_good_and_nothing_is_to_be_said() -> None:
    got = judge(profile(layer_rest=steady(10), head=steady(9)))
    assert got.sentence == "good: 19 of 19 points within 10%"
    assert (got.noisy, got.outliers, got.too_short, got.moved, got.coarse) == (0, 0, 0, 0, 0)


@pytest.mark.parametrize(("noisy", "grade"), [
    (0, "good"), (1, "good"), (2, "usable"), (4, "usable"), (5, "noisy"), (20, "noisy")])
def test_the_grade_is_the_share_of_points_whose_quartiles_lie_apart(
        noisy: int, grade: str) -> None:
    table = [loud(x, 1e-3 * x) for x in range(1, noisy + 1)] + steady(20 - noisy, noisy + 1)
    got = judge(profile(layer_rest=table))
    assert (got.grade, got.noisy, got.points) == (grade, noisy, 20)
    assert got.sentence.startswith(f"{grade}: {20 - noisy} of 20 points within 10%")
    assert ("is something else running here?" in got.sentence) == (grade == "noisy")
    assert got.sentence.split(";")[0] == got.brief


def test_the_limit_of_the_spread_is_between_quartiles() -> None:
    half = SPREAD_LIMIT / 2
    for share, count in ((0.98, 0), (1.02, 1)):
        width = share * half
        point = sample(1, 1 - 9 * width, 1 - width, 1.0, 1 + width, 1 + 9 * width)
        assert judge(profile(head=[point])).noisy == count


@pytest.mark.parametrize("name", ["embed", "kv_compaction"])
def test_what_is_no_part_worth_mentioning_of_a_step_is_not_judged(name: str) -> None:
    plain = profile(layer_rest=steady(5))
    table = [loud(x, 1e-3 * x) for x in range(1, 8)]
    with_noise = profile(layer_rest=steady(5), **{name: table})
    assert judge(with_noise) == judge(plain)


def test_messages_and_the_host_are_not_judged() -> None:
    tables = {**profile(layer_rest=steady(5)).tables,
              TableKey("transfer", 1, "near"): (loud(1, 1.0),),
              TableKey("all_reduce", 2, "near"): (loud(1, 1.0),),
              TableKey("step_overhead"): (loud(0, 1.0),)}
    whole = replace(profile(), tables=tables)
    assert judge(whole) == judge(profile(layer_rest=steady(5)))


def test_single_samples_far_off_are_outliers_that_move_nothing() -> None:
    point = sample(1, 1.0, 1.01, 0.99, 1.0, 1.02, 0.98, 5.0, 0.1)
    got = judge(profile(head=[point]))
    assert (got.outliers, got.noisy) == (2, 0)
    assert "2 single samples far off, ignored by the medians" in got.sentence
    # a few percent are no outlier, however still the others; nor is one of a handful of samples
    assert judge(profile(head=[sample(1, 1, 1, 1, 1, 1.05)])).outliers == 0
    assert judge(profile(head=[sample(1, 1, 1, 1, 9)])).outliers == 0


def test_points_near_the_clocks_own_cost_are_too_short() -> None:
    rest = [quiet(1, 1e-6), quiet(2, 3e-6)]
    attention = [quiet(1, 1e-7, y=8), quiet(2, 1e-5, y=8)]
    got = judge(profile(layer_rest=rest, decode_attention=attention, head=[quiet(1, 1e-7)]))
    assert got.too_short == 2
    assert "2 points so short that the clock shows" in got.sentence


def test_points_below_one_of_less_work_are_counted_as_moved() -> None:
    assert judge(profile(layer_rest=[quiet(1, 1.0), quiet(2, 0.9), quiet(3, 3.0)])).moved == 2


def test_a_bend_between_points_is_told() -> None:
    """Three points whose middle lies off their line by so much that a quarter is the limit."""
    for share, coarse in ((0.9, 0), (1.1, 1)):
        error = 4 * ERROR_LIMIT * share
        bent = [quiet(1, 1.0), quiet(2, 2 / (1 + error)), quiet(3, 3.0)]
        got = judge(profile(layer_rest=bent))
        assert got.coarse == coarse
        assert ("the curve bends between points" in got.sentence) == bool(coarse)


def test_each_row_of_a_table_is_looked_at_for_bends_alone() -> None:
    rows = [quiet(x, 1e-3 * x * y, y=y) for y in (1, 5) for x in (1, 2, 3)]
    assert judge(profile(decode_attention=rows)).coarse == 0


def test_a_whole_inputs_attention_bends_as_a_power_does() -> None:
    squares = [quiet(x, 1e-6 * x * x, y=1) for x in (5, 20, 80)]
    assert judge(profile(encode_attention=squares)).coarse == 0
    assert judge(profile(layer_rest=[quiet(s.x, s.median_s) for s in squares])).coarse == 1


def test_a_profile_without_points_has_nothing_within_the_limit() -> None:
    assert "nothing measured" in judge(profile()).sentence and judge(profile()).grade != "good"


def test_a_single_sample_has_no_spread_that_is_known() -> None:
    one = [Sample(x=x, samples_s=(1e-3 * x,)) for x in (1, 2)]
    got = judge(profile(layer_rest=one))
    assert got.grade == "usable" and "of 2 the spread is unknown" in got.sentence
    assert "0 of 2 points within" in got.sentence


def wild(x: float, seconds: float, y: float = 0.0):
    return sample(x, seconds, 2 * seconds, 4 * seconds, y=y)


def test_what_disagrees_is_noisy_and_what_scatters_a_little_is_not() -> None:
    calm = profile(layer_rest=[quiet(9, 1e-3), quiet(260, 2e-2)],
                   decode_attention=[quiet(9, 1e-3, y=130)])
    assert noisy(calm, 1, [DECODE, REST]) == [] and noise_words([]) is None
    found = noisy(profile(layer_rest=[quiet(9, 1e-3), wild(260, 2e-2)],
                          decode_attention=[wild(9, 1e-3, y=130)]), 1, [DECODE, REST])
    assert [one.point for one in found] == [REST, DECODE], "the worst first"
    words = noise_words(found)
    assert words is not None and "2 sizes could not be timed well" in words
    assert f"encoding 260 tokens in all ({found[0].apart:.0%})" in words
    assert "decoding 9 queries of up to 130 tokens" in words


def test_a_part_that_is_short_beside_the_rest_of_its_step_may_scatter() -> None:
    small = profile(layer_rest=[quiet(9, 1e-2)], decode_attention=[wild(9, 1e-4, y=130)])
    assert noisy(small, 1, [DECODE]) == []
    alone = profile(decode_attention=[wild(9, 1e-2, y=130)])
    assert noisy(alone, 1, [DECODE])[0].apart > NOISE_LIMIT
    assert noisy(profile(decode_attention=[wild(9, 1e-5, y=130)]), 1, [DECODE]) == []


@pytest.mark.parametrize(("points", "is_noisy"), [([quiet(1, 1.0), quiet(2, 2.0)], False),
                                                  ([wild(1, 1.0), wild(2, 2.0)], True)])
def test_no_more_than_a_tenth_of_noise_is_reckoned_with(points, is_noisy: bool) -> None:
    timing = ProfileTiming(profile(layer_rest=points))
    error = timing.table_errors()[TableKey("layer_rest")]
    assert error.is_noisy == is_noisy and error.noise <= MOST_NOISE
    assert (error.noise == MOST_NOISE) == is_noisy


def test_a_loud_point_is_within_what_a_profile_is_left_at_or_measured_again() -> None:
    assert loud(1, 1.0).spread > NOISE_LIMIT and loud(1, 1.0).is_noisy
    assert not quiet(1, 1.0).is_noisy


# --- Errors of computed times


PRODUCTS, ATTENTION = OperatorGroup.PRODUCTS, OperatorGroup.DECODE_ATTENTION
ERRORS = SourceErrors(kind="calibrated", checked="", common=0.03, groups={
    PRODUCTS: GroupError(0.04, 0.0), ATTENTION: GroupError(0.0, 0.12)})


@pytest.mark.parametrize("share", [0.01, 0.3, 0.5, 0.9, 0.95, 0.999])
def test_the_quantile_is_that_of_students_distribution_of_four_degrees(share: float) -> None:
    assert student_quantile(share) == pytest.approx(student.ppf(share, 4), abs=1e-9)


def test_groups_count_by_their_share_and_add_as_squares_to_what_is_common() -> None:
    assert ERRORS.spread({}) == 0.03
    assert ERRORS.spread({PRODUCTS: 1.0}) == pytest.approx(0.05)
    assert ERRORS.spread({PRODUCTS: 0.5, ATTENTION: 0.5}) == pytest.approx(
        math.hypot(0.03, 0.02, 0.06))


def test_what_single_sizes_miss_by_averages_over_sizes_and_what_is_common_does_not() -> None:
    """A context that grows fourfold has steps of three sizes that do not miss alike."""
    assert sizes_of(100, 300) == pytest.approx(3.0) and sizes_of(100, 0) == 1.0
    assert ERRORS.spread({ATTENTION: 1.0}, 4) == pytest.approx(math.hypot(0.03, 0.06))
    assert ERRORS.spread({PRODUCTS: 1.0}, 4) == ERRORS.spread({PRODUCTS: 1.0})


def test_the_group_that_counts_most_is_named_where_it_is_more_than_what_is_common() -> None:
    assert ERRORS.weakest({PRODUCTS: 0.7, ATTENTION: 0.3}) is ATTENTION
    assert ERRORS.weakest({PRODUCTS: 0.7, ATTENTION: 0.1}) is None


def test_margins_grow_with_the_confidence_from_nothing() -> None:
    factors = [ERRORS.factor({PRODUCTS: 1.0}, c) for c in (0.5, 0.8, 0.9, 0.95, 0.99)]
    assert factors[0] == 1 and factors == sorted(factors)
    assert factors[2] == pytest.approx(math.exp(0.05 * student.ppf(0.9, 4)))


def test_a_group_that_leans_to_shorter_times_takes_its_share_of_that_off_the_margin() -> None:
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


def test_every_table_belongs_to_a_group() -> None:
    tables = [operator.value for operator in Operator] + [kind.value for kind in MessageKind]
    assert {group_of(name) for name in tables} | {group_of("step_overhead")} == set(OperatorGroup)


@pytest.mark.parametrize("engine", catalog.names("engine"))
def test_every_engine_has_errors_on_every_gpu(engine: str) -> None:
    for device in map(catalog.device, catalog.names("device")):
        errors = engine_errors(device, engine)
        assert errors.checked and 0 < errors.spread(dict.fromkeys(OperatorGroup, 0.2)) < 0.5


def test_an_error_carried_over_to_another_generation_is_wider_and_one_of_nobody_widest() -> None:
    hopper, ada = (engine_errors(catalog.device(name), "vllm") for name in ("H100", "L4"))
    ampere = engine_errors(catalog.device("A100-80"), "vllm")
    assert ada.common == pytest.approx(math.hypot(ampere.common, CARRIED))
    assert "carried over" in ada.checked and "carried over" not in hopper.checked
    assert engine_errors(catalog.device("H100"), "xgpt") is UNCALIBRATED
    assert engine_errors(catalog.device("H100"), "sglang") == hopper  # that it is like


def test_a_group_is_raised_with_all_of_its_tables() -> None:
    source = Roofline(catalog.model("opt-13b"), catalog.device("A40"), "float16")
    raised, table = Raised(source, PRODUCTS, 1.5), Raised(source, TableKey("head"), 1.5)
    for operator, factor in ((Operator.LAYER_REST, 1.5), (Operator.HEAD, 1.5),
                             (Operator.DECODE_ATTENTION, 1.0)):
        plain = source.operator_s(operator, 8.0, 100.0)
        assert raised.operator_s(operator, 8.0, 100.0) == pytest.approx(factor * plain)
    assert table.operator_s(Operator.LAYER_REST, 8.0) == source.operator_s(Operator.LAYER_REST, 8.0)
    host = Raised(source, OperatorGroup.HOST, 2.0).facts.step_overhead_s
    assert host == pytest.approx(2 * source.facts.step_overhead_s)
