"""Points whose repeats disagree: found by what they are of a step, named, and never decisive."""

from __future__ import annotations

import pytest
from test_verdict import loud, profile, quiet, sample

from xprofiler.points import Kind, Point
from xprofiler.profile import NOISE_LIMIT, TableKey
from xprofiler.profile_timing import MOST_NOISE, ProfileTiming
from xprofiler.verdict import noise_words, noisy

DECODE, REST = Point(Kind.DECODE, 9, 130), Point(Kind.REST, 260)


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
