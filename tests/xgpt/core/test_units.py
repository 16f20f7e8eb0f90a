"""Amounts with units in, seconds and bytes out."""

from __future__ import annotations

import math

import pytest

from xgpt.core.units import (
    GIB,
    format_bytes,
    format_seconds,
    parse_bytes,
    parse_seconds,
    seconds_up,
)


@pytest.mark.parametrize(("text", "num_bytes"), [
    ("48 GiB", 48 * GIB), ("80GB", 80 * 10**9), ("1.5 kb", 1500), ("7", 7), (1024, 1024),
    ("1e9 B", 10**9)])
def test_bytes_are_read_with_decimal_and_binary_units(text, num_bytes):
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize(("text", "seconds"), [
    ("90 s", 90), ("2 min", 120), ("1.5h", 5400), ("250 ms", 0.25), ("10 us", 1e-5), (11.5, 11.5),
    ("3", 3), ("inf", math.inf), (".inf", math.inf), (" Infinity ", math.inf),
    (math.inf, math.inf)])
def test_seconds_are_read_with_their_units(text, seconds):
    assert parse_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "fast", "3 parsecs", "-1 s", "1 2", "s"])
def test_what_is_no_amount_is_refused_with_the_known_units(text):
    with pytest.raises(ValueError, match="units: US, MS, S, MIN, H"):
        parse_seconds(text)


def test_a_truth_value_is_no_amount():
    with pytest.raises(ValueError):
        parse_seconds(True)


@pytest.mark.parametrize(("seconds", "text"), [
    (math.inf, "inf"), (3.2e-6, "3.2 us"), (0.00123, "1.23 ms"), (1.5, "1.50 s"), (59.94, "59.9 s"),
    (125, "2m05s"), (7261, "2h01m")])
def test_seconds_are_shown_in_a_readable_unit(seconds, text):
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(("num_bytes", "text"), [
    (0, "0 B"), (1536, "1.5 KiB"), (48 * GIB, "48 GiB"), (-2048, "-2 KiB")])
def test_bytes_are_shown_in_binary_units(num_bytes, text):
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(("seconds", "text"), [
    (0.0064481, "0.006449"), (9.99999, "10.000"), (12345.6, "12350"), (math.inf, "inf")])
def test_seconds_that_are_to_serve_as_a_bound_are_rounded_up(seconds, text):
    assert seconds_up(seconds) == text and float(text) >= seconds
