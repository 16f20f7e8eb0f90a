"""Seconds of a pool's steps by their size, of its slowest stage and through all stages: tables at
sizes NODE_RATIO apart, with lines between them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from xgpt.core.lengths import FloatArray
from xsimulator.rough.workload import Workload
from xsimulator.stage_times import StageTimes, stage_kinds

NODE_RATIO = 1.15  # chosen
MOST_ROWS = 1 << 20  # chosen: tokens of the largest step
NODES: FloatArray = np.concatenate([[0.0], np.unique(np.round(
    NODE_RATIO ** np.arange(1 + np.log(MOST_ROWS) / np.log(NODE_RATIO)), 2))])


class Seconds(NamedTuple):
    """Of steps: on the slowest stage, and through all stages."""

    slowest: FloatArray
    through: FloatArray

    def __add__(self, other: Seconds) -> Seconds:  # type: ignore[override]
        return Seconds(self.slowest + other.slowest, self.through + other.through)

    def times(self, factor: FloatArray | float) -> Seconds:
        """Of so many steps, each."""
        return Seconds(self.slowest * factor, self.through * factor)

    def cycle(self, groups: FloatArray) -> FloatArray:
        """Between two steps of one of so many groups, which work in turn: a stage works all
        groups' steps, and a group's step passes all stages."""
        return np.maximum(groups * self.slowest, self.through)


class Pace:
    """The steps of one pool's stages."""

    def __init__(self, times: StageTimes, workload: Workload) -> None:
        kinds = stage_kinds(times)
        number = np.bincount(kinds.kind_of)
        self._mean_input = workload.inputs.mean
        nodes, own = np.maximum(NODES, 1e-3), kinds.times
        is_padded = times.layers.timing.facts.is_padded
        context = workload.charged_context(nodes, is_padded=is_padded)
        queries = nodes / self._mean_input
        attention = {degree: queries * one for degree, one in own.mean_attention_s(
            np.maximum(queries, 1.0)).items()}

        def table(seconds: FloatArray) -> FloatArray:
            with np.errstate(invalid="ignore"):
                return np.stack([seconds.max(axis=-1), seconds @ number])

        near = own.decode_s(nodes, np.minimum(context, 1.0))
        self._decode = table(own.decode_s(nodes, context))
        with np.errstate(invalid="ignore"):
            self._of_token = (self._decode - table(near)) / np.maximum(context - 1, 1.0)
        self._encode = table(own.encode_s(nodes, queries, attention))
        self._rows = table(own.encode_rows_s(nodes))

    def decode(self, rows: FloatArray, beyond: FloatArray | float = 0.0) -> Seconds:
        """Of steps that decode so many rows, whose contexts are so many tokens above the mean."""
        found = _at(self._decode, rows)
        if np.any(beyond):
            found = found + _at(self._of_token, rows).times(np.asarray(beyond))
        return found

    def encode(self, tokens: FloatArray) -> Seconds:
        """Of steps that encode inputs of so many tokens in all."""
        return _at(self._encode, tokens)

    def both(self, rows: FloatArray, tokens: FloatArray) -> Seconds:
        """Of steps that decode so many rows and encode so many tokens beside them: the weights are
        read once."""
        apart = self.decode(rows) + self.encode(tokens)
        saved = (_at(self._rows, rows) + _at(self._rows, tokens)
                 + _at(self._rows, rows + tokens).times(-1.0))
        return Seconds(apart.slowest - saved.slowest, apart.through - saved.through)


def _at(table: FloatArray, sizes: FloatArray) -> Seconds:
    """Between nodes on lines; infinite where a node beside it is."""
    with np.errstate(invalid="ignore"):
        slowest, through = (np.interp(sizes, NODES, own) for own in table)
    return Seconds(np.where(np.isnan(slowest), np.inf, slowest),
                   np.where(np.isnan(through), np.inf, through))
