"""How many rounds static batches of some sizes have, for bounds on them: looked up by size, for a
search asks for the same few again and again."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from xgpt.core.lengths import FloatArray
from xsimulator.policies.static.closed_form import Static
from xsimulator.policies.static.rounds import EXACT_ROUNDS, NODES

LEAST_LOG = -700.0  # of a chance that is none: its powers are still numbers


class Chances(NamedTuple):
    """Of batches [...]: rounds among the first EXACT_ROUNDS in the mean, and of the later ones at
    the rounds' nodes [..., NODES]; the chance that there is one at all."""

    exact: FloatArray
    later: FloatArray
    any: FloatArray


class RoundChances:
    """The chances of one problem's batches."""

    def __init__(self, form: Static) -> None:
        self._rounds, self._watched = form.rounds, max(form.watched, 0)
        with np.errstate(divide="ignore"):
            self._log_below = np.maximum(np.log(form.rounds.below[:-1]), LEAST_LOG)
        constraint = form.problem.constraint
        self._is_sequence, self._quantile = constraint.kind == "sequence", constraint.quantile
        self._known: dict[tuple[bool, float], FloatArray] = {}  # by whether they are `seen`, size

    def of(self, batch: FloatArray) -> Chances:
        """Of batches of so many queries [...]: P(M >= u) = 1 - F(u - 1)^B."""
        return self._looked_up(batch, self._rounds_of, is_seen=False)

    def seen(self, batch: FloatArray) -> Chances:
        """The same as seen by the query whose latency is bounded: of kind `sequence` one as long as
        the bound says, among others; else of the quantile of all batches."""
        return self._looked_up(batch, self._seen_rounds_of, is_seen=True)

    def _looked_up(self, batch: FloatArray, function: Callable[[FloatArray], FloatArray], *,
                   is_seen: bool) -> Chances:
        sizes, index = np.unique(batch, return_inverse=True)
        new = [size for size in sizes.tolist() if (is_seen, size) not in self._known]
        if new:
            found = function(np.array(new))
            self._known.update(((is_seen, size), row) for size, row in zip(
                new, found, strict=True))
        rows = np.stack([self._known[is_seen, size] for size in sizes.tolist()])[
            index.reshape(batch.shape)]
        return Chances(rows[..., 0], rows[..., 2:], rows[..., 1])

    def _rounds_of(self, batch: FloatArray) -> FloatArray:
        return self._columns(-np.expm1(batch[:, None] * self._log_below))

    def _seen_rounds_of(self, batch: FloatArray) -> FloatArray:
        if self._is_sequence:
            not_done = -np.expm1((batch[:, None] - 1) * self._log_below)
            not_done[:, :self._watched] = 1.0
            return self._columns(not_done)
        most = np.searchsorted(self._rounds.below, self._quantile ** (1 / batch) - 1e-12)
        return self._columns((np.arange(len(self._log_below)) < most[:, None]).astype(float))

    def _columns(self, not_done: FloatArray) -> FloatArray:
        """[batches, 2 + NODES] of the chances that a round is not the last [batches, rounds]."""
        count, shares = len(not_done), self._rounds.node_shares
        exact, later = not_done[:, :EXACT_ROUNDS], not_done[:, EXACT_ROUNDS:]
        first = exact[:, :1] if exact.shape[1] else np.zeros((count, 1))
        return np.concatenate([exact.sum(axis=1, keepdims=True), first, later @ shares if len(
            shares) else np.zeros((count, NODES))], axis=1)
