"""GPT-2: variants that would run with wrong tokens, the joint matrix of a shard, learned positions.

Its tokens and logits against transformers' are in test_exactness.py and test_shards.py.
"""

from __future__ import annotations

import pytest
import torch
from toy_runs import split_stages
from toys import make_model, spec_of

from xgpt.core.errors import InputError
from xgpt.core.hf_config import from_hf_config
from xrunner.checkpoint.reader import CheckpointReader
from xrunner.models.gpt2 import gpt2_ends, gpt2_layer
from xrunner.models.shard import Shard
from xrunner.models.stage_model import StageModel
from xrunner.ops.head import OutputHead
from xrunner.ops.linear import Product
from xrunner.ops.residual import Residual

CONFIG = {"model_type": "gpt2", "n_layer": 5, "n_embd": 48, "n_head": 6, "vocab_size": 97,
          "n_positions": 128}


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    directory = tmp_path_factory.mktemp("gpt2")
    return directory, make_model("gpt2", directory)


@pytest.mark.parametrize(("key", "value"), [
    ("activation_function", "gelu"), ("scale_attn_weights", False),
    ("scale_attn_by_inverse_layer_idx", True), ("reorder_and_upcast_attn", True),
    ("add_cross_attention", True)])
def test_a_variant_is_refused_by_its_key(key, value):
    from_hf_config(CONFIG, "x")
    with pytest.raises(InputError, match=f"{key} = .* is not supported"):
        from_hf_config({**CONFIG, key: value}, "x")


def test_an_untied_head_is_read_as_such():
    assert from_hf_config(CONFIG, "x").tied_embeddings
    assert not from_hf_config({**CONFIG, "tie_word_embeddings": False}, "x").tied_embeddings


def test_weights_are_turned_once_and_lie_in_rows(gpt2):
    directory, model = gpt2
    layer = gpt2_layer(spec_of(directory), CheckpointReader(directory, torch.float32), 1)
    attn, mlp = model.transformer.h[1].attn, model.transformer.h[1].mlp
    for ours, conv in zip(layer.products, (attn.c_attn, attn.c_proj, mlp.c_fc, mlp.c_proj),
                          strict=True):
        assert torch.equal(ours.weight, conv.weight.detach().t()) and ours.weight.is_contiguous()


def test_a_shard_takes_its_heads_from_query_key_and_value(gpt2):
    directory, model = gpt2
    reader = CheckpointReader(directory, torch.float32)
    layer = gpt2_layer(spec_of(directory), reader, 2, Shard(1, 2))
    conv = model.transformer.h[2].attn.c_attn
    rows = [i * 48 + 24 + j for i in range(3) for j in range(24)]  # heads 3 to 5 of 6
    assert torch.equal(layer.weights.qkv.weight, conv.weight.detach().t()[rows])
    assert torch.equal(layer.weights.qkv.bias, conv.bias.detach()[rows])
    assert layer.weights.qkv.weight.is_contiguous() and layer.weights.out.bias is None


def test_a_tied_head_is_the_embedding_itself_where_a_rank_holds_it(gpt2):
    directory, _ = gpt2
    spec, reader = spec_of(directory), CheckpointReader(directory, torch.float32)
    ends = gpt2_ends(spec, reader, first=True, last=True, shard=Shard(1, 2))
    assert ends.head.tensors[0].data_ptr() == ends.embedding[49:].data_ptr()
    assert ends.head.shape == (48, 48)
    alone = gpt2_ends(spec, reader, first=False, last=True, shard=Shard(1, 2))
    assert alone.embedding is None and torch.equal(*alone.head.tensors, *ends.head.tensors)


def test_weights_go_to_the_device_asked_for(gpt2):
    directory, _ = gpt2
    spec, reader = spec_of(directory), CheckpointReader(directory, torch.float32)
    model = StageModel(spec, reader, split_stages(spec.num_layers, 1)[0], torch.float32,
                       device="meta")
    values = [*vars(model.ends).values(), *(v for layer in model.layers for v in layer.weights)]
    parts = [v.tensors if isinstance(v, (OutputHead, Product)) else
             v if isinstance(v, tuple) else (v,) for v in values]
    held = [t for part in parts for t in part if isinstance(t, torch.Tensor)]
    assert len(held) > 5 * 8 and {t.device.type for t in held} == {"meta"}


def test_the_mlp_uses_gelu_by_tanh(gpt2):
    directory, model = gpt2
    layer = gpt2_layer(spec_of(directory), CheckpointReader(directory, torch.float32), 0)
    theirs, hidden = model.transformer.h[0], torch.linspace(-1, 1, 5 * 48).view(5, 48)
    with torch.no_grad():
        added = hidden + theirs.attn.c_proj.bias
        expected = added + theirs.mlp(theirs.ln_2(added))
        stream = Residual(hidden.clone())
        layer.finish(stream, torch.zeros(5, 48))
    # the exact GELU is 1e-3 away
    torch.testing.assert_close(stream.total(), expected, rtol=1e-5, atol=1e-5)
