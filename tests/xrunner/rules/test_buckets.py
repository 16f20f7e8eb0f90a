"""Sizes that decode steps are captured for."""

from __future__ import annotations

from xrunner.rules.buckets import MOST_CAPTURED, bucket_of


def test_a_bucket_holds_the_batch_and_little_more():
    sizes = {n: bucket_of(n) for n in range(1, MOST_CAPTURED + 1)}
    for count, size in sizes.items():
        assert size is not None and 0 <= size - count < max(8, count / 8, 1)
        assert sizes[size] == size, "a bucket is its own"
    ordered = list(sizes.values())
    assert ordered == sorted(ordered)
    assert sorted(set(ordered))[:8] == [1, 2, 4, 8, 16, 24, 32, 40] and len(set(ordered)) == 43


def test_larger_batches_are_not_captured():
    assert bucket_of(MOST_CAPTURED + 1) is None
