"""The passes over tokens' rows, and the largest logit of each: every implementation does what the
formula, in float64, does."""

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from implementations import DTYPES, IMPLEMENTATIONS, TOLERANCE, any_rows, num_threads
from torch import Tensor
from torch.nn import functional as F

from xrunner.ops import output_head as head_module
from xrunner.ops.contexts import Places
from xrunner.ops.output_head import (
    BestTokens,
    HeadScores,
    OutputHead,
    WholeScores,
    keep_best,
    no_tokens,
)
from xrunner.ops.rows import Residual, Rotation, layer_norm, rms_norm, rotate_and_store, silu_mul

every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=str)
many = examples(50)


def assert_near(got: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert got.shape == expected.shape and got.dtype == dtype
    scale = expected.abs().max().item() if expected.numel() else 0.0
    off = (got.double() - expected).abs().max().item() if got.numel() else 0.0
    assert off <= TOLERANCE[dtype] * max(scale, 1.0), f"{off = } {scale = }"


@every_implementation
@many
@given(case=any_rows, eps=st.sampled_from([1e-6, 1e-5, 1e-1]), adds=st.booleans())
def test_rms_norm(implementation, case, eps, adds):
    hidden, weight = case.normal(case.tokens, case.size) * 3, case.normal(case.size)
    device, stream, added = implementation.device, hidden.clone(), None
    if adds:
        added = case.normal(1, case.tokens, case.size)[0].contiguous()
        hidden = hidden + added
    scale = (hidden.double().square().mean(-1, keepdim=True) + eps).rsqrt()
    stream = stream.to(device)
    with implementation.using(), num_threads(case.threads):
        got = rms_norm(stream, weight.to(device), eps, None if added is None else added.to(device))
    assert torch.equal(stream.cpu(), hidden)
    assert_near(got.cpu(), hidden.double() * scale * weight.double(), case.dtype)


@every_implementation
@many
@given(case=any_rows, adds=st.booleans())
def test_layer_norm(implementation, case, adds):
    if 1 < case.size < 8:  # a few values may be nearly equal: all is rounding then
        case = case._replace(size=8)
    hidden = case.normal(case.tokens, case.size) * 3 + 2
    weight, bias = case.normal(case.size), case.normal(1, case.size)[0].contiguous()
    stream, added = hidden.clone().to(implementation.device), None
    if adds:
        added = case.normal(1, case.tokens, case.size)[0].contiguous()
        hidden = hidden + added
    off = hidden.double() - hidden.double().mean(-1, keepdim=True)
    scale = (off.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    device = implementation.device
    with implementation.using(), num_threads(case.threads):
        got = layer_norm(stream, weight.to(device), bias.to(device), 1e-5,
                         None if added is None else added.to(device))
    assert torch.equal(stream.cpu(), hidden)
    assert_near(got.cpu(), off * scale * weight.double() + bias.double(), case.dtype)


@every_implementation
@many
@given(case=any_rows, factor=st.sampled_from([1.0, 40.0]))
def test_silu_mul(implementation, case, factor):
    """Gates up to +-160 or so: e to the minus gate is beyond float32 there."""
    joint = case.normal(case.tokens, 2 * case.size) * factor
    gate, up = joint.double().chunk(2, dim=-1)
    with implementation.using(), num_threads(case.threads):
        got = silu_mul(joint.to(implementation.device))
    assert_near(got.cpu(), gate / (1 + torch.exp(-gate)) * up, case.dtype)


@every_implementation
@many
@given(case=any_rows, heads=st.integers(1, 4), kv_heads=st.integers(1, 3), rotates=st.booleans(),
       kept=st.sampled_from(DTYPES))
def test_place_rotates_and_writes_where_it_is_told(implementation, case, heads, kv_heads, rotates,
                                                   kept):
    """`kept`: the type of the cache."""
    dim = min(case.size, 64) * (2 if rotates else 1)
    kept = case.dtype if case.dtype == torch.float16 else kept
    slots, capacity, device = 3, 29, implementation.device
    joint = case.normal(case.tokens, (heads + 2 * kv_heads) * dim)
    angles = case.normal(case.tokens, dim // 2, dtype=torch.float32)
    rotation = Rotation(angles.cos(), angles.sin()) if rotates else None
    where = torch.randperm(slots * capacity)[:case.tokens]
    places = Places(where // capacity, where % capacity)
    caches = [case.normal(slots, kv_heads, capacity, dim, dtype=kept) for _ in range(2)]
    split = joint.double().view(case.tokens, heads + 2 * kv_heads, dim)
    turned, value = split[:, :heads + kv_heads], split[:, heads + kv_heads:]
    if rotates:
        low, high = turned.chunk(2, dim=-1)
        cos, sin = angles.double().cos()[:, None], angles.double().sin()[:, None]
        turned = torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)
    expected = [cache.double() for cache in caches]
    expected[0][places.slots, :, places.positions] = turned[:, heads:]
    expected[1][places.slots, :, places.positions] = value.to(kept).double()
    there = [cache.to(device) for cache in caches]
    with implementation.using(), num_threads(case.threads):
        query = rotate_and_store(joint.to(device), heads, (there[0], there[1]),
                      Places(*(part.to(device) for part in places)),
                      rotation and Rotation(*(part.to(device) for part in rotation)))
    assert_near(query.cpu(), turned[:, :heads], case.dtype)
    near = min(kept, case.dtype, key=lambda dtype: dtype.itemsize)  # the coarser of the two
    assert_near(there[0].cpu().to(near), expected[0], near)
    assert there[0].dtype == kept
    assert torch.equal(there[1].cpu().double(), expected[1])


def test_products_are_added_once_by_the_norm_that_follows_or_by_the_next():
    start, parts, weight = torch.randn(5, 24), torch.randn(4, 5, 24), torch.randn(24)
    stream = Residual(start.clone())
    stream.add(parts[0])
    normed = stream.rms_norm(weight, 1e-5)
    torch.testing.assert_close(normed, F.rms_norm(start + parts[0], (24,), weight, 1e-5))
    torch.testing.assert_close(stream.rms_norm(weight, 1e-5), normed)
    stream.add(parts[1])
    stream.add(parts[2], lambda part: 3 * part)  # of a tensor-parallel group of equals
    expected = start + parts[0] + parts[1] + 3 * parts[2]
    torch.testing.assert_close(stream.layer_norm(weight, weight, 1e-5),
                               F.layer_norm(expected, (24,), weight, weight, 1e-5))
    stream.add(parts[3])
    torch.testing.assert_close(stream.total(), expected + parts[3])
    torch.testing.assert_close(stream.total(), expected + parts[3])


NAN, INF = float("nan"), float("inf")


@every_implementation
@examples(60)
@given(rows=st.integers(0, 5) | st.just(60), widths=st.lists(
    st.sampled_from([0, 1, 3, 15, 16, 17, 64, 100, 1024, 1025, 3000]), min_size=1, max_size=4),
    dtype=st.sampled_from(DTYPES), values=st.sampled_from([3, 1000]), threads=st.integers(1, 4),
    seed=st.integers(0, 2**31))
def test_the_largest_of_all_pieces_is_kept_and_the_first_of_equals(
        implementation, rows, widths, dtype, values, threads, seed):
    """Few different values: many are equal."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-values, values, (rows, sum(widths)), generator=generator).to(dtype)
    found = no_tokens(rows, implementation.device)
    with implementation.using(), num_threads(threads):
        first = 0
        for part in logits.split(widths, dim=1):
            found = keep_best(found, part.contiguous().to(implementation.device), first)
            first += part.shape[1]
    if not sum(widths):
        assert (found.logits == -INF).all() and (found.tokens == 0).all()
        return
    assert torch.equal(found.logits.cpu(), logits.float().amax(dim=1))
    assert torch.equal(found.tokens.cpu(), logits.float().argmax(dim=1))


@every_implementation
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_no_number_is_never_the_largest(implementation, dtype):
    rows = torch.full((4, 40), -7.0)
    rows[0, 3], rows[0, 20] = NAN, 2.0
    rows[1], rows[2], rows[3, 33] = NAN, -INF, INF
    with implementation.using():
        found = keep_best(no_tokens(4, implementation.device),
                          rows.to(dtype).to(implementation.device), 100)
    assert found.tokens.tolist() == [120, 0, 0, 133]
    assert found.logits.tolist() == [2.0, -INF, -INF, INF]


@pytest.mark.parametrize(("dtype", "held"), [(torch.float32, torch.float32),
                                             (torch.bfloat16, torch.bfloat16),
                                             (torch.bfloat16, torch.float32),
                                             (torch.float16, torch.float16)])
@pytest.mark.parametrize("vocabulary", [0, 5, 7, 20])
def test_a_head_in_pieces_is_the_whole_one(monkeypatch, vocabulary, dtype, held):
    monkeypatch.setattr(head_module, "HEAD_TOKENS", 7)
    weight = torch.randn(vocabulary, 24, generator=torch.Generator().manual_seed(1)).to(dtype)
    x = torch.randn(9, 24, generator=torch.Generator().manual_seed(2)).to(dtype)
    head, rows = OutputHead(weight), [0, 3, 8]
    assert head.shape == (vocabulary, 24) and len(head.tensors) == max(-(-vocabulary // 7), 1)
    head.pack(held)
    scores = HeadScores(head, x)
    with torch.inference_mode():
        logits, best = scores.of(range(9)), scores.best(range(9))
        some = scores.best(rows)
    assert logits.dtype == held
    torch.testing.assert_close(logits.float(), F.linear(x.float(), weight.float()),
                               rtol=2e-2, atol=2e-2 if held != torch.float32 else 1e-4)
    assert same(best, WholeScores(logits).best(range(9)))
    assert some.tokens.tolist() == best.tokens[rows].tolist()


def same(one: BestTokens, other: BestTokens) -> bool:
    return torch.equal(one.logits, other.logits) and torch.equal(one.tokens, other.tokens)
