"""The output head: the vocabulary's product in pieces, and the largest logit of each row.

A greedy request needs only its largest logit. It is searched piece by piece while logits lie in the
processor's caches, so n x V float32 logits are never in memory. Whole rows are computed only for
drawn requests. Measured beside 1,024 to 4,096: with pieces of 8,192 tokens the weights of a small
batch stream as fast as in one product."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from xgpt.core.placement import HEAD_TOKENS
from xrunner.devices import on_device
from xrunner.ops.cpu.native import check, dtype_code, library, serves, threads
from xrunner.ops.linear import Product


class BestTokens(NamedTuple):
    """Largest logit of each row so far [n] float32, and its token [n] int64, the lowest if tied."""

    logits: Tensor
    tokens: Tensor


class Scores(Protocol):
    """Logits of a step's rows over this rank's share of the vocabulary; `rows` must be rising."""

    def best(self, rows: Sequence[int]) -> BestTokens:
        """Largest logit and token of each of these rows; -inf and 0 for a share without tokens."""

    def of(self, rows: Sequence[int]) -> Tensor:
        """Logits of these rows, [rows, V_local]."""


class OutputHead:
    """The product with the vocabulary's weight [V_local, H]."""

    def __init__(self, weight: Tensor) -> None:
        self.shape = tuple(weight.shape)
        most = max(len(weight), 1) if weight.is_cuda else HEAD_TOKENS
        self.pieces = [Product(part) for part in torch.split(weight, most)]
        # brings a piece's weights, and begins to bring those of the next; None: all are resident
        self.lend: Callable[[int], None] | None = None

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for piece in self.pieces for tensor in piece.tensors]

    def pack(self, dtype: torch.dtype) -> None:
        for piece in self.pieces:
            piece.pack(dtype)

    def logits(self, x: Tensor) -> Tensor:
        """Logits [n, V_local] of x [n, H], of the dtype that the weight is held as."""
        parts = [piece(x) for piece in self._lent()]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def best(self, x: Tensor) -> BestTokens:
        """Largest logit and token of each row of x [n, H]."""
        best, first = no_tokens(len(x), x.device), 0
        for piece in self._lent():
            best = keep_best(best, piece(x), first)
            first += piece.shape[0]
        return best

    def _lent(self) -> Iterator[Product]:
        for index, piece in enumerate(self.pieces):
            if self.lend is not None:
                self.lend(index)
            yield piece


class HeadScores:
    """Scores of a head's input x [n, H]. `cap`: a score s becomes cap * tanh(s / cap), which keeps
    their order. `bias`: [V_local], added to whole rows."""

    def __init__(self, head: OutputHead, x: Tensor, *, cap: float | None = None,
                 bias: Tensor | None = None) -> None:
        self._head, self._x, self._cap, self._bias = head, x, cap, bias

    def best(self, rows: Sequence[int]) -> BestTokens:
        if self._bias is not None:
            return _best_of(self.of(rows))
        best = self._head.best(_taken(self._x, rows))
        return BestTokens(self._capped(best.logits), best.tokens)

    def of(self, rows: Sequence[int]) -> Tensor:
        logits = self._capped(self._head.logits(_taken(self._x, rows)))
        return logits if self._bias is None else logits + self._bias.to(logits.dtype)

    def _capped(self, logits: Tensor) -> Tensor:
        return logits if self._cap is None else self._cap * torch.tanh(logits / self._cap)


class WholeScores:
    """Scores of given logits [n, V_local]."""

    def __init__(self, logits: Tensor) -> None:
        self._logits = logits

    def best(self, rows: Sequence[int]) -> BestTokens:
        return _best_of(self.of(rows))

    def of(self, rows: Sequence[int]) -> Tensor:
        return _taken(self._logits, rows)


def _best_of(logits: Tensor) -> BestTokens:
    return keep_best(no_tokens(len(logits), logits.device), logits, 0)


def _taken(tensor: Tensor, rows: Sequence[int]) -> Tensor:
    """Rows of the tensor; `rows` must be rising."""
    return tensor if len(rows) == len(tensor) else tensor[on_device([*rows], tensor.device)]


def no_tokens(rows: int, device: torch.device) -> BestTokens:
    """Initial BestTokens, before any logits."""
    return BestTokens(torch.full((rows,), float("-inf"), device=device),
                      torch.zeros(rows, dtype=torch.long, device=device))


def keep_best(best: BestTokens, logits: Tensor, first_token: int) -> BestTokens:
    """`best` updated by the logits [n, v] of the tokens from `first_token` on; may overwrite
    `best`. These tokens must be higher than those before. NaN is never the best."""
    if serves(logits) and logits.is_contiguous():
        lib = library()
        assert lib is not None
        check(lib.xgpt_keep_best(
            dtype_code(logits), best.logits.data_ptr(), best.tokens.data_ptr(), logits.data_ptr(),
            *logits.shape, first_token, threads()))
        return best
    if not logits.shape[1]:
        return best
    numbers = logits.float().masked_fill(logits.isnan(), float("-inf"))
    largest, tokens = numbers.max(dim=-1)
    is_more = largest > best.logits
    return BestTokens(torch.where(is_more, largest, best.logits),
                      torch.where(is_more, tokens + first_token, best.tokens))
