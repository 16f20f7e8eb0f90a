"""Next tokens from logits: greedy, or drawn with a per-query seed.

A draw depends only on (seed, position) of its own query, never on the batch it happens to be in:
the same seed gives the same text whatever the schedule.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from xrunner.models.shard import Shard
from xrunner.ops.head import BestTokens, Scores
from xrunner.query import Sampling

NOT_FINITE = -1  # in a token's place: its logits are no numbers, or infinite

_MASK64 = (1 << 64) - 1


def sample(scores: Scores, choices: Sequence[Sampling], positions: Sequence[int]) -> Tensor:
    """One Sampling and one position (tokens before this one) for each of n rows -> tokens [n], of
    which NOT_FINITE is none."""
    greedy, drawn = _parted(choices, positions)
    if not drawn:
        return _likeliest(*scores.best(greedy))
    logits = scores.of(drawn)
    tokens = torch.empty(len(choices), dtype=torch.long, device=logits.device)
    if greedy:
        tokens[greedy] = _likeliest(*scores.best(greedy))
    logits = _ruled(logits, drawn, choices, positions, first_token=0)
    for row, row_logits in zip(drawn, logits, strict=True):
        tokens[row] = _draw(row_logits, choices[row], positions[row])
    return tokens


def _parted(choices: Sequence[Sampling], positions: Sequence[int]) -> tuple[list[int], list[int]]:
    """The rows whose largest logit is all that counts, and those that are drawn, or of whose
    tokens some are barred, or made less likely."""
    assert len(choices) == len(positions), f"{len(choices) = } {len(positions) = }"
    is_whole = [choice.is_drawn or choice.is_barred(position) or choice.is_penalised
                for choice, position in zip(choices, positions, strict=True)]
    rows = range(len(choices))
    return [row for row in rows if not is_whole[row]], [row for row in rows if is_whole[row]]


def _ruled(logits: Tensor, rows: Sequence[int], choices: Sequence[Sampling],
           positions: Sequence[int], first_token: int) -> Tensor:
    """logits [rows, V_local] of the tokens from `first_token` on, in float32, as the queries' own
    rules have them: of those that were said less likely, as transformers does it; barred, -inf."""
    logits = logits.float()
    penalised = [place for place, row in enumerate(rows) if choices[row].is_penalised]
    if penalised:
        logits = logits.clone()
    for place in penalised:
        choice = choices[rows[place]]
        said = [token - first_token for token in choice.said
                if 0 <= token - first_token < logits.shape[1]]
        values, penalty = logits[place, said], choice.repetition_penalty
        logits[place, said] = torch.where(values < 0, values * penalty, values / penalty)
    return _without_barred(logits, rows, choices, positions, first_token)


def _without_barred(logits: Tensor, rows: Sequence[int], choices: Sequence[Sampling],
                    positions: Sequence[int], first_token: int) -> Tensor:
    """logits [rows, V_local] of the tokens from `first_token` on, -inf where one is barred."""
    own = [(place, token - first_token) for place, row in enumerate(rows)
           if choices[row].is_barred(positions[row]) for token in choices[row].barred
           if 0 <= token - first_token < logits.shape[1]]
    if not own:
        return logits
    logits = logits.clone()
    places, tokens = (list(part) for part in zip(*own, strict=True))
    logits[places, tokens] = float("-inf")
    return logits


def sample_shards(scores: Scores, choices: Sequence[Sampling], positions: Sequence[int],
                  shard: Shard, vocab_size: int) -> Tensor | None:
    """As `sample`, of scores of every rank's share of the vocabulary: the tokens on the first rank
    of the group, None on the others.

    Each rank sends its best candidate of each greedy row (the first rank's wins a tie, as the
    lowest token does on one rank), and of rows that are drawn as many as top-k can keep.
    """
    if shard.degree == 1:
        return sample(scores, choices, positions)
    greedy, drawn = _parted(choices, positions)
    first, share = shard.index * shard.vocabulary_share(vocab_size), shard.vocabulary_share(
        vocab_size)
    most = max((min(_kept(choices[row]) or share, share) for row in drawn), default=0)
    best = shard.gather(_best(scores.best(greedy), first)) if greedy else None
    kept = shard.gather(_candidates(_ruled(
        scores.of(drawn), drawn, choices, positions, first), most, first)) if drawn else None
    if shard.index:
        return None
    received = kept if best is None else best
    assert received is not None, "a step without rows"
    tokens = torch.empty(len(choices), dtype=torch.long, device=received.device)
    if best is not None:
        values, candidates = _merged(best)
        largest = values.max(dim=-1, keepdim=True)
        tokens[greedy] = _likeliest(largest.values[:, 0],
                                    candidates.gather(1, largest.indices)[:, 0])
    if kept is not None:
        for row, row_values, row_tokens in zip(drawn, *_merged(kept), strict=True):
            place = _draw(row_values, choices[row], positions[row])
            tokens[row] = NOT_FINITE if place == NOT_FINITE else row_tokens[place]
    return tokens


def with_fixed(tokens: Tensor, choices: Sequence[Sampling], positions: Sequence[int]) -> Tensor:
    """The `tokens` [n] that were sampled, but where one is given."""
    for row, (choice, position) in enumerate(zip(choices, positions, strict=True)):
        if choice.fixed and (given := choice.fixed_at(position)) is not None:
            tokens[row] = given
    return tokens


def unless_finite(tokens: Tensor, hidden: Tensor) -> Tensor:
    """The `tokens` [n] sampled from `hidden` [n, H], NOT_FINITE where a row of that is not: the
    largest of its logits may look like a number all the same."""
    # 0 times what is no number, or infinite, is no number: quicker than asking of each value, and
    # nobody waits for a GPU's answer
    is_none = (hidden * 0).sum(dim=1).isnan()
    return tokens.masked_fill(is_none.to(tokens.device), NOT_FINITE)


def _likeliest(logits: Tensor, tokens: Tensor) -> Tensor:
    """`tokens` [n] whose `logits` are the largest of their rows."""
    return tokens.masked_fill(~logits.isfinite(), NOT_FINITE)


def _best(best: BestTokens, first_token: int) -> Tensor:
    """[2, n, 1]: the largest of each row and its token."""
    return torch.stack([best.logits, (best.tokens + first_token).float()])[:, :, None]


def _candidates(logits: Tensor, count: int, first_token: int) -> Tensor:
    """logits [n, V_local] -> [2, n, count]: the largest of each row and their tokens, -inf where
    there are fewer. As float32, which holds every token of a vocabulary exactly."""
    out = torch.zeros((2, len(logits), count), dtype=torch.float32, device=logits.device)
    out[0] = float("-inf")
    held = min(count, logits.shape[1])
    if held:
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


def _kept(choice: Sampling) -> int | None:
    """How many of the likeliest tokens count; None: all."""
    return choice.top_k if choice.is_drawn else 1


def _draw(logits: Tensor, choice: Sampling, position: int) -> int:
    """Inverse-CDF draw over the tokens kept by top-k, then top-p, in order of probability; the
    likeliest of who is greedy."""
    if not choice.is_drawn:
        largest = logits.max(dim=-1)
        return int(largest.indices) if largest.values.isfinite() else NOT_FINITE
    kept = choice.top_k or logits.numel()
    values, tokens = torch.topk(logits / choice.temperature, min(kept, logits.numel()))
    if not values[0].isfinite():  # what is no number comes first
        return NOT_FINITE
    probabilities = torch.softmax(values, dim=-1).double().cpu().numpy()
    cumulative = np.cumsum(probabilities)
    if choice.top_p < 1:
        # the smallest set whose probability reaches top_p; at least one token
        count = int(np.searchsorted(cumulative, choice.top_p * cumulative[-1])) + 1
        cumulative = cumulative[:count]
    picked = int(np.searchsorted(cumulative, uniform(choice.seed, position) * cumulative[-1],
                                 side="right"))
    return int(tokens[min(picked, len(cumulative) - 1)])
