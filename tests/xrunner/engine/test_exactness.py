"""Greedy float32 tokens equal transformers' `generate`, query by query, also those of the
quickstart's real model on its real prompts; logits of each family equal transformers', in half
precision nearly."""

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from examples import some
from holding import rule_of
from replays import answers_of
from toy_runs import (
    Lockstep,
    run_in_process,
    run_waa_in_process,
    stages_of,
    toy_waa_rules,
    waa_pools,
)
from toys import FAMILIES, T5_FAMILIES, VOCAB, generate, logits_of, random_queries, spec_of

from xgpt.core.errors import XgptError
from xrunner.checkpoint.layout import wanted_tensors
from xrunner.checkpoint.reader import CheckpointReader
from xrunner.checkpoint.source import find_model
from xrunner.checkpoint.tensors import check_weights, header
from xrunner.files.tokenizer import TextTokenizer, eos_ids
from xrunner.models.encoder_decoder import EncoderDecoderStage
from xrunner.models.stage_model import StageModel
from xrunner.models.weights import WHOLE, Shard
from xrunner.ops.contexts import decode_context, encode_context, whole_inputs
from xrunner.query import PreparedQuery, Sampling

# each type, and each way of holding the weights
HALF = some(product([1, 2], [torch.bfloat16, torch.float16]),
            lambda case: (case[0] == 2) == (case[1] == torch.bfloat16))


def test_end_of_sequence_ends_a_query_unless_its_length_is_forced(llama):
    directory, model = llama
    queries = [replace(q, max_new_tokens=60) for q in random_queries(9, seed=3)]
    sink, _ = run_in_process(directory, queries, num_stages=2, num_groups=2)
    stopped = [r for r in sink.results if r.finish_reason == "stop"]
    assert stopped and all(r.output_ids[-1] == 5 and len(r.output_ids) <= 60 for r in stopped)
    forced = [replace(q, is_forced=True) for q in queries]
    sink, _ = run_in_process(directory, forced, num_stages=2, num_groups=2)
    assert all(len(r.output_ids) == 60 and r.finish_reason == "length" for r in sink.results)
    first = min(stopped, key=lambda r: r.query.index).query
    again = next(r for r in sink.results if r.query.index == first.index)
    assert list(again.output_ids) == generate(model, replace(first, is_forced=True))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("family", ["llama", "t5"])
def test_the_same_seed_draws_the_same_text_whatever_the_schedule(made, family):
    """A draw depends on its own query alone, whoever makes it, also once it was evicted."""
    directory, _ = made(family)
    queries = [replace(q, is_forced=True, max_new_tokens=14, sampling=Sampling(
        temperature=0.9, top_k=20 if q.index % 2 else None, top_p=0.9, seed=q.index))
        for q in random_queries(9)]
    rules = [("ft", {}), *(() if family == "t5" else (
        ("orca", {}), ("vllm", {"kv_tokens": 128}), ("sarathi", {"kv_tokens": 128, "budget": 9})))]
    runs = [run_in_process(directory, queries, degrees=degrees, num_groups=groups,
                           encode_batch=batch, decode_iterations=iterations)[0]
            for degrees, groups, batch, iterations in (
                ((1,), 1, 9, 30), ((1, 1), 2, 3, 4), ((1, 1, 1), 3, 1, 2), ((1, 2), 2, 4, 3))]
    runs += [run_in_process(directory, queries, degrees=(1, 1),
                            rule=rule_of(policy, groups=2, batch=10, **own))[0]
             for policy, own in rules]
    runs.append(run_waa_in_process(directory, queries, waa_pools(directory, (1,), (2,)),
                                   toy_waa_rules(1, num_groups=2))[0])
    texts = [answers_of(sink) for sink in runs]
    assert all(text == texts[0] for text in texts)
    other = [replace(q, sampling=replace(q.sampling, seed=q.index + 1000)) for q in queries]
    sink, _ = run_in_process(directory, other, num_stages=1)
    assert answers_of(sink) != texts[0]


