"""What a decoder-only model's generation_config.json says of tokens that were said already, of the
ends of texts and of given tokens is done as transformers' `generate` does it, under every way in
which a query comes to its next token."""

import json
from typing import Any

import pytest
import torch
import toy_runs
import toys
from plans import plan_of, spooled

from xgpt.core.errors import InputError
from xrunner.engine import blocks
from xrunner.io.generation import given_tokens, refuse_given_tokens
from xrunner.io.intake import queries_of
from xrunner.query import FinishedQuery, PreparedQuery
from xrunner.rules.paged import sarathi, vllm

SAYS = ({"repetition_penalty": 1.3, "min_new_tokens": 6, "eos_token_id": [toys.EOS, 40, 71, 9]},
        {"no_repeat_ngram_size": 2, "repetition_penalty": 0.7, "min_length": 14},
        {"no_repeat_ngram_size": 1, "forced_bos_token_id": 33, "forced_eos_token_id": 8})


@pytest.fixture(scope="module", params=SAYS, ids=["penalty", "both", "given"])
def answered(request, tmp_path_factory):
    """(the model's folder, queries as they are taken up, what `generate` answers by index)"""
    from transformers import GenerationConfig

    tmp_path = tmp_path_factory.mktemp("says")
    model = toys.make_model("llama", tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps(
        {"bos_token_id": 1, "eos_token_id": toys.EOS, "pad_token_id": 0, **request.param}))
    model.generation_config = GenerationConfig.from_pretrained(tmp_path)
    given_tokens.cache_clear()
    plan = plan_of(tmp_path, tmp_path, temperature=0.0, query_kv_tokens=100)
    spool, errors = spooled(plan, *(
        {"tokens": list(one.input_ids)[:1 if one.index % 5 == 0 else None],
         "max_tokens": one.max_new_tokens} for one in toys.random_queries(14, seed=5)))
    assert not errors
    queries = list(queries_of(spool, plan))
    assert any(len(query.input_ids) == 1 for query in queries)
    yield tmp_path, queries, {query.index: generated(model, query) for query in queries}
    given_tokens.cache_clear()


def generated(model: Any, query: PreparedQuery) -> list[int]:
    inputs = torch.tensor([list(query.input_ids)])
    with torch.no_grad():
        out = model.generate(inputs, attention_mask=torch.ones_like(inputs), do_sample=False,
                             max_new_tokens=query.max_new_tokens)
    answer: list[int] = out[0, inputs.shape[1]:].tolist()
    return answer


def tokens_of(results: list[FinishedQuery], queries: list[PreparedQuery]) -> dict[int, list[int]]:
    # several tokens may end a text; the toy head knows but one of them
    ends = set(queries[0].sampling.barred) or {toys.EOS}
    found = {}
    for result in results:
        ids = list(result.output_ids)
        first = next((place + 1 for place, token in enumerate(ids) if token in ends), len(ids))
        found[result.query.index] = ids[:first]
    return found


@pytest.mark.filterwarnings("ignore:Unfeasible length constraints")
@pytest.mark.parametrize("way", ["rra", "sarathi", "vllm", "waa"])
def test_a_decoder_only_models_own_rules_are_as_generate_has_them(answered, way, monkeypatch):
    monkeypatch.setitem(blocks.BLOCK_TOKENS, "cpu", 16)
    folder, queries, expected = answered
    if way == "waa":
        pools, rules = toy_runs.waa_pools(folder, (1,), (2, 1)), toy_runs.toy_waa_rules(
            1, num_groups=2)
        sink, _ = toy_runs.run_waa_in_process(folder, queries, pools, rules)
    elif way == "rra":
        sink, _ = toy_runs.run_in_process(folder, queries, degrees=(1, 2), num_groups=2,
                                           max_active=6)
    else:
        rule = (sarathi if way == "sarathi" else vllm)(
            num_groups=1, max_active=5, kv_tokens=96, token_budget=9 if way == "sarathi" else 40)
        sink, _ = toy_runs.run_in_process(folder, queries, degrees=(1,), rule=rule)
    assert tokens_of(sink.results, queries) == expected


def test_an_engine_that_does_not_do_it_refuses_it_by_key(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text(json.dumps(
        {"repetition_penalty": 1.1, "no_repeat_ngram_size": 3, "forced_eos_token_id": 2,
         "min_length": 4}))
    given_tokens.cache_clear()
    refuse_given_tokens(tmp_path, "xgpt")
    for engine, keys in (("vllm", {"no_repeat_ngram_size", "forced_eos_token_id"}),
                         ("deepspeed", {"no_repeat_ngram_size", "forced_eos_token_id",
                                        "repetition_penalty"})):
        with pytest.raises(InputError) as caught:
            refuse_given_tokens(tmp_path, engine)
        assert {mistake.key for mistake in caught.value.mistakes} == keys
        assert all(engine in mistake.allowed for mistake in caught.value.mistakes)
    given_tokens.cache_clear()
