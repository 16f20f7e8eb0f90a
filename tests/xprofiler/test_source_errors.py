"""Errors of computed times: by group of operators, by engine, and the margins that follow."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import t as student

from xgpt.core import catalog
from xprofiler.engines import engine_errors
from xprofiler.made_sources import Raised
from xprofiler.profile import TableKey
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
