"""RRA's control variables: one configuration, many as arrays, and boxes of those in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from xgpt.core.lengths import IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class RraConfig:
    """One point of RRA's space; `decode_micro_batches` None stands for one per stage, an
    `encode_chunk` of 0 for no limit: a batch is encoded alone, between two phases."""

    encode_batch: int
    decode_iterations: int
    tp_degree: int = 1
    tp_gpus: int = 0
    decode_micro_batches: int | None = None
    encode_chunk: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RraConfigs:
    """Many points, as arrays of equal length; `decode_micro_batches` 0 stands for one per stage."""

    encode_batch: IntArray
    decode_iterations: IntArray
    tp_degree: IntArray
    tp_gpus: IntArray
    decode_micro_batches: IntArray

    def __len__(self) -> int:
        return len(self.encode_batch)

    def take(self, rows: IntArray) -> RraConfigs:
        """Some of the configurations."""
        return RraConfigs(**{name: getattr(self, name)[rows] for name in self.__slots__})

    @classmethod
    def of(cls, configs: RraConfigs | Sequence[RraConfig]) -> RraConfigs:
        """The same configurations are given as arrays, which have no chunks."""
        if isinstance(configs, RraConfigs):
            return configs
        assert not any(one.encode_chunk for one in configs), "chunks are ChunkedForm's"
        columns = np.array([[getattr(config, name) or 0 for config in configs]
                            for name in cls.__slots__], np.int64)
        return cls(**dict(zip(cls.__slots__, columns, strict=True)))


