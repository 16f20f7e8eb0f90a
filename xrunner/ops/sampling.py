"""Next tokens from logits: greedy, or drawn with a per-query seed.

A draw depends only on (seed, position) of its own query, never on the batch it happens to be in:
the same seed gives the same text whatever the schedule.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from xrunner.models.shard import Shard
from xrunner.query import Sampling

_MASK64 = (1 << 64) - 1


def sample(logits: Tensor, choices: Sequence[Sampling], positions: Sequence[int]) -> Tensor:
    """logits [n, V], one Sampling and one position (tokens before this one) a row -> tokens [n]."""
    assert len(logits) == len(choices) == len(positions), f"{logits.shape = } {len(choices) = }"
    tokens = logits.argmax(dim=-1)
    for row, choice in enumerate(choices):
        if choice.is_drawn:
            tokens[row] = _draw(logits[row].float(), choice, positions[row])
    return tokens


def sample_shards(logits: Tensor, choices: Sequence[Sampling], positions: Sequence[int],
                  shard: Shard, vocab_size: int) -> Tensor | None:
    """As `sample`, of logits [n, V_local] of each rank's share of the vocabulary: the tokens on the
    group's first rank, None on the others.

    Each rank sends its best candidate of each row (the first rank's wins a tie, as the lowest token
    does on one rank), and of rows that are drawn as many as top-k can keep.
    """
    if shard.degree == 1:
        return sample(logits, choices, positions)
    assert len(logits) == len(choices) == len(positions), f"{logits.shape = } {len(choices) = }"
    first, share = shard.index * shard.vocabulary_share(vocab_size), shard.vocabulary_share(
        vocab_size)
    best = shard.gather(_candidates(logits, 1, first))
    drawn = [row for row, choice in enumerate(choices) if choice.is_drawn]
    most = max((min(choices[row].top_k or share, share) for row in drawn), default=0)
    kept = shard.gather(_candidates(logits[drawn], most, first)) if drawn else None
    if best is None:
        return None
    values, candidates = _merged(best)
    tokens = candidates.gather(1, values.argmax(dim=-1, keepdim=True))[:, 0]
    if kept is not None:
        for row, row_values, row_tokens in zip(drawn, *_merged(kept), strict=True):
            tokens[row] = row_tokens[_draw(row_values, choices[row], positions[row])]
    return tokens


def _candidates(logits: Tensor, count: int, first_token: int) -> Tensor:
    """logits [n, V_local] -> [2, n, count]: the largest of each row and their tokens, -inf where
    there are fewer. As float32, which holds every token of a vocabulary exactly."""
    out = torch.zeros((2, len(logits), count), dtype=torch.float32, device=logits.device)
    out[0] = float("-inf")
    held = min(count, logits.shape[1])
    if held == 1:  # argmax names the first of equals, topk any
        tokens = logits.argmax(dim=-1, keepdim=True)
        out[0, :, :1], out[1, :, :1] = logits.gather(1, tokens), tokens + first_token
    elif held:
        values, tokens = torch.topk(logits, held)
        out[0, :, :held], out[1, :, :held] = values, tokens + first_token
    return out


def _merged(parts: Tensor) -> tuple[Tensor, Tensor]:
    """[ranks, 2, n, count] -> values and tokens, each [n, ranks * count]."""
    values, tokens = parts.permute(1, 2, 0, 3).flatten(2)
    return values, tokens.long()


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) from (seed, position) alone (splitmix64 of the pair)."""
    state = seed * 0x9E3779B97F4A7C15 + position * 0xD1B54A32D192ED03 + 0x8CB92BA72F3D8DD7
    state &= _MASK64
    for multiplier in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):
        state = ((state ^ (state >> 30)) * multiplier) & _MASK64
    return ((state ^ (state >> 31)) >> 11) / (1 << 53)


def _draw(logits: Tensor, choice: Sampling, position: int) -> int:
    """Inverse-CDF draw over the tokens kept by top-k, then top-p, in order of probability."""
    kept = choice.top_k or logits.numel()
    values, tokens = torch.topk(logits / choice.temperature, min(kept, logits.numel()))
    probabilities = torch.softmax(values, dim=-1).double().cpu().numpy()
    cumulative = np.cumsum(probabilities)
    if choice.top_p < 1:
        # the smallest set whose probability reaches top_p; at least one token
        count = int(np.searchsorted(cumulative, choice.top_p * cumulative[-1])) + 1
        cumulative = cumulative[:count]
    picked = int(np.searchsorted(cumulative, uniform(choice.seed, position) * cumulative[-1],
                                 side="right"))
    return int(tokens[min(picked, len(cumulative) - 1)])
