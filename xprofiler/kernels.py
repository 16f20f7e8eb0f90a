"""Seconds of kernels on one device, whatever the model: matrix products and copies."""

import numpy as np
from numpy.typing import ArrayLike

from xgpt.core.cluster import Device
from xgpt.core.lengths import FloatArray
from xgpt.core.units import DTYPE_BYTES, EIGHT_BITS, WEIGHT_BYTES
from xprofiler.constants import BY_KIND, RooflineConstants


class Kernels:
    """Seconds of one device's kernels."""

    def __init__(self, device: Device, dtype: str, constants: RooflineConstants,
                 weight_dtype: str = "", kv_dtype: str = "") -> None:
        """`weight_dtype`: dtype that layers' weights are held and multiplied in; `kv_dtype`: dtype
        of the KV cache; "": `dtype`."""
        self.constants = constants
        self.item_bytes = DTYPE_BYTES[dtype]
        self.kv_item_bytes = WEIGHT_BYTES[kv_dtype or dtype]
        self.flops_per_s = device.peak_flops_per_s(dtype)
        self._rates = dict(device.flops_per_s)
        self._weights = weight_dtype or dtype
        self.bandwidth = device.bandwidth_bytes_per_s
        self._half_tile = BY_KIND[device.kind].gemm_half_rows

    def gemm_s(self, rows: ArrayLike, n: ArrayLike, k: ArrayLike, number: FloatArray | None = None,
               weight_bytes: int | None = None) -> FloatArray:
        """Seconds of the matrix product [rows, k] x [k, n], or of `number` of them that are
        launched together. Compute and memory overlap in part: their p-norm lies between maximum
        and sum. `weight_bytes`: bytes read per weight (None: as of the dtype)."""
        c = self.constants
        m, n, k = (np.asarray(size, float) for size in (rows, n, k))
        # rows / (rows / (rows + half)) = rows + half, and so with columns and depth
        padded = ((m + self._half(c.gemm_half_rows, number)) * (n + c.gemm_half_columns)
                  * (k + c.gemm_half_depth))
        compute_s = 2 * padded / (self.flops_per_s * c.gemm_flops_share)
        weights = n * k * (weight_bytes or self.item_bytes)
        memory_s = self.streamed_s(weights + m * (n + k) * self.item_bytes)
        seconds = joined(compute_s, memory_s, c.gemm_overlap)
        return (seconds if number is None else number * seconds) + c.gemm_launch_s

    def layer_product_s(self, rows: ArrayLike, n: ArrayLike, k: ArrayLike,
                        number: FloatArray | None = None) -> FloatArray:
        """Seconds of a layer's matrix product, or of `number` of them that are launched together.
        Weights in fp8 or int8 halve the bytes, and run at that type's rate where the device has
        one. int8 is assumed to reach the same share of its peak as fp8: it was not measured."""
        if self._weights not in EIGHT_BITS:
            return self.gemm_s(rows, n, k, number)
        if self._weights not in self._rates:  # they are widened on their way to the multipliers
            return self.gemm_s(rows, n, k, number, weight_bytes=1)
        c = self.constants
        m, n, k = np.broadcast_arrays(*(np.asarray(size, float) for size in (rows, n, k)))
        padded = (m + self._half(c.fp8_half_rows, number)) * (
            n + self._fp8_half_columns(number)) * (k + _own(c.fp8_half_depth, c.gemm_half_depth))
        compute_s = 2 * padded / (self._rates[self._weights] * c.fp8_flops_share)
        moved = n * k + m * (k + n * self.item_bytes)
        memory_s = moved / (self.bandwidth * _own(c.fp8_bytes_share, c.gemm_bytes_share))
        seconds = joined(compute_s, memory_s, _own(c.fp8_overlap, c.gemm_overlap))
        return (seconds if number is None else number * seconds) + c.fp8_launch_s

    def _half(self, half_rows: float, number: FloatArray | None) -> float:
        """Rows at which a product reaches half of its rate. Products that are launched together
        have one shape of tiles, which cannot fit the rows of each as a single product's do: the
        half tile of the device's kind is empty, at least."""
        return half_rows if number is None else max(half_rows, self._half_tile)

    def _fp8_half_columns(self, number: FloatArray | None) -> FloatArray | float:
        """Columns at which an fp8 product reaches half of its rate. What it needs beyond a product
        of 16 bits occupies the device, not its own tiles: products launched together share it."""
        c = self.constants
        half = _own(c.fp8_half_columns, c.gemm_half_columns)
        beyond = max(half - c.gemm_half_columns, 0.0)
        shared = 1.0 if number is None else np.maximum(number, 1.0)
        return half - beyond + beyond / shared

    def streamed_s(self, num_bytes: FloatArray) -> FloatArray:
        """Seconds to read and write the operands and result of a large kernel."""
        return num_bytes / (self.bandwidth * self.constants.gemm_bytes_share)

    def copied_s(self, num_bytes: FloatArray) -> FloatArray:
        """Seconds of an elementwise kernel's reads and writes, without its launch."""
        return num_bytes / (self.bandwidth * self.constants.elementwise_bytes_share)


def _own(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else value


def joined(a: FloatArray, b: FloatArray, p: float) -> FloatArray:
    """Seconds of two times that overlap in part: their p-norm, the sum at p = 1, the longer at
    infinity. A plain power would leave the floats' range."""
    longer, shorter = np.maximum(a, b), np.minimum(a, b)
    total: FloatArray = longer * (1 + (shorter / longer) ** p) ** (1 / p)
    return total
