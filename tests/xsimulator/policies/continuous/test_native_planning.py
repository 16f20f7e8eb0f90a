"""What csrc/planning.cpp finds is what arrays find, to the bit; arrays serve where it is not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from compilers import has_compiler

from xgpt.core.lengths import FloatArray
from xsimulator import native, step_table
from xsimulator.policies.continuous import in_flight, paged_walk, walk_table
from xsimulator.policies.continuous.paged_walk import STEPS, Walk, WalkedQueries, walk
from xsimulator.policies.waa import unevenness
from xsimulator.replay import stage_line

CONFIGS = 24


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The library is looked for anew, in an empty cache, and again after the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native.native.cache_clear()
    yield tmp_path / "xgpt" / "native"
    native.native.cache_clear()


def walks(seed: int, iterations: float, held: float, *, is_chunked: bool,
          together: int) -> list[Walk]:
    """By arrays, and as it comes."""
    rng = np.random.default_rng(seed)
    queries = WalkedQueries(
        iterations=iterations, held=held, input_sizes=np.sort(rng.uniform(1, 2 * held, 64)),
        last_sizes=np.sort(rng.uniform(1, 3 * held, 64)), is_chunked=is_chunked)
    slots = np.rint(np.exp(rng.uniform(0, 6, CONFIGS)))
    room, budget = held * np.exp(rng.uniform(0.2, 6, CONFIGS)), np.exp(rng.uniform(2, 8, CONFIGS))
    found = []
    for one in (None, native.native()):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(paged_walk, "native", lambda one=one: one)
            found.append(walk(queries, slots, room, budget, 16, together))
    return found


@pytest.mark.skipif(not has_compiler(), reason="no C++ compiler")
@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize(("iterations", "held", "together"), [
    (200.0, 900.0, 1), (4.0, 60.0, 1), (1.0, 20.0, 1), (60.0, 300.0, 3)])
def test_both_find_the_same_to_the_bit(iterations: float, held: float, together: int,
                                       is_chunked: bool) -> None:
    assert native.native() is not None
    arrays, steps = walks(1, iterations, held, is_chunked=is_chunked, together=together)
    assert arrays.evictions.sum() > 0 and (arrays.running < STEPS).any()
    for name in Walk.__slots__:
        np.testing.assert_array_equal(getattr(arrays, name), getattr(steps, name), err_msg=name)


@pytest.mark.skipif(not has_compiler(), reason="no C++ compiler")
@pytest.mark.parametrize("kinds", [[0, 0], [0, 1, 1, 2], [*[0] * 15, 1]])
@pytest.mark.parametrize("alternates", [False, True])
def test_both_run_a_pipeline_alike(kinds: list[int], alternates: bool,
                                        monkeypatch: pytest.MonkeyPatch) -> None:
    rng, stages = np.random.default_rng(3), len(kinds)
    plain_s, encode_s = rng.uniform(1, 2, (40, 3)), rng.uniform(1, 9, (40, 8, 3))
    share, groups = rng.uniform(0, 1, 40), rng.integers(1, stages + 1, 40)
    assert native.native() is not None

    def found() -> in_flight.Intervals:
        return in_flight.intervals(plain_s[:, :max(kinds) + 1], encode_s[:, :, :max(kinds) + 1],
                                   share, groups, kinds, alternates=alternates)

    own = found()
    monkeypatch.setattr(in_flight, "native", lambda: None)
    for mine, theirs in zip(own, found(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-12)


@pytest.mark.skipif(not has_compiler(), reason="no C++ compiler")
@pytest.mark.parametrize("stages", [1, 5])
def test_both_time_a_replay_s_turns_to_the_bit(stages: int) -> None:
    rng = np.random.default_rng(4)
    # of 60 turns some wait for none, and some have no step
    waits = [int(rng.integers(-1, turn)) if turn and turn % 7 else -1 for turn in range(60)]
    turn_of = np.flatnonzero(rng.random(60) < 0.8)
    seconds = rng.uniform(0.1, 2, (len(turn_of), stages))
    seconds[40:, -1] = np.inf  # beyond what was measured
    library = native.native()
    assert library is not None and len(turn_of) < 60
    for mine, theirs in zip(library.in_line(np.array(waits), turn_of, seconds, 3.0),
                            stage_line._in_line(waits, turn_of, seconds, 3.0), strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.skipif(not has_compiler(), reason="no C++ compiler")
def test_both_pace_uneven_batches_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(5)
    pools = [unevenness.UnevenPool(rng.uniform(0.5, 2, (3, stages)), rng.uniform(0, 2, (3, stages)),
                                   rng.uniform(0, 3, 3)) for stages in (1, 2, 5, 64)]
    pools[1].steps[2] = np.inf  # sizes that are refused
    pools[1].rises[2] = np.nan
    shares = rng.uniform(0.2, 2, (3, unevenness._STEPS))
    assert native.native() is not None
    own = unevenness._between_s(shares, pools)
    monkeypatch.setattr(unevenness, "native", lambda: None)
    np.testing.assert_array_equal(own, unevenness._between_s(shares, pools))
    assert np.isnan(own[1, 2]) and np.isfinite(own[0]).all()


def test_arrays_serve_where_it_is_turned_off(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XGPT_NATIVE", "off")
    assert native.native() is None
    assert not fresh.exists()


def test_arrays_serve_without_a_compiler(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(native, "LIBRARY", "no-such-library.so")
    assert native.native() is None
    arrays, same = walks(2, 50.0, 300.0, is_chunked=True, together=2)
    np.testing.assert_array_equal(arrays.running, same.running)


@pytest.mark.skipif(not has_compiler(), reason="no C++ compiler")
def test_it_is_compiled_once(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "LIBRARY", "no-such-library.so")
    monkeypatch.setenv("XGPT_NATIVE_FLAGS", "-O0")  # quick to compile: how often is what counts
    assert native.native() is not None
    (library,) = fresh.glob("*.so")
    made = library.stat().st_mtime_ns
    native.native.cache_clear()
    assert native.native() is not None
    assert list(fresh.glob("*.so")) == [library] and library.stat().st_mtime_ns == made


def test_step_times_out_of_tables_are_the_same_to_the_bit(monkeypatch):
    if native.native() is None:
        pytest.skip("there is no compiler")

    def seconds(sizes: FloatArray) -> FloatArray:
        bent = np.stack([1e-5 * sizes + 3e-4, np.maximum(2e-5 * sizes, 1e-3)], axis=-1)
        return np.where(sizes[..., None] > 5e4, np.inf, bent)

    rng = np.random.default_rng(3)
    asked = [10 ** rng.uniform(-4, top, shape) for top, shape in (
        (3.0, (300,)), (4.2, (3, 7)), (5.0, (600,)), (2.0, (0,)))]
    found = []
    for library in (native.native(), None):
        monkeypatch.setattr(step_table, "native", lambda library=library: library)
        for is_lowered in (False, True):
            table = step_table.SizeTable(seconds, lowered=is_lowered)
            found.append([table(np.asarray(sizes)) for sizes in asked])
    for quick, by_arrays in zip(found[:2], found[2:], strict=True):
        for one, other in zip(quick, by_arrays, strict=True):
            np.testing.assert_array_equal(one, other)
    assert np.isinf(found[0][2]).any(), "else nothing was refused"


@pytest.mark.skipif(not has_compiler(), reason="no C++ compiler")
def test_what_is_walked_natively_is_what_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays walk the numbers of slots beside these as well; what is found is the same."""
    sizes = np.arange(10.0, 74.0)
    queries = WalkedQueries(iterations=40.0, held=90.0, input_sizes=sizes, last_sizes=2 * sizes,
                            is_chunked=False)
    given = [np.full(1, value) for value in (20.0, 1e4, 512.0, 1.0)]
    found, walked = [], []
    for one in (native.native(), None):
        monkeypatch.setattr(walk_table, "native", lambda one=one: one)
        table = walk_table.WalkTable(queries, 16)
        found.append(table(*given))
        walked.append(len(table._rows))
    assert walked[0] == 2 < walked[1]
    for name in Walk.__slots__:
        np.testing.assert_array_equal(getattr(found[0], name), getattr(found[1], name))
