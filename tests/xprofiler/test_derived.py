"""Times of a layout between the two that were measured."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from laid_out import amdahl, profile_of
from toy_jobs import TOY

from xprofiler.derived import derived
from xprofiler.profile import ProfileMetadata
from xprofiler.profile_timing import ProfileTiming
from xprofiler.timing import Operator


def wanted(ranks: int, threads: int) -> ProfileMetadata:
    return replace(profile_of(TOY, ranks, threads, amdahl(0.1)).metadata)


@pytest.mark.parametrize("serial", [0.0, 0.05, 0.3])
def test_times_that_follow_the_law_are_found_exactly(serial: float) -> None:
    law = amdahl(serial)
    narrow, wide = (profile_of(TOY, r, t, law) for r, t in ((8, 1), (1, 8)))
    found = derived(narrow, wide, wanted(2, 4))
    truth = profile_of(TOY, 2, 4, law)
    assert found.profile.metadata.origin == "derived from 1x8 and 8x1"
    for key, points in truth.tables.items():
        assert [p.median_s for p in found.profile.tables[key]] == pytest.approx(
            [p.median_s for p in points]), key
    # the other law through the same points is the same where threads divide all
    assert found.error == pytest.approx(0, abs=1e-9) if serial == 0 else found.error > 0.01


def test_times_that_rise_with_threads_are_derived_too() -> None:
    found = derived(*(profile_of(TOY, r, t, lambda threads: threads**0.5)
                      for r, t in ((4, 1), (1, 4))), wanted(2, 2))
    seconds = [float(ProfileTiming(p).operator_s(Operator.LAYER_REST, 33)) for p in (
        profile_of(TOY, 4, 1, lambda t: 1.0), found.profile)]
    assert 1 < seconds[1] / seconds[0] < 2 and np.isfinite(found.error)
