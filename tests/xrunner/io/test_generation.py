"""What an encoder-decoder model's files say of its tokens is done as transformers' `generate` does
it, or refused by key."""

import json

import pytest
import toy_runs
import toys
from holding import rule_of
from plans import plan_of, spooled

from xgpt.core.errors import InputError
from xrunner.files.generation import GenerationRules, generation_rules, refuse_unsupported_rules
from xrunner.files.spooled_requests import SpooledQueries
from xrunner.query import FinishedQuery, PreparedQuery

FIRST = 7
INPUTS = (3, 8, 30, 17, 5, 32)  # of 32 positions, of which an output takes none
MOST = (14, 1, 20, 9, 2, 32)


@pytest.mark.filterwarnings("ignore:Unfeasible length constraints")
@pytest.mark.parametrize(("family", "degrees", "no_repeat_size"), [
    ("bart", (1,), 0), ("bart", (1, 1), 3), ("mbart", (1, 2), 2), ("mbart", (2,), 1)])
def test_what_a_models_files_say_is_as_generate_has_it(tmp_path, family, degrees, no_repeat_size):
    model = toys.make_bart(family, tmp_path, forced_bos_token_id=FIRST,
                           forced_eos_token_id=toys.EOS, min_length=9,
                           no_repeat_ngram_size=no_repeat_size)
    plan = plan_of(tmp_path, tmp_path, temperature=0.0, query_kv_tokens=100)
    inputs = [[(11 * i * n + 6) % toys.VOCAB for i in range(1, n + 1)] for n in INPUTS]
    # of the last its own least length counts, not the model's
    spool, errors = spooled(plan, *(
        {"id": f"q{place}", "tokens": tokens, "max_tokens": most} | (
            {"min_tokens": 4} if place == 5 else {})
        for place, (tokens, most) in enumerate(zip(inputs, MOST, strict=True))))
    assert not errors
    queries = list(SpooledQueries(spool, plan))
    # of few slots, so that rows move while others go on
    sink, _ = toy_runs.run_in_process(tmp_path, queries, degrees=degrees, num_groups=2,
                                       max_active=4)
    results = {result.query.index: result for result in sink.results}
    for place, (tokens, most) in enumerate(zip(inputs, MOST, strict=True)):
        found = list(results[place].output_ids)
        assert found == toys.greedily(model, tokens, most,
                                      min_new_tokens=4 if place == 5 else None), f"{place = }"
        assert found[0] == (FIRST if most > 1 else toys.EOS)
        assert (results[place].finish_reason == "length") == (len(found) == most)
        assert len(found) < most or found[-1] == toys.EOS


def test_an_exact_length_has_no_end_that_is_given(tmp_path):
    toys.make_bart("bart", tmp_path, forced_bos_token_id=FIRST, forced_eos_token_id=toys.EOS)
    plan = plan_of(tmp_path, tmp_path)
    spool, _ = spooled(plan, {"tokens": [6, 8], "forced_tokens": 5})
    (query,) = SpooledQueries(spool, plan)
    assert query.sampling.fixed == ((1, FIRST),)


@pytest.mark.parametrize(("config", "expected"), [
    ({"model_type": "bart"}, GenerationRules(None, 2)),
    ({"model_type": "mbart", "forced_eos_token_id": None, "min_length": 3},
     GenerationRules(least=3)),
    ({"model_type": "t5"}, GenerationRules()),
    ({"model_type": "bart", "forced_bos_token_id": 0, "forced_eos_token_id": [9, 4]},
     GenerationRules(0, 4))])
def test_where_config_json_alone_is_there_it_says(tmp_path, config, expected):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert generation_rules(tmp_path) == expected


