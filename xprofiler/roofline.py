"""The analytic roofline as a `TimingSource`, for planning on a laptop (paper section 3 measures
instead; docs/profile.md says what a sum of operators misses)."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

from xgpt.core.cluster import Device, Link
from xgpt.core.engines import OWN_ENGINE
from xgpt.core.lengths import FloatArray
from xgpt.core.model import ModelSpec
from xgpt.core.units import DTYPE_BYTES, EIGHT_BITS, INT8
from xprofiler.constants import RooflineConstants, engine_constants, engine_errors
from xprofiler.kernels import AttentionKernels, Kernels, LinkTimes, RowKernels
from xprofiler.source_errors import SourceErrors, with_products_of
from xprofiler.timing import MessageKind, Operator, Reach, TimingFacts


class Roofline:
    """Times of one model's operators on one device type, as `engine` takes them. `constants`: those
    of the engine on the device unless given. `weight_dtype`: as
    what the layers' weights are multiplied, `kv_dtype`: as what entries of the cache are held; "":
    as `dtype`."""

    def __init__(self, model: ModelSpec, device: Device, dtype: str,
                 constants: RooflineConstants | None = None, *, engine: str = OWN_ENGINE,
                 weight_dtype: str = "", kv_dtype: str = "") -> None:
        assert dtype in DTYPE_BYTES, f"{dtype = }"
        self._of = (model, device, dtype)
        self._engine, self._held_as = engine, (weight_dtype, kv_dtype)
        self._kind = "analytic" if constants is None else "calibrated"
        self.constants = constants or engine_constants(device, engine)
        self.kernels = Kernels(device, dtype, self.constants, weight_dtype, kv_dtype)
        self.links = LinkTimes(self.kernels)
        rows, attention = RowKernels(model, self.kernels), AttentionKernels(model, self.kernels)
        self._rows: dict[Operator, Callable[[FloatArray, int], FloatArray]] = {
            Operator.LAYER_REST: rows.layer_rest_s, Operator.DECODE_REST: rows.layer_rest_s,
            Operator.ENCODER_REST: rows.block_s,
            Operator.CROSS_KV: rows.cross_kv_s, Operator.HEAD: rows.head_s,
            Operator.EMBED: rows.embed_s}
        self._attention: dict[Operator, Callable[[FloatArray, FloatArray, int], FloatArray]] = {
            Operator.ENCODE_ATTENTION: attention.encode_s,
            Operator.DECODE_ATTENTION: attention.cache_s,
            Operator.CROSS_ATTENTION: attention.cache_s,
            Operator.KV_COMPACTION: attention.compaction_s}
        # kernels read each query's own context; a device's rates are its share already
        self.facts = TimingFacts(step_overhead_s=self.constants.step_overhead_s, is_padded=False)

    def with_constants(self, constants: RooflineConstants) -> Roofline:
        """The same model on the same device, with other constants."""
        return Roofline(*self._of, constants, engine=self._engine,
                        weight_dtype=self._held_as[0], kv_dtype=self._held_as[1])

    def operator_s(self, operator: Operator, x: ArrayLike, y: ArrayLike = 0.0, *,
                   tp_degree: int = 1) -> FloatArray:
        """See TimingSource."""
        size, second = np.asarray(x, float), np.asarray(y, float)
        if operator in self._rows:
            if second.ndim and size.shape != second.shape:
                size, second = np.broadcast_arrays(size, second)
            seconds = self._rows[operator](size, tp_degree)
        else:
            seconds = self._attention[operator](size, second, tp_degree)
        return np.where(size > 0, seconds, 0.0)

    def message_s(self, kind: MessageKind, num_bytes: ArrayLike, link: Link, *,
                  tp_degree: int = 1) -> FloatArray:
        """See TimingSource."""
        if kind is MessageKind.ALL_REDUCE:
            return (self.links.collective_s(num_bytes, tp_degree, link)
                    + self.links.synchronisation_s(tp_degree))
        if kind is MessageKind.TRANSFER:
            return self.links.transfer_s(num_bytes, link)
        return self.links.handover_s(num_bytes, link)

    def reach(self, operator: Operator, tp_degree: int) -> Reach:
        """No measurements, so no limit to them."""
        return Reach(math.inf, math.inf)

    def errors(self) -> SourceErrors:
        """How far off these times are, by group of operators."""
        errors = engine_errors(self._of[1], self._engine)
        return with_products_of(INT8, errors) if self._held_as[0] == INT8 else errors

    def provenance(self) -> str:
        """One line for reports."""
        model, device, dtype = self._of
        of = "" if self._engine == OWN_ENGINE else f" as {self._engine} takes it"
        weights = f", weights {self._held_as[0]}" if self._held_as[0] in EIGHT_BITS else ""
        return f"{self._kind} roofline of {model.name} on {device.name}{of}, {dtype}{weights}"
