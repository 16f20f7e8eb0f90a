"""Next tokens from logits: greedy, or drawn with a seed per request. A draw depends only on (seed,
position) of its own request, never on its batch: the same seed gives the same text under any
schedule."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from xrunner.devices import on_device
from xrunner.models.weights import Shard
from xrunner.ops.output_head import BestTokens, Scores
from xrunner.query import Sampling

NOT_FINITE = -1  # instead of a token whose logits are not finite

_MASK64 = (1 << 64) - 1
_VALUES_AT_A_TIME = 1 << 22  # chosen: logits drawn at a time, 32 MB as float64


def sample(scores: Scores, choices: Sequence[Sampling], positions: Sequence[int]) -> Tensor:
    """Tokens [n], one per row; NOT_FINITE stands for none. `positions`: tokens before each
    row's."""
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
    """Indices of rows that need only their largest logit, and of the others. The others are drawn,
    or some of their tokens are barred, penalised or not allowed by a form, which `Scores.best` does
    not know."""
    assert len(choices) == len(positions), f"{len(choices) = } {len(positions) = }"
    is_whole = [choice.is_drawn or choice.is_barred(position) or choice.is_penalised
                or bool(choice.allowed)
                for choice, position in zip(choices, positions, strict=True)]
    rows = range(len(choices))
    return [row for row in rows if not is_whole[row]], [row for row in rows if is_whole[row]]


def _ruled(logits: Tensor, rows: Sequence[int], choices: Sequence[Sampling],
           positions: Sequence[int], first_token: int) -> Tensor:
    """Logits [rows, V_local] in float32 after each request's own rules. `first_token`: of this
    share of the vocabulary. Tokens that occurred are penalised as in transformers; barred ones, and
    those that a form does not allow, get -inf."""
    logits = logits.float()
    penalised = [place for place, row in enumerate(rows) if choices[row].is_penalised]
    if penalised:
        logits = logits.clone()
    for place in penalised:
        choice = choices[rows[place]]
        occurred = [token - first_token for token in choice.history
                if 0 <= token - first_token < logits.shape[1]]
        at, penalty = on_device(occurred, logits.device), choice.repetition_penalty
        values = logits[place, at]
        logits[place, at] = torch.where(values < 0, values * penalty, values / penalty)
    logits = _without_barred(logits, rows, choices, positions, first_token)
    return _allowed_alone(logits, [choices[row].allowed for row in rows], first_token)


def _allowed_alone(logits: Tensor, masks: Sequence[bytes], first_token: int) -> Tensor:
    """Logits [rows, V_local] with -inf where a row's bit mask lacks the token. `masks`: b"" allows
    all. `first_token`: of this share of the vocabulary."""
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
    """Logits [rows, V_local] with -inf where a token is barred. `first_token`: of this share."""
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
    """Tokens [n] as `sample`, from every rank's share of the vocabulary; on the group's first rank.
    None on the others. Each rank sends its best candidate of each greedy row, and of drawn rows as
    many as top-k can keep. The first rank wins a tie, as the lowest token does on one rank."""
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
    """The sampled tokens [n], replaced where a token is fixed."""
    for row, (choice, position) in enumerate(zip(choices, positions, strict=True)):
        if choice.fixed and (given := choice.fixed_at(position)) is not None:
            tokens[row] = given
    return tokens


def unless_finite(tokens: Tensor, hidden: Tensor) -> Tensor:
    """The tokens [n] sampled from hidden [n, H], NOT_FINITE where a row of hidden is not finite.
    The largest of such a row's logits may still look like a number."""
    # 0 times NaN or infinity is NaN: faster than testing each value, and without waiting for a GPU
    is_none = (hidden * 0).sum(dim=1).isnan()
    return tokens.masked_fill(is_none.to(tokens.device), NOT_FINITE)


def _likeliest(logits: Tensor, tokens: Tensor) -> Tensor:
    """The tokens [n], NOT_FINITE where their logits are not finite."""
    return tokens.masked_fill(~logits.isfinite(), NOT_FINITE)


def _best(best: BestTokens, first_token: int) -> Tensor:
    """Largest logit of each row and its token, [2, n, 1]."""
    return torch.stack([best.logits, (best.tokens + first_token).float()])[:, :, None]


def _candidates(logits: Tensor, count: int, first_token: int) -> Tensor:
    """The `count` largest logits of each row and their tokens, [2, n, count] float32. -inf where
    there are fewer. float32 holds every token of a vocabulary exactly."""
    out = torch.zeros((2, len(logits), count), dtype=torch.float32, device=logits.device)
    out[0] = float("-inf")
    held = min(count, logits.shape[1])
    if held:
        values, tokens = _largest(logits, held)
        out[0, :, :held], out[1, :, :held] = values, tokens + first_token
    return out


def _largest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest logits of each row [n, V] float32, and their indices. The lower index
    comes first among equal ones; NaN comes before all."""
    width = logits.shape[1]
    if logits.device.type == "cpu" and count < width:  # a GPU would have to be waited for
        values, places = torch.topk(logits, count + 1)
        if not (values[:, 1:] == values[:, :-1]).any():
            return values[:, :count], places[:, :count]
    # topk orders equal values arbitrarily, and differently for another count. In whole numbers,
    # value above index, no two are equal.
    bits = torch.where(logits.isnan(), torch.nan, logits + 0.0).view(torch.int32).long()
    rising = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # in the order of the values
    falling = torch.arange(width - 1, -1, -1, device=logits.device)
    keys = torch.topk((rising << 32) + falling, count).values
    places = width - 1 - (keys & 0xFFFFFFFF)
    return logits.gather(1, places), places


def _merged(parts: Tensor) -> tuple[Tensor, Tensor]:
    """Values and tokens, each [n, ranks * count], of parts [ranks, 2, n, count]."""
    values, tokens = parts.permute(1, 2, 0, 3).flatten(2)
    return values, tokens.long()


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on (seed, position) alone (splitmix64 of the pair)."""
    state = seed * 0x9E3779B97F4A7C15 + position * 0xD1B54A32D192ED03 + 0x8CB92BA72F3D8DD7
    state &= _MASK64
    for multiplier in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):
        state = ((state ^ (state >> 30)) * multiplier) & _MASK64
    return ((state ^ (state >> 31)) >> 11) / (1 << 53)


def _kept(choice: Sampling) -> int | None:
    """Number of likeliest tokens to keep; None for all."""
    return choice.top_k if choice.is_drawn else 1


def _drawn(logits: Tensor, rows: Sequence[int], choices: Sequence[Sampling],
           positions: Sequence[int]) -> Tensor:
    """Index of each row's drawn token in logits [rows, V], [rows]; NOT_FINITE where there is none.
    All rows' settings go to the device in one transfer, without waiting."""
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
    """Inverse-CDF draws over the tokens kept by top-k, then top-p, in order of probability.

    `asked`: [4, n] float64, temperature, top-p, a number in [0, 1) and top-k of each row, at most
    `most`. A row's result depends on that row alone: the lowest of equal tokens is first for any
    `most`, and sums start at its first token and end with zeros."""
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
    # NaN comes first
    return chosen.masked_fill(~values[:, 0].isfinite(), NOT_FINITE)
