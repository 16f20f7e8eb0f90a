"""Walks by csrc/walks.cpp are those of arrays, to the bit; and arrays serve where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from xrunner.ops.build import BuildError, find_compiler
from xsimulator.policies.continuous import native_walk, paged_walk
from xsimulator.policies.continuous.paged_walk import STEPS, Walk, WalkedQueries, walk

CONFIGS = 24


def has_compiler() -> bool:
    try:
        return bool(find_compiler().command)
    except BuildError:
        return False


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The library is looked for anew, in an empty cache, and again after the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native_walk.native_steps.cache_clear()
    yield tmp_path / "xgpt" / "native"
    native_walk.native_steps.cache_clear()


def walks(seed: int, iterations: float, held: float, *, is_chunked: bool) -> list[Walk]:
    """By arrays, and as it comes."""
    rng = np.random.default_rng(seed)
    queries = WalkedQueries(
        iterations=iterations, held=held, input_sizes=np.sort(rng.uniform(1, 2 * held, 64)),
        last_sizes=np.sort(rng.uniform(1, 3 * held, 64)), is_chunked=is_chunked)
    slots = np.rint(np.exp(rng.uniform(0, 6, CONFIGS)))
    room, budget = held * np.exp(rng.uniform(0.2, 6, CONFIGS)), np.exp(rng.uniform(2, 8, CONFIGS))
    found = []
    for steps in (None, native_walk.native_steps()):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(paged_walk, "native_steps", lambda steps=steps: steps)
            found.append(walk(queries, slots, room, budget, 16))
    return found


@pytest.mark.skipif(not has_compiler(), reason="no C++ compiler")
@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize(("iterations", "held"), [(200.0, 900.0), (4.0, 60.0), (1.0, 20.0)])
def test_both_find_the_same_to_the_bit(iterations: float, held: float, is_chunked: bool) -> None:
    assert native_walk.native_steps() is not None
    arrays, native = walks(1, iterations, held, is_chunked=is_chunked)
    assert arrays.evictions.sum() > 0 and (arrays.running < STEPS).any()
    for name in Walk.__slots__:
        np.testing.assert_array_equal(getattr(arrays, name), getattr(native, name), err_msg=name)


def test_arrays_serve_where_it_is_turned_off(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XGPT_NATIVE", "off")
    assert native_walk.native_steps() is None
    assert not fresh.exists()


def test_arrays_serve_without_a_compiler(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(native_walk, "LIBRARY", "no-such-library.so")
    assert native_walk.native_steps() is None
    arrays, same = walks(2, 50.0, 300.0, is_chunked=True)
    np.testing.assert_array_equal(arrays.running, same.running)


@pytest.mark.skipif(not has_compiler(), reason="no C++ compiler")
def test_it_is_compiled_once(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_walk, "LIBRARY", "no-such-library.so")
    assert native_walk.native_steps() is not None
    (library,) = fresh.glob("*.so")
    native_walk.native_steps.cache_clear()
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert native_walk.native_steps() is not None
    assert list(fresh.glob("*")) == [library]