def test_a_stop_string_cuts_the_text_and_ends_the_query(llama):
    directory, model = llama
    query = replace(random_queries(4)[2], max_new_tokens=20, is_forced=True)
    answer = generate(model, query)
    stop = f" {answer[6]} {answer[7]} "
    sink, _ = run_in_process(directory, [replace(query, stop=(stop,), index=0)], num_stages=1,
                                num_groups=1)
    result = sink.results[0]
    assert result.finish_reason == "stop"
    assert result.text == " ".join(map(str, result.output_ids)).split(stop)[0]
    assert len(result.output_ids) < 20


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("degree", "dtype"), HALF)
def test_half_precision_logits_stay_near_transformers_in_the_same(made, family, degree, dtype):
    directory, model = made(family)
    spec, tokens = spec_of(directory), torch.arange(6, 30)
    biases = [p for name, p in model.named_parameters() if name.endswith("q_proj.bias")]
    assert bool(biases) == spec.qkv_bias or spec.family == "gpt2"
    assert all((bias != 0).all() for bias in biases), "a bias of zero goes unseen"
    stage = stages_of(directory, [1])[0]

    @torch.inference_mode()  # of the thread that runs it
    def work(shard: Shard) -> torch.Tensor:
        ours = StageModel(spec, CheckpointReader(directory, dtype), stage, dtype, shard)
        cache = torch.zeros(spec.num_layers, 2, 1, ours.kv_heads, 24, spec.head_dim, dtype=dtype)
        return logits_of(ours, ours.encode(
            tokens, cache, encode_context(whole_inputs([24])))).float()

    rounded = copy.deepcopy(model).to(dtype)  # the fixture serves other tests too
    with torch.inference_mode():
        exact, theirs = model(tokens[None]).logits[0], rounded(tokens[None]).logits[0]
    assert_as_near(gathered(work, degree), exact, theirs)


@pytest.mark.parametrize(("family", "degree", "dtype"), some(
    product(T5_FAMILIES, [1, 2], [torch.bfloat16, torch.float16]),
    # transformers in float16 is slow on a CPU
    lambda case: case[1:] == (2, torch.bfloat16)))
def test_half_precision_logits_of_t5_stay_near_transformers_in_the_same(
        made, family, degree, dtype):
    directory, model = made(family)
    spec, stage = spec_of(directory), stages_of(directory, [1])[0]
    # unscaled attention makes one input's rounding a matter of luck: several are taken together
    inputs = [torch.arange(first, first + 24) for first in (6, 20, 40, 60)]

    @torch.inference_mode()  # of the thread that runs it
    def work(shard: Shard) -> torch.Tensor:
        ours = EncoderDecoderStage(spec, CheckpointReader(directory, dtype), stage, shard)
        rows = []
        for tokens in inputs:
            caches = torch.zeros(2, spec.num_layers, 2, 1, ours.kv_heads, 24, spec.head_dim,
                                 dtype=dtype)
            ours.store_encoded(ours.encode(tokens, [24]), caches[1], 0, [24])
            across = decode_context([24])
            for at, token in enumerate(tokens[3:15].tolist()):
                step = decode_context([at + 1])
                rows.append(logits_of(
                    ours, ours.decode(torch.tensor([token]), *caches, step, across)))
        return torch.cat(rows).float()

    def reference(of: Any) -> torch.Tensor:
        with torch.inference_mode():
            return torch.cat([of(tokens[None], decoder_input_ids=tokens[None, 3:15]).logits[0]
                              for tokens in inputs])

    rounded = copy.deepcopy(model).to(dtype)
    assert_as_near(gathered(work, degree), reference(model), reference(rounded))


def gathered(work: Callable[[Shard], torch.Tensor], degree: int) -> torch.Tensor:
    """[tokens, V] of all shards together."""
    return work(WHOLE) if degree == 1 else torch.cat(Lockstep(degree).run(work), dim=1)


def assert_as_near(ours: torch.Tensor, exact: torch.Tensor, theirs: torch.Tensor) -> None:
    """Rounding differs with the order of operations: ours may err as much as transformers' do in
    the same dtype, half as much again at most, and a little of the logits' spread: a hundredth in
    bfloat16, an eighth of that in float16, which has three bits more."""
    scale, slack = exact.std(), 0.01 if theirs.dtype == torch.bfloat16 else 0.01 / 8
    error, their_error = ((x.float() - exact).abs().mean() / scale for x in (ours, theirs))
    assert error < 1.5 * their_error + slack, f"{error = } {their_error = }"


PROMPTS = Path(__file__).resolve().parents[3] / "jobs" / "prompts" / "quickstart.jsonl"
NUM_PROMPTS, MAX_NEW_TOKENS = 3, 8


