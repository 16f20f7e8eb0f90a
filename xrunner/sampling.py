"""Next tokens from logits: greedy, or drawn with a per-query seed.

A draw depends only on (seed, position) of its own query, never on the batch it happens to be in:
the same seed gives the same text whatever the schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_GREEDY_BELOW = 1e-5  # logits divided by less overflow float32; the draw is the largest anyway
_MASK64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How one query's tokens are chosen. temperature 0: greedy."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0


def sample(logits: Tensor, choices: Sequence[Sampling], positions: Sequence[int]) -> Tensor:
    """logits [n, V], one Sampling and one position (tokens before this one) a row -> tokens [n]."""
    assert len(logits) == len(choices) == len(positions), f"{logits.shape = } {len(choices) = }"
    tokens = logits.argmax(dim=-1)
    drawn = [row for row, c in enumerate(choices) if c.temperature > _GREEDY_BELOW]
    for row in drawn:
        tokens[row] = _draw(logits[row].float(), choices[row], positions[row])
    return tokens


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
