"""What the last stage gives of a step: a token of each query, chosen from its logits, and what is
told of it; or, of queries that are scored, how likely the model finds their targets; or, of those
that are embedded, their embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from xrunner.devices import on_device
from xrunner.engine.group import Model, StageGroup
from xrunner.models.stage_model import StageModel
from xrunner.ops.likelihoods import likelihoods, packed, targets_of
from xrunner.ops.output_head import WholeScores
from xrunner.ops.sampling import NOT_FINITE, sample_shards, unless_finite, with_fixed
from xrunner.query import Sampling


def tokens_of_slots(model: Model, group: StageGroup, hidden: Tensor, slots: Sequence[int],
                    positions: Sequence[int]) -> Tensor | None:
    """hidden [n, H]: of the query in each of these slots of the group the row that predicts its
    next token. Returns what `next_tokens` does."""
    seats = [group.slots.seats[slot] for slot in slots]
    choices = [seat.sampling for seat in seats]
    if not any(choice.minds_said for choice in choices):
        return next_tokens(model, hidden, choices, positions)
    spoken = group.spoken
    tokens = next_tokens(model, hidden, spoken.minding(seats, positions), positions)
    # every rank of a tensor-parallel group minds the tokens of its share of the vocabulary
    chosen = targets_of(None if tokens is None else tokens[:len(seats)], len(seats),
                        model.shard, hidden.device)
    spoken.take(seats, chosen.long().tolist())
    spoken.keep(group.slots.seats)
    return tokens


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
    values = likelihoods(scores, rows, chosen[on_device(rows, chosen.device)], most, shard,
                         vocab_size)
    if tokens is None or values is None:
        return None
    told: list[Tensor | None] = [None] * len(choices)
    for row, top, value in zip(rows, tops, values, strict=True):
        told[row] = torch.cat([value[:1 + top], value[1 + most:1 + most + top]])[None]
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
    ends = on_device([*accumulate(counts)], values.device) - 1
    # rows that are no numbers, up to each query's end, and among its own
    bad = on_device((~hidden.isfinite()).any(dim=1), values.device).cumsum(dim=0)[ends]
    is_none = bad.diff(prepend=bad.new_zeros(1)) > 0
    tokens = values[ends, 1].long().masked_fill(is_none, NOT_FINITE)
    return packed(tokens, torch.split(values, counts))


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
    tokens = unless_finite(torch.zeros(len(rows), dtype=torch.long, device=rows.device), rows)
    return packed(tokens, list(rows))
