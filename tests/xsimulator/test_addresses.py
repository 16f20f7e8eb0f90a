"""Addresses of arrays are those that numpy says."""

import numpy as np
import pytest

from xsimulator import addresses
from xsimulator.addresses import address_of


@pytest.mark.parametrize("array", [
    np.zeros((3, 4)), np.zeros((3, 4))[1:, ::2], np.zeros((3, 4)).T, np.zeros(2, np.int64),
    np.empty(0), np.array(1.0), np.broadcast_to(np.zeros(3), (2, 3))])
def test_addresses_are_numpys(array: np.ndarray) -> None:
    assert address_of(array) == array.ctypes.data


def test_arrays_that_nobody_can_change_have_addresses() -> None:
    array = np.ones(3)
    array.flags.writeable = False
    assert address_of(array) == array.ctypes.data


def test_numpy_is_asked_where_arrays_are_laid_out_otherwise(
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "_PLACE", 0)  # the count of references
    assert addresses._quickest() is addresses._as_numpy_says
