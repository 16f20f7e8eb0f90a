"""Configurations by the division of the devices that each has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from xgpt.core.lengths import FloatArray, IntArray
from xsimulator.policies.waa.config import WaaConfigs
from xsimulator.policies.waa.plans import WaaPlan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Divided:
    """Those of each plan lie side by side: `which` [configs], in rising order, has the place of
    each one's among the plans."""

    plans: list[WaaPlan]
    which: IntArray
    configs: WaaConfigs

    def each(self) -> Iterator[tuple[WaaPlan, slice]]:
        """A plan, and the rows of its configurations."""
        borders = np.searchsorted(self.which, np.arange(len(self.plans) + 1)).tolist()
        for plan, begin, end in zip(self.plans, borders[:-1], borders[1:], strict=True):
            yield plan, slice(begin, end)

    def take(self, rows: IntArray) -> Divided:
        """Some of them, in their order."""
        places, which = np.unique(self.which[rows], return_inverse=True)
        return Divided(plans=[self.plans[place] for place in places.tolist()], which=which,
                       configs=self.configs.take(rows))

    def gathered(self, ask: Callable[[WaaPlan, slice], tuple[FloatArray, ...]],
                 ) -> tuple[FloatArray, ...]:
        """Columns [configs] of what is asked for plan by plan."""
        parts = [ask(plan, rows) for plan, rows in self.each()]
        if len(parts) == 1:
            return parts[0]
        return tuple(np.concatenate(own) for own in zip(*parts, strict=True))
