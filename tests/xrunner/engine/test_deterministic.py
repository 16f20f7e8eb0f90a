"""`run.deterministic`: a query's numbers are the same bits alone, in batches of any size, in
chunks, and by any policy."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from examples import some
from holding import rule_of
from toy_runs import run_in_process, run_waa_in_process, stages_of, toy_waa_rules, waa_pools
from toys import random_queries, spec_of

from xgpt.core.errors import XgptError
from xrunner.checkpoint.reader import open_weights
from xrunner.engine.kv import KvCache, kv_shape
from xrunner.models.stage_model import StageModel
from xrunner.ops import invariant
from xrunner.ops.contexts import decode_context, encode_context
from xrunner.ops.linear import Product
from xrunner.query import PreparedQuery, Sampling
from xrunner.rules.slots import Span

DTYPES = [torch.float32, torch.bfloat16]
LENGTHS = [1, 37, 5, 90, 18]


@pytest.fixture(autouse=True)
def deterministic():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        invariant.set_deterministic(True)
    except XgptError as cause:
        pytest.skip(str(cause))
    yield
    invariant.set_deterministic(False)
    torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("out", "into"), [(7, 5), (96, 64), (576, 1536), (1536, 576)])
def test_a_row_of_a_product_is_the_same_bits_wherever_it_is(dtype, out, into):
    generator = torch.Generator().manual_seed(out)
    product = Product((torch.randn(out, into, generator=generator) / into ** 0.5).to(dtype),
                      torch.randn(out, generator=generator).to(dtype), activation="gelu")
    product.pack(dtype)
    x = torch.randn(131, into, generator=generator).to(dtype)
    with torch.inference_mode():
        whole = product(x)
        for rows in (1, 2, 8, 17, 33, 100):
            for first in range(0, 131 - rows, 29):
                part = product(x[first:first + rows])
                assert torch.equal(part, whole[first:first + rows]), f"{rows = } {first = }"


@pytest.mark.parametrize(("family", "dtype"), some(
    product(("llama", "gpt2"), DTYPES),
    lambda case: case in (("llama", torch.bfloat16), ("gpt2", torch.float32))))
def test_hidden_states_are_the_same_bits_in_any_batch_and_in_chunks(made, family, dtype):
    directory = made(family)[0]
    spec, [stage] = spec_of(directory), stages_of(directory, [1])
    torch.set_num_threads(1)  # many small products: what two threads do is seen above
    longest = min(90, (spec.max_positions or 10**6) - 4)
    lengths = [min(length, longest) for length in LENGTHS]
    reader = open_weights(directory, dtype)
    model = StageModel(spec, reader, stage, dtype)
    reader.close()
    texts = [torch.randint(0, spec.vocab_size, (length + 3,), generator=torch.Generator(
    ).manual_seed(length)) for length in lengths]

    def states(chosen: Sequence[int], chunk: int) -> dict[int, torch.Tensor]:
        """Every hidden state of these texts, encoded together, `chunk` tokens of each at a time,
        and then decoded together."""
        cache = KvCache(kv_shape(spec, dtype, slots=len(chosen), capacity=longest + 3))
        cache.allocate([lengths[text] for text in chosen])
        found: dict[int, list[torch.Tensor]] = {text: [] for text in chosen}
        for first in range(0, longest, chunk):
            spans = [Span(slot, first, min(chunk, lengths[text] - first), False)
                     for slot, text in enumerate(chosen) if lengths[text] > first]
            tokens = torch.cat([texts[chosen[s.slot]][first:first + s.tokens] for s in spans])
            parts = model.encode(tokens, cache.store, encode_context(spans)).split(
                [span.tokens for span in spans])
            for span, part in zip(spans, parts, strict=True):
                found[chosen[span.slot]].append(part)
        for step in range(3):
            tokens = torch.stack([texts[text][lengths[text] + step] for text in chosen])
            hidden = model.decode(tokens, cache.store, decode_context(
                [lengths[text] + step + 1 for text in chosen]))
            for slot, text in enumerate(chosen):
                found[text].append(hidden[slot:slot + 1])
        return {text: torch.cat(parts) for text, parts in found.items()}

    everything = range(len(lengths))
    with torch.inference_mode():
        alone = {text: states([text], 1000)[text] for text in everything}
        for chosen, chunk in (([*everything], 1000), ([*everything][::-1], 1000), ([3, 1], 1000),
                              ([*everything], 16), ([3, 4, 1], 50)):
            for text, hidden in states(chosen, chunk).items():
                assert torch.equal(hidden, alone[text]), f"{chosen = } {chunk = } {text = }"


@pytest.mark.parametrize("dtype", some(DTYPES, lambda dtype: dtype == torch.float32))
def test_answers_are_the_same_by_every_policy(llama, dtype):
    directory = llama[0]
    queries = [PreparedQuery(index=q.index, id=q.id, input_ids=q.input_ids, is_forced=True,
                             max_new_tokens=1 + q.max_new_tokens % 9, sampling=Sampling(
                                 temperature=3.0 * (q.index % 2), seed=q.index))
               for q in random_queries(9)]
    torch.set_num_threads(1)

    def answers(of: Sequence[PreparedQuery], rule: Any, **shape: Any) -> dict[int, Any]:
        sink, _ = run_in_process(directory, of, rule=rule, dtype=dtype,
                                 **(shape or {"degrees": [1]}))
        return {r.query.index: r.output_ids for r in sink.results}

    alone: dict[int, Any] = {}
    for query in queries:
        alone |= answers([query], rule_of("rra", encode=1, iterations=4, batch=1))
    rules = {
        "rra": rule_of("rra", encode=5, iterations=3, batch=12),
        "chunks": rule_of("rra", encode=5, iterations=3, batch=12, chunk=7),
        "ft": rule_of("ft", batch=9), "orca": rule_of("orca"), "vllm": rule_of("vllm"),
        "sarathi": rule_of("sarathi", budget=9)}
    for policy, rule in rules.items():
        assert answers(queries, rule) == alone, policy
    assert answers(queries, rule_of("orca", groups=2),
                   degrees=[1, 1]) == alone, "two stages"
    if dtype == torch.float32:  # the support's WAA is of float32
        sink, _ = run_waa_in_process(directory, queries, waa_pools(directory, [1], [1]),
                                     toy_waa_rules(1))
        assert {r.query.index: r.output_ids for r in sink.results} == alone, "waa"


def test_a_product_that_no_tile_makes_even_is_refused():
    calls = iter(range(10**6))

    def product(x: torch.Tensor) -> torch.Tensor:
        return x * next(calls)

    with pytest.raises(XgptError, match=r"run\.deterministic"):
        invariant.tile_of(product, 4, torch.float32)
