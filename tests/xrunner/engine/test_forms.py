"""Answers held to a form: greedy tokens are those of transformers' `generate` under the same mask,
whatever the policy, the stages and the tensor parallelism."""

import json
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
import toys
from holding import rule_of
from plans import plan_of, spooled
from replays import answers_of
from small_tokenizers import trained, write_folder
from toy_runs import run_in_process, run_waa_in_process, toy_waa_rules, waa_pools

llguidance = pytest.importorskip("llguidance", reason="forms need the extra `structured`")

from xgpt.core.errors import MissingExtraError  # noqa: E402
from xgpt.requests.chat import form_text  # noqa: E402
from xgpt.requests.forms import grammar_of, why_wrong  # noqa: E402
from xrunner.devices import select_device  # noqa: E402
from xrunner.files.forms import Forms  # noqa: E402
from xrunner.files.spooled_requests import SpooledQueries  # noqa: E402
from xrunner.files.tokenizer import TextTokenizer  # noqa: E402
from xrunner.ops import invariant  # noqa: E402
from xrunner.query import PreparedQuery, Sampling  # noqa: E402

SCHEMA = {"type": "object", "properties": {
    "label": {"enum": ["yes", "no"]}, "words": {"type": "array", "maxItems": 2, "items": {
        "type": "string", "maxLength": 4}}},
    "required": ["label", "words"], "additionalProperties": False}
CHOICES = ["positive", "negative", "neither Größe", "pos"]
FORMS: list[dict[str, Any]] = [{"choice": CHOICES}, {"json": SCHEMA},
                               {"regex": "[0-9]{3}-[a-f]{2}"}, {}]
SIZE = 420
SPECIALS = ("<s>", "<1>", "<2>", "<3>", "<4>", "</s>")  # the last one is toys.EOS


def write_tokenizer(folder):
    """A tokenizer of bytes, whose end-of-sequence token is the toys'."""
    write_folder(folder, {"tokenizer.json": trained("bytes", SPECIALS), "tokenizer_config.json": {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIALS[toys.EOS]}})


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("forms")
    model = toys.make_modern("llama", folder, vocab_size=SIZE)
    write_tokenizer(folder)
    return folder, model


@pytest.fixture(scope="module")
def queries() -> list[PreparedQuery]:
    """In turn of each form, and without one."""
    return [replace(query, max_new_tokens=60 if form else query.max_new_tokens, sampling=Sampling(
        passed=form_text(*next(iter(form.items()))) if form else ""))
        for query in toys.random_queries(14) for form in [FORMS[query.index % len(FORMS)]]]


