"""WAA's control variables: one configuration, many of one tensor plan, and boxes of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from xgpt.core.lengths import FloatArray, IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class WaaConfig:
    """One point of WAA's space is a batch, a number of groups and a tensor plan; with an
    `encode_chunk` the decode pool encodes up to so many tokens in each of its steps while the
    encode pool is behind (0: none)."""

    encode_batch: int
    decode_micro_batches: int = 1
    tp_degree: int = 1
    tp_gpus: int = 0
    encode_chunk: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WaaConfigs:
    """Several points of one tensor plan are arrays [configs]."""

    batch: FloatArray
    groups: FloatArray
    chunk: FloatArray

    @classmethod
    def plain(cls, batch: FloatArray, groups: FloatArray) -> WaaConfigs:
        """Those that take no chunks."""
        return cls(batch=batch, groups=groups, chunk=np.zeros(len(batch)))

    def take(self, rows: IntArray | slice) -> WaaConfigs:
        return WaaConfigs(batch=self.batch[rows], groups=self.groups[rows], chunk=self.chunk[rows])


