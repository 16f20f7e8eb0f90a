"""Amounts with units in, seconds and bytes out, and amounts shown."""

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


@pytest.mark.parametrize(("convert", "given", "found"), [
    *((parse_bytes, *row) for row in (
        ("48 GiB", 48 * GIB), ("80GB", 80 * 10**9), ("1.5 kb", 1500), ("7", 7), (1024, 1024),
        ("1e9 B", 10**9))),
    *((parse_seconds, text, pytest.approx(seconds)) for text, seconds in (
        ("90 s", 90), ("30 seconds", 30), ("1 h 30 min", 5400), ("2 min", 120),
        ("250 ms", 0.25), ("10 us", 1e-5),
        (11.5, 11.5), ("3", 3), ("inf", math.inf), (".inf", math.inf), (" Infinity ", math.inf),
        (math.inf, math.inf))),
    *((format_seconds, *row) for row in (
        (math.inf, "inf"), (3.2e-6, "3.2 us"), (0.00123, "1.23 ms"), (1.5, "1.50 s"),
        (59.94, "59.9 s"), (125, "2 min 5 s"), (7261, "2 h 1 min"))),
    *((format_bytes, *row) for row in (
        (0, "0 B"), (1536, "1.5 KiB"), (48 * GIB, "48 GiB"), (-2048, "-2 KiB"))),
    # to serve as a bound
    *((seconds_up, *row) for row in (
        (0.0064481, "0.006449"), (9.99999, "10.000"), (12345.6, "12350"), (math.inf, "inf")))])
def test_amounts_are_read_and_shown(convert, given, found):
    assert convert(given) == found


@pytest.mark.parametrize("text", ["", "fast", "3 parsecs", "-1 s", "1 2", "s", True])
def test_what_is_no_amount_is_refused_with_the_known_units(text):
    with pytest.raises(ValueError, match=None if text is True else "units: US, MS, S, MIN, H"):
        parse_seconds(text)
