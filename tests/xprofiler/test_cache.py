"""The fingerprint of the timed code is of files that are there."""

from __future__ import annotations

from pathlib import Path

import pytest

from xprofiler import cache


@pytest.mark.parametrize("name", cache._TIMED_CODE)
def test_timed_code_is_there(name: str) -> None:
    assert any(cache._code_files(Path(cache.__file__).parents[1] / name)), name
    assert (Path(cache.__file__).parents[1] / name).exists()


def test_the_fingerprint_is_short_and_always_the_same() -> None:
    assert cache.kernels_fingerprint() == cache.kernels_fingerprint()
    assert len(cache.kernels_fingerprint()) == 16
