"""What the last stage gives of a step: a token of each query, chosen from its logits, and what is
told of it; or, of queries that are scored, how likely the model finds their targets; or, of those
that are embedded, their embeddings."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from xrunner.engine.group import Model
from xrunner.models.stage_model import StageModel
from xrunner.ops.head import WholeScores
from xrunner.ops.likelihoods import likelihoods, packed, targets_of
from xrunner.ops.sampling import NOT_FINITE, sample_shards, unless_finite, with_fixed
from xrunner.query import Sampling


def next_tokens(model: Model, hidden: Tensor, choices: Sequence[Sampling],
                positions: Sequence[int]) -> Tensor | None:
    """hidden [n, H]: of each query the row that predicts its next token. Returns tokens [n] int64,
    or with what is told of them (xrunner.ops.likelihoods.packed); None on all but the first rank of
    a tensor-parallel group."""
    scores, shard, vocab_size = model.scores(hidden), model.shard, model.spec.vocab_size
    rows = [row for row, choice in enumerate(choices) if choice.top_logprobs is not None]
    if rows:
        scores = WholeScores(scores.of(range(len(hidden))))  # computed once for both
    tokens = sample_shards(scores, choices, positions, shard, vocab_size)
    if tokens is not None:
        tokens = unless_finite(with_fixed(tokens, choices, positions), hidden)
    if not rows:
        return tokens
    tops = [choices[row].top_logprobs or 0 for row in rows]
    most = max(tops)
    chosen = targets_of(tokens, len(choices), shard, hidden.device)
    values = likelihoods(scores, rows, chosen[rows], most, shard, vocab_size)
    if tokens is None or values is None:
        return None
    told: list[Tensor | None] = [None] * len(choices)
    for row, top, value in zip(rows, tops, values, strict=True):
        told[row] = value[None, [0, *range(1, 1 + top), *range(1 + most, 1 + most + top)]]
    return packed(tokens, told)


def scored_tokens(model: Model, hidden: Tensor, choices: Sequence[Sampling]) -> Tensor | None:
    """hidden [T, H]: of each query in turn the rows that predict its targets. Returns the likeliest
    token after each input, with the log-likelihood of every target and the likeliest token in its
    place; None on all but the first rank of a tensor-parallel group."""
    counts = [len(choice.targets) for choice in choices]
    assert all(counts) and sum(counts) == len(hidden), f"{counts = } {hidden.shape = }"
    targets = torch.tensor([token for choice in choices for token in choice.targets])
    values = likelihoods(model.scores(hidden), range(len(targets)), targets, 1, model.shard,
                         model.spec.vocab_size)
    if values is None:
        return None
    told = list(torch.split(values, counts))
    tokens = torch.tensor([
        int(own[-1, 1]) if bool(rows.isfinite().all()) else NOT_FINITE
        for own, rows in zip(told, torch.split(hidden, counts), strict=True)])
    return packed(tokens, list(told))


def embeddings(model: StageModel, hidden: Tensor, pooled: str,
               lengths: Sequence[int]) -> Tensor | None:
    """hidden: of each query in turn all its `lengths` rows [T, H] where the mean is asked for, else
    the last [n, H]. Returns a token of each, with the mean or the last of its last hidden states;
    None on all but the first rank of a tensor-parallel group."""
    if model.shard.index:
        return None
    rows = model.normed(hidden).float()
    if pooled == "mean":
        rows = torch.stack([own.mean(dim=0) for own in torch.split(rows, list(lengths))])
    tokens = unless_finite(torch.zeros(len(rows), dtype=torch.long), rows)
    return packed(tokens, list(rows))
