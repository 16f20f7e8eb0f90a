"""Attention over a cache and over packed inputs: every implementation does what a softmax over each
token's own entries, in float64, does."""

from itertools import accumulate, product
from typing import NamedTuple

import pytest
import torch
from examples import examples, some
from hypothesis import given
from hypothesis import strategies as st
from implementations import IMPLEMENTATIONS, TOLERANCE, Implementation, num_threads
from torch import Tensor

from xrunner.ops.attention import Scoring, decode_attention, encode_attention, packed_attention
from xrunner.ops.contexts import BlockTable, DistanceBias, decode_context, encode_context
from xrunner.rules.slots import Span

DIMS = [1, 3, 8, 15, 16, 17, 32, 33, 48, 64, 80, 128, 130, 256]
DTYPES = [torch.float32, torch.bfloat16]
# of queries and of the cache: float16 is a GPU's
TYPES = [*product(DTYPES, DTYPES), (torch.float16, torch.float16)]
# beyond a query's length: finite, as torch's mask multiplies it by 0
GARBAGE = {torch.float32: 1e30, torch.bfloat16: 1e30, torch.float16: 100.0}
every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=str)
many = examples(50)


class Shape(NamedTuple):
    """What a case draws besides lengths. `group`: heads of a KV head."""

    types: tuple[torch.dtype, torch.dtype]
    kv_heads: int
    group: int
    dim: int
    scale: float | None
    threads: int
    seed: int

    @property
    def dtype(self) -> torch.dtype:
        return self.types[0]

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    def normal(self, *shape: int) -> Tensor:
        """Of the type, the same for the same seed and shape."""
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randn(shape, generator=generator).to(self.dtype)


shapes = st.builds(
    Shape, st.sampled_from(TYPES), st.integers(1, 3), st.sampled_from([*range(1, 10), 17]),
    st.sampled_from(DIMS), st.sampled_from([None, 1.0, 0.3]), st.integers(1, 5),
    st.integers(0, 2**31))


# of the last entries alone, and with capped scores
kinds = st.builds(Scoring, window=st.sampled_from([None, None, 1, 5, 24]),
                  cap=st.sampled_from([None, None, 0.7, 1.5]))


def scoring_of(shape: Shape, kind: Scoring) -> Scoring:
    return kind._replace(scale=shape.scale, cap=kind.cap if shape.dtype == torch.float32 else None)