def test_what_is_not_done_is_refused_by_every_key(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    # facebook/bart-large-cnn's
    says = {"forced_bos_token_id": 0, "forced_eos_token_id": 2, "length_penalty": 2.0,
            "max_length": 142, "min_length": 56, "no_repeat_ngram_size": 3, "num_beams": 4}
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({**says, "repetition_penalty": 1.2, "suppress_tokens": [4]}))
    with pytest.raises(InputError) as caught:
        generation_rules(tmp_path)
    assert [mistake.key for mistake in caught.value.mistakes] == ["suppress_tokens"]
    assert all(mistake.file == str(path) for mistake in caught.value.mistakes)
    generation_rules.cache_clear()
    path.write_text(json.dumps(says))
    assert generation_rules(tmp_path) == GenerationRules(0, 2, 56, 3)
    generation_rules.cache_clear()
    for key in ("forced_bos_token_id", "forced_eos_token_id", "min_length",
                "no_repeat_ngram_size"):
        path.write_text(json.dumps({key: "7"}))
        with pytest.raises(InputError, match=key):
            generation_rules(tmp_path)


SAYS = {
    "penalty": {"repetition_penalty": 1.3, "min_new_tokens": 6,
                "eos_token_id": [toys.EOS, 40, 71, 9]},
    "both": {"no_repeat_ngram_size": 2, "repetition_penalty": 0.7, "min_length": 14},
    "given": {"no_repeat_ngram_size": 1, "forced_bos_token_id": 33, "forced_eos_token_id": 8}}


@pytest.fixture(scope="module")
def answered(request, tmp_path_factory):
    """(the model's folder, queries as they are taken up, what `generate` answers by index)"""
    from transformers import GenerationConfig

    tmp_path = tmp_path_factory.mktemp("says")
    model = toys.make_model("llama", tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps(
        {"bos_token_id": 1, "eos_token_id": toys.EOS, "pad_token_id": 0, **SAYS[request.param]}))
    model.generation_config = GenerationConfig.from_pretrained(tmp_path)
    generation_rules.cache_clear()
    plan = plan_of(tmp_path, tmp_path, temperature=0.0, query_kv_tokens=100)
    spool, errors = spooled(plan, *(
        {"tokens": list(one.input_ids)[:1 if one.index % 5 == 0 else None],
         "max_tokens": one.max_new_tokens} for one in toys.random_queries(14, seed=5)))
    assert not errors
    queries = list(SpooledQueries(spool, plan))
    assert any(len(query.input_ids) == 1 for query in queries)
    yield tmp_path, queries, {query.index: toys.greedily(
        model, query.input_ids, query.max_new_tokens) for query in queries}
    generation_rules.cache_clear()


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
@pytest.mark.parametrize(("answered", "way"), [
    ("penalty", "rra"), ("penalty", "sarathi"), ("both", "vllm"), ("both", "waa"), ("given", "rra"),
    ("given", "sarathi")], indirect=["answered"])
def test_a_decoder_only_models_own_rules_are_as_generate_has_them(answered, way, small_blocks):
    folder, queries, expected = answered
    if way == "waa":
        pools, rules = toy_runs.waa_pools(folder, (1,), (2, 1)), toy_runs.toy_waa_rules(
            1, num_groups=2)
        sink, _ = toy_runs.run_waa_in_process(folder, queries, pools, rules)
    elif way == "rra":
        sink, _ = toy_runs.run_in_process(folder, queries, degrees=(1, 2), num_groups=2,
                                           max_active=6)
    else:
        sink, _ = toy_runs.run_in_process(folder, queries, degrees=(1,), rule=rule_of(
            way, batch=5, kv_tokens=96, budget=9 if way == "sarathi" else 40))
    assert tokens_of(sink.results, queries) == expected


def test_an_engine_that_does_not_do_it_refuses_it_by_key(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text(json.dumps(
        {"repetition_penalty": 1.1, "no_repeat_ngram_size": 3, "forced_eos_token_id": 2,
         "min_length": 4}))
    generation_rules.cache_clear()
    refuse_unsupported_rules(tmp_path, "xgpt")
    for engine, keys in (("vllm", {"no_repeat_ngram_size", "forced_eos_token_id"}),
                         ("deepspeed", {"no_repeat_ngram_size", "forced_eos_token_id",
                                        "repetition_penalty"})):
        with pytest.raises(InputError) as caught:
            refuse_unsupported_rules(tmp_path, engine)
        assert {mistake.key for mistake in caught.value.mistakes} == keys
        assert all(engine in mistake.allowed for mistake in caught.value.mistakes)
    generation_rules.cache_clear()
