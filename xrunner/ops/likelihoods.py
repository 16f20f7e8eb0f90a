"""Log-likelihoods of chosen tokens (`logprobs`) or of a given text's (`xgpt score`), and of the
likeliest tokens beside them.

They are the float32 log-softmax of the model's logits before temperature, top-k, top-p and barred
tokens, as in OpenAI's API. Each rank of a tensor-parallel group sends the logarithm of its share's
sum, the target's logit if it has it, and its likeliest tokens. The first rank combines them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from xrunner.devices import on_device
from xrunner.models.weights import Shard
from xrunner.ops.output_head import Scores
from xrunner.query import TokenLikelihood

# chosen: rows whose logits are in memory at once: 154 MB for 150,000 tokens
_ROWS_AT_A_TIME = 256


def likelihoods(scores: Scores, rows: Sequence[int], targets: Tensor, top: int, shard: Shard,
                vocab_size: int) -> Tensor | None:
    """Log-likelihoods by row, [rows, 1 + 2 top] float32; None on all but the group's first rank.
    Columns: the target's, then the `top` likeliest tokens, then theirs. `rows`: rising indices into
    `scores`. `targets`: [rows] int64, the same on every rank."""
    parts = []
    for first in range(0, len(rows), _ROWS_AT_A_TIME):
        end = first + _ROWS_AT_A_TIME
        part = _of_rows(scores.of(rows[first:end]).float(), targets[first:end], top, shard,
                        vocab_size)
        if part is not None:
            parts.append(part)
    return torch.cat(parts) if parts else None


def _of_rows(logits: Tensor, targets: Tensor, top: int, shard: Shard,
             vocab_size: int) -> Tensor | None:
    """Log-likelihoods [n, 1 + 2 top] from logits [n, V_local]; None on all but the first rank."""
    before = shard.index * shard.vocabulary_share(vocab_size)
    held = logits.shape[1]
    local = on_device(targets, logits.device) - before
    is_own = (local >= 0) & (local < held)
    own = torch.full((len(logits), 2 + 2 * top), float("-inf"), device=logits.device)
    if held:
        own[:, 0] = torch.logsumexp(logits, dim=1)
        found = logits.gather(1, local.clamp(0, held - 1)[:, None])[:, 0]
        own[:, 1] = torch.where(is_own, found, own[:, 1])
        most = min(top, held)
        values, tokens = torch.topk(logits, most)
        own[:, 2:2 + most] = values
        own[:, 2 + top:2 + top + most] = tokens + before  # float32 holds every token exactly
    gathered = shard.gather(own)
    if gathered is None:
        return None
    total = torch.logsumexp(gathered[:, :, 0], dim=0)
    out = torch.empty((len(logits), 1 + 2 * top), device=logits.device)
    out[:, 0] = gathered[:, :, 1].amax(dim=0) - total
    values, tokens = (part.permute(1, 0, 2).flatten(1) for part in (
        gathered[:, :, 2:2 + top], gathered[:, :, 2 + top:]))
    largest = values.topk(top, dim=1)
    out[:, 1:1 + top] = tokens.gather(1, largest.indices)
    out[:, 1 + top:] = largest.values - total[:, None]
    return out


def targets_of(tokens: Tensor | None, count: int, shard: Shard, device: torch.device) -> Tensor:
    """Tokens [count] that the group's first rank has chosen, on every rank."""
    if shard.degree == 1:
        assert tokens is not None, "a rank alone chooses"
        return tokens
    own = torch.zeros((count, 1), device=device) if tokens is None else (
        on_device(tokens, device).float()[:, None])
    # a sum of one rank's and zeros, since every group can all-reduce
    return shard.all_reduce(own)[:, 0].long()


def packed(tokens: Tensor, told: Sequence[Tensor | None]) -> Tensor:
    """Tokens [n] and what is reported of each, as one float32 tensor; `unpacked` reads it. `told`:
    for each token a [rows, columns] tensor, an embedding [columns], or None. The tensor has n
    tokens, n numbers of rows (0 for an embedding), n numbers of columns, and the values."""
    shapes = [(0, 0) if one is None else (0, len(one)) if one.ndim == 1 else tuple(one.shape)
              for one in told]
    header = torch.tensor([[rows for rows, _ in shapes], [columns for _, columns in shapes]],
                          dtype=torch.float32).flatten()
    return torch.cat([tokens.float(), on_device(header, tokens.device),
                      *(one.flatten() for one in told if one is not None)])


def as_row(one: TokenLikelihood) -> Tensor:
    """A likelihood as a row [1, 1 + 2 top] of `likelihoods`."""
    return torch.tensor([[one.logprob, *(token for token, _ in one.top),
                          *(value for _, value in one.top)]])


class TokenExtras(NamedTuple):
    """Likelihoods, or embedding, that came with a request's token."""

    likelihoods: tuple[TokenLikelihood, ...] = ()
    embedding: tuple[float, ...] = ()


def unpacked(tensor: Tensor, count: int) -> tuple[list[int], list[TokenExtras]]:
    """Tokens of `count` requests, and what came with each; [] for a tensor of tokens alone."""
    if tensor.dtype == torch.int64:
        return tensor.tolist(), []
    head = tensor[:3 * count].long().tolist()
    tokens, rows, columns = (head[part * count:(part + 1) * count] for part in range(3))
    values, first = tensor[3 * count:].tolist(), 0
    told = []
    for own_rows, width in zip(rows, columns, strict=True):
        if width and not own_rows:
            told.append(TokenExtras(embedding=tuple(values[first:first + width])))
            first += width
            continue
        top = (width - 1) // 2
        own = []
        for _ in range(own_rows):
            row = values[first:first + width]
            own.append(TokenLikelihood(row[0], tuple(
                (int(token), logprob) for token, logprob in zip(
                    row[1:1 + top], row[1 + top:], strict=True) if logprob > float("-inf"))))
            first += width
        told.append(TokenExtras(tuple(own)))
    return tokens, told
