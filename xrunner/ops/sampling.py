"""Next tokens from logits: greedy, or drawn with a per-query seed.

A draw depends only on (seed, position) of its own query, never on the batch it happens to be in:
the same seed gives the same text whatever the schedule.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from xrunner.devices import on_device
from xrunner.models.weights import Shard
from xrunner.ops.output_head import BestTokens, Scores
from xrunner.query import Sampling

NOT_FINITE = -1  # in a token's place: its logits are no numbers, or infinite

_MASK64 = (1 << 64) - 1
_VALUES_AT_A_TIME = 1 << 22  # of rows that are drawn: as float64 32 MB


def sample(scores: Scores, choices: Sequence[Sampling], positions: Sequence[int]) -> Tensor:
    """One Sampling and one position (tokens before this one) for each of n rows -> tokens [n], of
    which NOT_FINITE is none."""
    greedy, drawn = _parted(choices, positions)
    if not drawn:
        return _likeliest(*scores.best(greedy))
    logits = scores.of(drawn)
    tokens = torch.empty(len(choices), dtype=torch.long, device=logits.device)
    if greedy:
        tokens[on_device(greedy, tokens.device)] = _likeliest(*scores.best(greedy))
    logits = _ruled(logits, drawn, choices, positions, first_token=0)
    tokens[on_device(drawn, tokens.device)] = _drawn(logits, drawn, choices, positions)
    return tokens


def _parted(choices: Sequence[Sampling], positions: Sequence[int]) -> tuple[list[int], list[int]]:
    """The rows whose largest logit is all that counts, and those that are drawn, or of whose
    tokens some are barred, or made less likely. Rows held to a form are of the latter: the head's
    own search for the largest knows no mask."""
    assert len(choices) == len(positions), f"{len(choices) = } {len(positions) = }"
    is_whole = [choice.is_drawn or choice.is_barred(position) or choice.is_penalised
                or bool(choice.allowed)
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
        at, penalty = on_device(said, logits.device), choice.repetition_penalty
        values = logits[place, at]
        logits[place, at] = torch.where(values < 0, values * penalty, values / penalty)
    logits = _without_barred(logits, rows, choices, positions, first_token)
    return _allowed_alone(logits, [choices[row].allowed for row in rows], first_token)


def _allowed_alone(logits: Tensor, masks: Sequence[bytes], first_token: int) -> Tensor:
    """Sets logits [rows, V_local] of tokens from `first_token` on to -inf, where a row's mask has
    no bit. A mask b"" leaves the row as it is."""
    own = [place for place, mask in enumerate(masks) if mask]
    if not own:
        return logits
    held = np.frombuffer(b"".join(masks[place] for place in own), np.uint8)
    packed = ~held.reshape(len(own), -1)
    if logits.device.type == "cpu":  # 50 times as quick as torch's shifts
        barred = torch.from_numpy(np.unpackbits(packed, axis=1, bitorder="little").view(np.bool_))
    else:  # an eighth of the bytes goes to the device
        shifts = torch.arange(8, dtype=torch.uint8, device=logits.device)
        bits = on_device(torch.from_numpy(packed), logits.device)[:, :, None] >> shifts & 1
        barred = bits.flatten(1).bool()
    barred = barred[:, first_token:first_token + logits.shape[1]]
    if len(own) == len(masks):
        return logits.masked_fill(barred, float("-inf"))
    places, logits = on_device(own, logits.device), logits.clone()
    logits[places] = logits[places].masked_fill(barred, float("-inf"))
    return logits


def _without_barred(logits: Tensor, rows: Sequence[int], choices: Sequence[Sampling],
                    positions: Sequence[int], first_token: int) -> Tensor:
    """logits [rows, V_local] of the tokens from `first_token` on, -inf where one is barred."""
    own = [(place, token - first_token) for place, row in enumerate(rows)
           if choices[row].is_barred(positions[row]) for token in choices[row].barred
           if 0 <= token - first_token < logits.shape[1]]
    if not own:
        return logits
    logits = logits.clone()
    places, tokens = on_device([[*part] for part in zip(*own, strict=True)], logits.device)
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
        tokens[on_device(greedy, tokens.device)] = _likeliest(
            largest.values[:, 0], candidates.gather(1, largest.indices)[:, 0])
    if kept is not None:
        values, candidates = _merged(kept)
        places = _drawn(values, drawn, choices, positions)
        tokens[on_device(drawn, tokens.device)] = candidates.gather(
            1, places.clamp(min=0)[:, None])[:, 0].masked_fill(places < 0, NOT_FINITE)
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
        values, tokens = _largest(logits, held)
        out[0, :, :held], out[1, :, :held] = values, tokens + first_token
    return out


def _largest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest logits of each row [n, V] float32, and their places, of equal ones the
    first first; what is no number comes before all."""
    width = logits.shape[1]
    if logits.device.type == "cpu" and count < width:  # a GPU would be waited for
        values, places = torch.topk(logits, count + 1)
        if not (values[:, 1:] == values[:, :-1]).any():
            return values[:, :count], places[:, :count]
    # Of equal ones topk gives any, in any order, and others for another count. Of whole numbers,
    # the value above the place, no two are equal.
    bits = torch.where(logits.isnan(), torch.nan, logits + 0.0).view(torch.int32).long()
    rising = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # in the order of the values
    falling = torch.arange(width - 1, -1, -1, device=logits.device)
    keys = torch.topk((rising << 32) + falling, count).values
    places = width - 1 - (keys & 0xFFFFFFFF)
    return logits.gather(1, places), places


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


