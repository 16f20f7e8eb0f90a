"""Weights stay for a run of the same and make room for others."""

from __future__ import annotations

from typing import Any, cast

import pytest

pytest.importorskip("torch", reason="the runner needs the extra `run`")

from xrunner.loading import Shelf, Weights  # noqa: E402


def test_weights_are_read_once_for_runs_of_the_same_and_anew_for_others():
    shelf, read = Shelf(), list[str]()

    def weights(name: str) -> Weights:
        def load() -> Weights:
            assert not shelf.holds(name)
            read.append(name)
            return Weights(cast(Any, name), 2.0, 100, 50, 1e9)

        return shelf.weights(name, load)

    assert [weights("a").bytes_read for _ in range(3)] == [100, 0, 0]
    again = weights("a")
    assert (again.model, again.seconds, again.disk_bytes, again.disk_bytes_per_s) == (
        "a", 0.0, 0, None)
    assert [weights(name).seconds for name in ("b", "a")] == [2.0, 2.0]
    assert read == ["a", "b", "a"] and shelf.holds("a") and not shelf.holds("b")
