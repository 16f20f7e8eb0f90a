"""Logits of the gated families of today equal transformers': norms around and after each block,
norms of queries and keys, windows shorter than the sequences, soft-capping, rotary positions of
every kind, fused tensors, multipliers, experts. Their tokens: test_exactness_matrix.py."""

from dataclasses import replace

import pytest
import torch
import toys
from toy_runs import stages_of
from toys import VOCAB, logits_of, spec_of

from xrunner.checkpoint.layout import wanted_tensors
from xrunner.checkpoint.reader import CheckpointReader
from xrunner.checkpoint.tensors import check_weights, header
from xrunner.models.stage_model import StageModel
from xrunner.ops.contexts import decode_context, encode_context, whole_inputs


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
