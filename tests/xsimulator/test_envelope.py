"""Grids of a function of two sizes, whose lower envelope bounds rest on."""

from __future__ import annotations

import numpy as np

from xsimulator.envelope import CORNERS, CORNERS_ROOM, PairEnvelope


def test_a_grid_that_reaches_to_a_spaces_corner_serves_the_corners_of_others():
    asked = []

    def seconds(count, length):
        asked.append(np.broadcast_shapes(count.shape, length.shape))
        return count * np.sqrt(length)

    envelope, lengths = PairEnvelope(seconds), np.array([900.0])
    for count in (2 * CORNERS, 0.9 * CORNERS_ROOM * CORNERS, 3.0):
        found = envelope.least_rate(np.array([count]), lengths)
        assert found[0] <= count * np.sqrt(900.0) / (count * 900.0)
    assert len(asked) == 1, asked
    for count in (10.0, 700.0, 1500.0):  # of others there is room for twice as many
        PairEnvelope(seconds).least_rate(np.array([count]), lengths)
    assert max(size for size, _ in asked[1:]) < asked[0][0] / 2