def _drawn(logits: Tensor, rows: Sequence[int], choices: Sequence[Sampling],
           positions: Sequence[int]) -> Tensor:
    """logits [rows, V] -> the place of each row's token [rows], NOT_FINITE where it has none. What
    the rows ask for goes to the device at once, and nobody waits for an answer."""
    width = logits.shape[1]
    kept = [min(_kept(choices[row]) or width, width) for row in rows]
    asked = torch.tensor([
        [choices[row].temperature if choices[row].is_drawn else 1.0 for row in rows],
        [choices[row].top_p for row in rows],
        [uniform(choices[row].seed, positions[row]) for row in rows], kept], dtype=torch.float64)
    numbers = on_device(asked, logits.device)
    most = max(kept)
    size = max(_VALUES_AT_A_TIME // width, 1)
    return torch.cat([_drawn_part(logits[first:first + size], numbers[:, first:first + size], most)
                      for first in range(0, len(rows), size)])


def _drawn_part(logits: Tensor, asked: Tensor, most: int) -> Tensor:
    """Inverse-CDF draws over the tokens kept by top-k, then top-p, in order of probability; the
    likeliest where one is kept. `asked` [4, n] float64: temperature, top-p, a number in [0, 1) and
    top-k of each row, at most `most`. What a row gives depends on the row alone, whatever is
    beside it: of equal logits the lowest token is first, however many are asked for; and sums go
    from its first token on, past its last one with zeros."""
    temperature, top_p, number, kept = asked[..., None]
    values, tokens = _largest(logits, most)
    values = values / temperature.float()
    is_kept = torch.arange(most, device=logits.device) < kept
    weights = (values - values[:, :1]).double().exp().masked_fill(~is_kept, 0)
    cumulative = weights.cumsum(dim=1)
    # the smallest set whose probability reaches top_p; at least one token
    last = (cumulative < top_p * cumulative[:, -1:]).sum(dim=1, keepdim=True).clamp(max=most - 1)
    picked = (cumulative <= number * cumulative.gather(1, last)).sum(dim=1, keepdim=True)
    chosen = tokens.gather(1, torch.minimum(picked, last))[:, 0]
    # what is no number comes first
    return chosen.masked_fill(~values[:, 0].isfinite(), NOT_FINITE)
