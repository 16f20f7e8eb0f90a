"""Points of a draft: samples of one place, and what is left out as disturbed."""

import numpy as np

from xprofiler.importers.draft import grouped_messages, samples_at, undisturbed


def test_rows_of_one_place_are_samples_of_one_point() -> None:
    found = samples_at([4, 1, 4], [0.3, 0.1, 0.5])
    assert [(p.x, p.samples_s) for p in found] == [(4, (0.3, 0.5)), (1, (0.1,))]


def test_one_slow_message_raises_no_larger_ones() -> None:
    sizes = np.arange(1, 101) * 1000
    times = 1e-5 + sizes * 1e-10
    times[3] = 1.0
    found = grouped_messages(sizes, times)
    assert max(np.median(p.samples_s) for p in found) < 3e-5
    assert sum(len(p.samples_s) for p in found) == 100


def test_a_point_far_slower_than_one_of_more_work_is_left_out() -> None:
    found = samples_at([1, 2, 1, 2], [5.0, 2.0, 1.5, 3.0], [1, 1, 2, 2])
    assert [(p.x, p.y) for p in undisturbed(found, grows_with_y=True)] == [(2, 1), (1, 2), (2, 2)]
    assert len(undisturbed(found, grows_with_y=False)) == 3  # (1, 1) is slower than (2, 1) too
