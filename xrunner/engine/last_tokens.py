"""The last token of each query in a group's slots, kept where it was chosen: on a stage that holds
the whole model alone, the next decode step takes its inputs from there, and not from the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from xrunner.devices import on_device
from xrunner.ops.contexts import DecodeContext
from xrunner.rules.slots import Move

FED_BACK = -1  # in an input token's place: it is the one that the query's last step gave


class LastTokens:
    """By slot. A query whose token came from elsewhere (another pool, an encoder-decoder model's
    first) is told it by the head."""

    def __init__(self, device: torch.device) -> None:
        self._tokens = torch.zeros(0, dtype=torch.long, device=device)

    def fed(self, inputs: Tensor, step: DecodeContext) -> Tensor:
        """inputs [n + T], where those of the n queries that `step` decodes come first: the same
        with each FED_BACK replaced."""
        count = len(step.slots)
        if not count:
            return inputs
        self._reach(step.width)
        told = inputs[:count]
        own = torch.where(told == FED_BACK, self._tokens[step.slots], told)
        return own if count == len(inputs) else torch.cat([own, inputs[count:]])

    def keep(self, slots: Sequence[int], tokens: Tensor) -> None:
        """tokens [n] were given to the queries in these slots. Of one that has none, since its
        logits were no numbers, the row may be decoded on until the head hears of it."""
        self._reach(max(slots) + 1)
        tokens = tokens.long().clamp(min=0)
        first, end = slots[0], slots[0] + len(slots)
        if [*slots] == [*range(first, end)]:  # as most are
            self._tokens[first:end] = tokens
        else:
            self._tokens[on_device([*slots], tokens.device)] = tokens

    def move(self, moves: Sequence[Move]) -> None:
        """Queries change their slots, none into one that another leaves."""
        if not moves:
            return
        self._reach(max(move.source for move in moves) + 1)
        sources, targets = on_device([[*side] for side in zip(*moves, strict=True)],
                                     self._tokens.device)
        self._tokens[targets] = self._tokens[sources]

    def _reach(self, slots: int) -> None:
        if slots > len(self._tokens):
            more = self._tokens.new_zeros(slots - len(self._tokens))
            self._tokens = torch.cat([self._tokens, more])