def softmax_attention(query: Tensor, keys: Tensor, values: Tensor, scoring: Scoring,
                      added: Tensor | None = None, first: int | None = None) -> Tensor:
    """query [t, h, d], keys and values [s, k, d], added [h, t, s] -> [t, h * d], in float64.
    `first`: the place of the first token, which attends to what came before it."""
    tokens, heads, dim = query.shape
    repeated = [part.double().repeat_interleave(heads // part.shape[1], dim=1)
                for part in (keys, values)]
    scores = torch.einsum("thd,shd->hts", query.double(), repeated[0])
    scores = scores * (dim ** -0.5 if scoring.scale is None else scoring.scale)
    if scoring.cap is not None:
        scores = scoring.cap * torch.tanh(scores / scoring.cap)
    if added is not None:
        scores = scores + added
    if first is not None:
        ago = torch.arange(first, first + tokens)[:, None] - torch.arange(len(keys))[None, :]
        scores = scores.masked_fill(
            (ago < 0) | (ago >= (scoring.window or len(keys))), float("-inf"))
    return torch.einsum("hts,shd->thd", scores.softmax(-1), repeated[1]).reshape(tokens, -1)


def assert_near(got: Tensor, expected: Tensor, shape: Shape) -> None:
    """Rounding of a score grows with it: unscaled ones of 256 products spread over 16."""
    spread = 1.0 if shape.scale is None else shape.scale * shape.dim**0.5
    assert got.shape == expected.shape and got.dtype == shape.dtype
    assert torch.isfinite(got).all()
    off = (got.double() - expected).abs().max() if got.numel() else 0.0
    assert off <= TOLERANCE[shape.dtype] * max(4.0, spread), f"{off = }"


def cache_of(shape: Shape, slots: int, capacity: int) -> tuple[Tensor, Tensor]:
    drawn = shape.normal(2, slots, shape.kv_heads, capacity, shape.dim).to(shape.types[1])
    return drawn[0].contiguous(), drawn[1].contiguous()


def entries(cache: tuple[Tensor, Tensor], slot: int, length: int) -> list[Tensor]:
    """A slot's first keys and values, each [length, k, d]."""
    return [part[slot, :, :length].transpose(0, 1).clone() for part in cache]


def in_blocks(cache: tuple[Tensor, Tensor], lengths: dict[int, int], size: int,
              seed: int) -> tuple[tuple[Tensor, Tensor], BlockTable]:
    """The first `lengths` entries of each slot in blocks of that size, in any order; whatever no
    query reads is no number, and what a table says of blocks beyond a length is nothing."""
    slots, most = len(cache[0]), -(-cache[0].shape[2] // size)
    order = torch.randperm(slots * most + 3, generator=torch.Generator().manual_seed(seed))
    table, parts = torch.full((slots, most), -7), []
    for slot, length in lengths.items():
        count = -(-length // size)
        table[slot, :count] = order[slot * most:slot * most + count]
    for part in cache:
        paged = part.new_full((len(order), part.shape[1], size, part.shape[3]), float("nan"))
        for slot, length in lengths.items():
            for at in range(0, length, size):
                here = part[slot, :, at:min(at + size, length)]
                paged[table[slot, at // size], :, :here.shape[1]] = here
        parts.append(paged)
    return (parts[0], parts[1]), BlockTable(table, size)


def there(implementation: Implementation, cache: tuple[Tensor, Tensor], table: BlockTable | None
          ) -> tuple[tuple[Tensor, Tensor], BlockTable | None]:
    """On its device."""
    device = implementation.device
    return (cache[0].to(device), cache[1].to(device)), (
        None if table is None else table._replace(blocks=table.blocks.to(device)))


block_sizes = st.sampled_from([None, None, 16, 32, 64, 128, 256])


def bias_of(shape: Shape, longest: int, both_ways: bool) -> DistanceBias:
    width = 2 * longest - 1 if both_ways else longest
    table = shape._replace(types=TYPES[0]).normal(shape.heads, width)
    return DistanceBias(table.to(shape.dtype).float(), longest - 1)


@st.composite
def decode_cases(draw: st.DrawFn) -> tuple[Shape, int, list[int], list[int]]:
    """Shape, capacity, slots in rising order, lengths."""
    capacity = draw(st.sampled_from([1, 7, 40, 64, 65, 200, 700]))
    slots = sorted(draw(st.sets(st.integers(0, 8), min_size=1, max_size=6)))
    lengths = [draw(st.integers(1, capacity)) for _ in slots]
    return draw(shapes), capacity, slots, lengths


@every_implementation
@many
@given(case=decode_cases(), has_bias=st.booleans(), size=block_sizes, kind=kinds)
def test_a_token_that_is_decoded_attends_to_its_own_query_alone(
        implementation, case, has_bias, size, kind):
    shape, capacity, slots, lengths = case
    keys, values = cache_of(shape, 9, capacity)
    # the rows of a product that has key and value behind the query
    joint = shape.normal(len(slots), shape.heads + 2 * shape.kv_heads, shape.dim)
    query = joint[:, :shape.heads]
    bias = bias_of(shape, max(lengths), both_ways=False) if has_bias else None
    scoring, expected = scoring_of(shape, Scoring() if has_bias else kind), []  # none has both
    for i, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
        added = None if bias is None else bias.values[:, None, bias.center - length + 1:].double()
        expected.append(softmax_attention(query[i:i + 1], *entries((keys, values), slot, length),
                                          scoring, added, length - 1))
        garbage = GARBAGE[shape.types[1]]
        keys[slot, :, length:], values[slot, :, length:] = garbage, -garbage
    cache, table = (keys, values), None
    if size is not None:
        cache, table = in_blocks(cache, dict(zip(slots, lengths, strict=True)), size, shape.seed)
    cache, table = there(implementation, cache, table)
    if bias is not None:
        bias = bias._replace(values=bias.values.to(implementation.device))
    with implementation.using(), num_threads(shape.threads):
        step = decode_context(lengths, slots, implementation.device, table)
        got = decode_attention(query.to(implementation.device), cache, step,
                               scoring, bias)
    assert_near(got.cpu(), torch.cat(expected), shape)


@st.composite
def spans(draw: st.DrawFn) -> tuple[Shape, int, list[Span]]:
    """Shape, capacity, spans of inputs, none of them twice."""
    capacity = draw(st.sampled_from([1, 7, 40, 64, 130]))
    slots = draw(st.lists(st.integers(0, 5), unique=True, max_size=4))
    found = []
    for slot in slots:
        first = draw(st.integers(0, capacity - 1))
        found.append(Span(slot, first, draw(st.integers(1, capacity - first)), True))
    return draw(shapes), capacity, found


@every_implementation
@many
@given(case=spans(), size=block_sizes, kind=kinds)
def test_a_token_that_is_encoded_attends_to_what_came_before_it(implementation, case, size, kind):
    shape, capacity, parts = case
    scoring, garbage = scoring_of(shape, kind), GARBAGE[shape.types[1]]
    keys, values = cache_of(shape, 6, capacity)
    total = sum(part.tokens for part in parts)
    query = shape.normal(total, shape.heads + 1, shape.dim)[:, :shape.heads]
    expected, start = [query.new_empty(0, shape.heads * shape.dim).double()], 0
    for slot, first, tokens, _ in parts:
        end = first + tokens
        expected.append(softmax_attention(
            query[start:start + tokens], *entries((keys, values), slot, end), scoring, None, first))
        keys[slot, :, end:], values[slot, :, end:] = garbage, -garbage
        start += tokens
    cache, table = (keys, values), None
    if size is not None:
        ends = {part.slot: part.first + part.tokens for part in parts}
        cache, table = in_blocks(cache, ends, size, shape.seed)
    cache, table = there(implementation, cache, table)
    with implementation.using(), num_threads(shape.threads):
        step = encode_context(parts, implementation.device, table)
        got = encode_attention(query.to(implementation.device), cache, step, scoring)
    assert_near(got.cpu(), torch.cat(expected), shape)


@every_implementation
@many
@given(shape=shapes, lengths=st.lists(st.integers(1, 70), max_size=4), has_bias=st.booleans())
def test_a_token_of_a_packed_input_attends_to_all_of_that_input(
        implementation, shape, lengths, has_bias):
    shape = shape._replace(group=1)
    joint = shape.normal(sum(lengths), 3 * shape.heads * shape.dim)
    query, key, value = joint.view(-1, 3, shape.heads, shape.dim).unbind(1)
    bias = bias_of(shape, max(lengths), both_ways=True) if has_bias and lengths else None
    expected = [query.new_empty(0, shape.heads * shape.dim).double()]
    for length, end in zip(lengths, accumulate(lengths), strict=True):
        here, at, added = slice(end - length, end), torch.arange(length), None
        if bias is not None:
            added = bias.values[:, at[None, :] - at[:, None] + bias.center].double()
        expected.append(softmax_attention(query[here], key[here], value[here],
                                          Scoring(shape.scale), added))
    with implementation.using(), num_threads(shape.threads):
        got = packed_attention(joint.to(implementation.device), shape.heads, lengths, shape.scale,
                               None if bias is None else bias._replace(
                                   values=bias.values.to(implementation.device)))
    assert_near(got.cpu(), torch.cat(expected), shape)


@every_implementation
@pytest.mark.parametrize(("types", "threads"), some(
    product(TYPES, [1, 2, 7]), lambda case: case[1] == 7 or case[0] in TYPES[::3] and case[1] == 2),
    ids=str)
def test_one_long_query_is_cut_among_threads(implementation, types, threads):
    shape = Shape(types, 1, 4, 64, None, threads, 5)
    keys, values = cache_of(shape, 2, 5000)
    keys[0, :, 3000] *= 3  # a maximum that one part alone sees
    query = shape.normal(2, 4, 64)
    expected = [softmax_attention(query[i:i + 1], *entries((keys, values), i, length), Scoring())
                for i, length in enumerate((4999, 3))]
    cache = (keys.to(implementation.device), values.to(implementation.device))
    with implementation.using(), num_threads(threads):
        step = decode_context([4999, 3], device=implementation.device)
        got = decode_attention(query.to(implementation.device), cache, step)
    assert_near(got.cpu(), torch.cat(expected), shape)


@every_implementation
def test_scores_far_apart_neither_overflow_nor_vanish(implementation):
    """Scores from -10,000 to 10,000 within one query: the largest alone is left."""
    keys = torch.linspace(-100, 100, 300).repeat_interleave(16).view(1, 1, 300, 16).contiguous()
    values = torch.arange(300.0).repeat_interleave(16).view(1, 1, 300, 16).contiguous()
    query = torch.full((1, 1, 16), 25.0)
    with implementation.using():
        for order in (torch.arange(300), torch.arange(299, -1, -1), torch.randperm(300)):
            cache = tuple(part[:, :, order].to(implementation.device) for part in (keys, values))
            step = decode_context([300], device=implementation.device)
            got = decode_attention(query.to(implementation.device), cache, step)
            assert torch.equal(got.cpu(), torch.full((1, 16), 299.0))