@pytest.fixture(scope="module")
def expected(model, queries):
    """What `generate` answers with a mask that is made anew for every token."""
    tokenizer = llguidance.LLTokenizer(
        trained("bytes", SPECIALS), n_vocab=SIZE, eos_token=[toys.EOS])

    def masked(query: PreparedQuery) -> Any:
        def process(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            form = FORMS[query.index % len(FORMS)]
            if not form:
                return scores
            matcher = llguidance.LLMatcher(tokenizer, grammar_of(form))
            assert matcher.consume_tokens(input_ids[0, len(query.input_ids):].tolist())
            allowed = torch.tensor([*matcher.compute_logit_bias()], dtype=torch.bool)[:SIZE]
            return scores.masked_fill(~allowed, float("-inf"))
        return process

    return {query.index: toys.greedily(
        model[1], query.input_ids, query.max_new_tokens, eos_token_id=toys.EOS, pad_token_id=0,
        logits_processor=[masked(query)]) for query in queries}


def test_each_answer_has_its_form(model, expected):
    decode = TextTokenizer(model[0]).decode
    for index, tokens in expected.items():
        form, text = FORMS[index % len(FORMS)], decode(tokens)
        if "choice" in form:
            assert text in CHOICES
        elif "json" in form:
            held = json.loads(text)
            assert held["label"] in ("yes", "no") and len(held["words"]) <= 2
        elif "regex" in form:
            assert text[3] == "-" and text[:3].isdigit() and len(text) == 6
        assert not form or tokens[-1] == toys.EOS


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(("policy", "degrees", "own"), [
    ("rra", (1,), {}), ("rra", (1, 1), {"groups": 2}), ("rra", (2,), {}), ("rra", (1, 2), {}),
    ("ft", (2,), {}), ("orca", (1, 1), {"groups": 2}),
    # a memory that is too small for all of them: queries are evicted, and encoded again
    ("vllm", (1,), {"kv_tokens": 140, "batch": 10}), ("sarathi", (2,), {"kv_tokens": 140}),
    ("sarathi", (1, 1), {"groups": 2, "budget": 9})])
def test_tokens_are_those_of_generate_under_the_same_mask(
        model, queries, expected, policy, degrees, own):
    sink, _ = run_in_process(model[0], queries, degrees=degrees, rule=rule_of(policy, **own))
    assert answers_of(sink) == expected
    assert all(result.finish_reason == "stop" for result in sink.results
               if result.query.sampling.passed)


def test_a_query_that_is_handed_over_goes_on_in_its_form(model, queries, expected):
    sink, _ = run_waa_in_process(model[0], queries, waa_pools(model[0], (1,), (2, 1)),
                                 toy_waa_rules(1, num_groups=2))
    assert answers_of(sink) == expected


def test_deterministic_products_and_draws_keep_the_form_in_any_batch(model, queries):
    drawn = [replace(query, sampling=replace(query.sampling, temperature=0.9, seed=query.index,
                                             repetition_penalty=1.2, history=query.input_ids))
             for query in queries]
    invariant.set_deterministic(True)
    try:
        first, second = (answers_of(run_in_process(model[0], drawn, num_stages=1, rule=rule)[0])
                         for rule in (rule_of("rra"), rule_of("sarathi", batch=3, budget=9)))
    finally:
        invariant.set_deterministic(False)
    assert first == second
    decode = TextTokenizer(model[0]).decode
    assert all(decode(first[query.index]) in CHOICES for query in drawn
               if "choice" in query.sampling.passed)


def test_a_form_ends_its_answer_where_other_ends_are_ignored(model, tmp_path):
    plan = plan_of(tmp_path, model[0], ignore_eos=True)
    spool, errors = spooled(plan, {"tokens": [7], "structured_outputs": {"choice": ["a"]}},
                            {"tokens": [7]})
    assert not errors
    assert [query.is_forced for query in SpooledQueries(spool, plan)] == [False, True]


def test_a_token_that_the_form_does_not_allow_leaves_no_other(model):
    matcher = Forms(model[0], SIZE).matcher(form_text("choice", ["a"]))
    assert any(matcher.allowed)
    matcher.add([toys.EOS])
    assert matcher.allowed == bytes(len(matcher.allowed))


def test_without_the_extra_no_run_with_a_form_begins(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    assert why_wrong("json", {"type": "pear"}) == "", "planning does without"
    with pytest.raises(MissingExtraError, match=r"structured"):
        assert Forms(model[0], SIZE).refusal


def test_a_tokenizer_that_the_library_cannot_read_is_named(tmp_path):
    toys.make_modern("llama", tmp_path, vocab_size=SIZE)
    assert "no tokenizer" in Forms(tmp_path, SIZE).refusal
    write_folder(tmp_path, {"tokenizer.json": trained("unigram", ("<unk>", "</s>")),
                            "tokenizer_config.json": {
                                "tokenizer_class": "PreTrainedTokenizerFast"}})
    assert "decoder type" in Forms(tmp_path, SIZE).refusal


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="this PyTorch can use no CUDA device")
def test_a_gpu_gives_the_same_tokens(model, queries, expected):
    for degrees in ((1,), (1, 1)):
        sink, _ = run_in_process(model[0], queries, degrees=degrees, device=select_device("gpu", 0))
        assert answers_of(sink) == expected