@pytest.fixture(scope="module")
def smollm2():
    from transformers import AutoModelForCausalLM

    try:
        files = find_model("smollm2-135m", say=lambda message: None)
    except XgptError as cause:
        pytest.skip(f"the model is not to be had here: {cause}")
    return files.directory, AutoModelForCausalLM.from_pretrained(files.directory,
                                                                 dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def queries(smollm2):
    tokenizer = TextTokenizer(smollm2[0])
    lines = PROMPTS.read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines[::len(lines) // NUM_PROMPTS]]
    texts = [tokenizer.render_chat([{"role": "user", "content": p}]) for p in prompts[:NUM_PROMPTS]]
    # lengths differ, so that batches shrink and are compacted on the way
    return [PreparedQuery(index=i, id=str(i), input_ids=tuple(ids),
                          max_new_tokens=MAX_NEW_TOKENS - 2 * i)
            for i, ids in enumerate(tokenizer.encode_many(texts, special=False))]


@pytest.fixture(scope="module")
def expected(smollm2, queries):
    directory, model = smollm2
    return {query.index: toys.greedily(
        model, query.input_ids, query.max_new_tokens, eos_token_id=sorted(eos_ids(directory)),
        pad_token_id=2) for query in queries}


# toys have every number of stages; the real model is large
@pytest.mark.slow  # toys of its family in every layout: test_exactness*.py
@pytest.mark.parametrize("num_stages", [2, 1, 3])
def test_greedy_tokens_equal_generate(smollm2, queries, expected, num_stages):
    # toys.EOS is an ordinary token of this model; forcing the length shuts it out
    forced = [replace(q, is_forced=True, max_new_tokens=len(expected[q.index])) for q in queries]
    sink, _ = run_in_process(smollm2[0], forced, num_stages=num_stages, num_groups=num_stages,
                             encode_batch=3, decode_iterations=6)
    assert answers_of(sink) == expected


@pytest.mark.parametrize("family", toys.MODERN_FAMILIES)
def test_logits_of_an_input_and_of_its_next_tokens_equal_transformers(made, family):
    directory, model = made(family)
    spec, (stage,) = spec_of(directory), stages_of(directory, [1])
    ours = StageModel(spec, CheckpointReader(directory, torch.float32), stage, torch.float32)
    tokens = torch.arange(6, 30) * 11 % (VOCAB - 6) + 6
    cache = torch.zeros(spec.num_layers, 2, 1, spec.kv_heads, 24, spec.head_dim)
    with torch.inference_mode():
        whole = encode_context(whole_inputs([18]))
        rows = [logits_of(ours, ours.encode(tokens[:18], cache, whole))]
        rows += [logits_of(ours, ours.decode(tokens[at:at + 1], cache, decode_context([at + 1])))
                 for at in range(18, 24)]
        theirs = model(tokens[None]).logits[0]
    torch.testing.assert_close(torch.cat(rows), theirs, rtol=1e-3, atol=1e-3)
    assert theirs.std() > 0.1


@pytest.mark.parametrize("family", toys.MODERN_FAMILIES)
def test_the_tensors_that_are_asked_for_are_those_of_the_file(made, family):
    directory, model = made(family)
    spec = spec_of(directory)
    check_weights(directory, spec)
    wanted = dict(wanted_tensors(spec))
    held = header(directory / "model.safetensors")
    assert wanted.keys() - {"lm_head.weight"} == held.keys() - {"lm_head.weight"}
    assert spec.num_params == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("family", "unlike"), [
    ("gemma2", {"windows": ()}), ("gemma2", {"attention_cap": None}),
    ("gemma2", {"logit_cap": None}),
    ("gemma3", {"local_rope_theta": None}), ("gemma3", {"query_scale": None}),
    ("mistral-window", {"windows": ()}), ("phi4-mini", {"rotary_dim": None}),
    ("smollm3", {"unrotated": ()}), ("granite", {"residual_scale": 1.0}),
    ("granite", {"logit_scale": 1.0}), ("granite", {"embedding_scale": 1.0})])
def test_what_a_config_states_changes_the_logits(made, family, unlike):
    """Else the tests above could not fail for want of it."""
    directory, _ = made(family)
    spec = spec_of(directory)
    assert getattr(spec.decoder, next(iter(unlike))) != next(iter(unlike.values()))
    scaling = None if "rotary_dim" in unlike else spec.rope_scaling
    other = replace(spec, decoder=replace(spec.decoder, **unlike), rope_scaling=scaling)
    tokens, logits = torch.arange(6, 30), []
    for own in (spec, other):
        model = StageModel(own, CheckpointReader(directory, torch.float32),
                           stages_of(directory, [1])[0], torch.float32)
        cache = torch.zeros(spec.num_layers, 2, 1, spec.kv_heads, 24, spec.head_dim)
        with torch.inference_mode():
            logits.append(logits_of(model, model.encode(
                tokens, cache, encode_context(whole_inputs([24]))))[-1])
    assert (logits[0] - logits[1]).abs().max() > 1e-2
