"""WAA's control variables: one configuration, many of one tensor plan, and boxes of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from xgpt.core.lengths import FloatArray, IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class WaaConfig:
    """One point of WAA's space is a batch, a number of groups and a tensor plan."""

    encode_batch: int
    decode_micro_batches: int = 1
    tp_degree: int = 1
    tp_gpus: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WaaConfigs:
    """Several points of one tensor plan are arrays [configs]."""

    batch: FloatArray
    groups: FloatArray

    def take(self, rows: IntArray) -> WaaConfigs:
        return WaaConfigs(batch=self.batch[rows], groups=self.groups[rows])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WaaBoxes:
    """Boxes of one tensor plan have such ranges [boxes], both ends included."""

    least: IntArray  # encode_batch
    most: IntArray
    fewest: IntArray  # decode_micro_batches
    highest: IntArray

    def __len__(self) -> int:
        return len(self.least)

    @property
    def easiest(self) -> WaaConfigs:
        """The least is held at these corners."""
        return WaaConfigs(batch=np.asarray(self.least, float),
                          groups=np.asarray(self.highest, float))

    @property
    def hardest(self) -> WaaConfigs:
        """The most is held at these corners."""
        return WaaConfigs(batch=np.asarray(self.most, float), groups=np.asarray(self.fewest, float))

    def take(self, rows: IntArray) -> WaaBoxes:
        return WaaBoxes(least=self.least[rows], most=self.most[rows], fewest=self.fewest[rows],
                        highest=self.highest[rows])
