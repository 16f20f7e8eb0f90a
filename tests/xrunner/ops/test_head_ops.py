"""The output head: the largest logit of each row, by every implementation, and piece by piece."""

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from implementations import IMPLEMENTATIONS, num_threads
from torch.nn import functional as F

from xrunner.ops import output_head as head_module
from xrunner.ops.output_head import (
    BestTokens,
    HeadScores,
    OutputHead,
    WholeScores,
    keep_best,
    no_tokens,
)

NAN, INF = float("nan"), float("inf")
DTYPES = [torch.float32, torch.bfloat16]
every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=str)


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
    monkeypatch.setattr(head_module, "PIECE_TOKENS", 7)
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
