"""Addresses of numpy arrays, for calls into csrc."""

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

# PyArrayObject: the object header, then the address of the data
_PLACE = object.__basicsize__
_read = ctypes.c_size_t.from_address


def _as_laid_out(array: NDArray[Any]) -> int:
    return _read(id(array) + _PLACE).value


def _as_numpy_says(array: NDArray[Any]) -> int:
    return array.ctypes.data


def _quickest() -> Callable[[NDArray[Any]], int]:
    """The function to use: reading the address from the object is ten times as quick as
    `array.ctypes.data`, and planning asks a hundred thousand times. Falls back to numpy if arrays
    are laid out otherwise."""
    probes = [np.zeros((3, 4)), np.zeros((3, 4))[1:, ::2], np.zeros(2, np.int64), np.empty(0)]
    is_so = all(_as_laid_out(one) == _as_numpy_says(one) for one in probes)
    return _as_laid_out if is_so else _as_numpy_says


address_of = _quickest()
