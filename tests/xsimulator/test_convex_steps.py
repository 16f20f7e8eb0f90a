"""The convex function below step times is the highest of its tangents, and below the times."""

from __future__ import annotations

import numpy as np

from xsimulator.convex_steps import AN_OCTAVE, ConvexTimes


def test_the_function_is_convex_below_the_times_and_touches_them():
    sizes = np.append(2.0**-10, np.outer(2.0 ** np.arange(12), 1 + np.arange(AN_OCTAVE)
                                         / AN_OCTAVE).ravel())
    for seed in range(20):
        rng = np.random.default_rng(seed)
        # they rise, and fall in relation to the size
        bends = np.maximum.outer(sizes, rng.uniform(1, 3000, 6)) @ rng.uniform(1e-6, 1e-5, 6)
        seconds = bends + rng.uniform(1e-4, 1e-3)
        times = ConvexTimes(sizes, seconds)
        asked = 10 ** rng.uniform(-2, 3.5, (7, 30))
        own = times.mean_s(asked)
        assert (own <= np.interp(asked, sizes, seconds) * (1 + 1e-12)).all()
        low, high = np.sort(10 ** rng.uniform(-2, 3.5, (2, 500)), axis=0)
        middle = times.mean_s((low + high) / 2)
        assert (middle <= (times.mean_s(low) + times.mean_s(high)) / 2 * (1 + 1e-12)).all()
        # a convex function is its own: within the tangents' distance of it
        assert (own >= 0.9 * np.interp(asked, sizes, seconds))[asked >= 1].all()
        pieces = rng.uniform(1, 9, asked.shape)
        np.testing.assert_allclose(times.whole_s(asked, pieces),
                                   pieces * times.mean_s(asked / pieces))
