"""Weights of a bfloat16 model held as float32: activations are float32, what is kept and what goes
to other ranks stays bfloat16, and the logits come nearer to those of float32."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from toy_runs import split_stages
from toys import logits_of

from xgpt.core.model import ModelSpec
from xrunner.models.shard import Shard
from xrunner.models.stage_model import StageModel
from xrunner.models.weights import RandomWeights
from xrunner.ops.contexts import decode_context, encode_context, whole_inputs

SHAPE = ModelSpec(name="toy", family="llama", num_layers=4, hidden_size=48, num_heads=6,
                  num_kv_heads=3, vocab_size=97, intermediate_size=36, is_gated_mlp=True,
                  has_bias=False, tied_embeddings=True, max_positions=64)
SPECS = {"llama": SHAPE, "qwen2": replace(SHAPE, has_qkv_bias=True),
         "opt": replace(SHAPE, family="opt", num_kv_heads=None, is_gated_mlp=False, has_bias=True,
                        has_learned_positions=True)}
LENGTHS, CAPACITY = [9, 1, 14], 24
BF16, F32 = torch.bfloat16, torch.float32


class Rounded(RandomWeights):
    """The values of bfloat16 weights, as float32."""

    def get(self, *arguments: object) -> Tensor:
        return super().get(*arguments).to(BF16).to(F32)  # type: ignore[arg-type]


def logits(spec: ModelSpec, weight_dtype: torch.dtype, stages: int, *, is_exact: bool = False,
           passed: list[torch.dtype] | None = None, shard: Shard | None = None) -> Tensor:
    """Of a decode step after an encode step, through that many stages; `passed` takes the types of
    what a stage gives to the next."""
    dtype = F32 if is_exact else BF16
    weights = (Rounded if is_exact else RandomWeights)(dtype, scale=0.3)
    models = [StageModel(spec, weights, stage, dtype, shard or Shard(), weight_dtype=weight_dtype)
              for stage in split_stages(spec.num_layers, stages)]
    caches = [torch.zeros(len(m.layers), 2, len(LENGTHS), m.kv_heads, CAPACITY, spec.head_dim,
                          dtype=dtype) for m in models]
    out = torch.arange(sum(LENGTHS)) * 7 % spec.vocab_size
    spans, step = encode_context(whole_inputs(LENGTHS)), decode_context([n + 1 for n in LENGTHS])
    with torch.inference_mode():
        for model, cache in zip(models, caches, strict=True):
            out = model.encode(out, cache, spans)
        out = torch.tensor([3, 50, 96])
        for model, cache in zip(models, caches, strict=True):
            out = model.decode(out, cache, step)
            if passed is not None and not model.is_last:
                passed.append(out.dtype)
        return logits_of(models[-1], out)


@pytest.mark.parametrize("family", SPECS)
@pytest.mark.parametrize("stages", [1, 3])
def test_logits_are_nearer_to_float32_than_those_of_bfloat16(family, stages):
    spec, passed = SPECS[family], list[torch.dtype]()
    exact = logits(spec, F32, 1, is_exact=True)
    narrow, wide = logits(spec, BF16, stages), logits(spec, F32, stages, passed=passed)
    assert wide.dtype == F32 and passed == [BF16] * (stages - 1)
    assert 0 < (wide - exact).norm() < 0.8 * (narrow.float() - exact).norm()


def test_sums_over_a_group_go_as_the_models_type():
    summed = list[tuple[torch.dtype, tuple[int, ...]]]()

    def all_reduce(tensor: Tensor) -> Tensor:
        summed.append((tensor.dtype, tuple(tensor.shape)))
        return tensor

    logits(SHAPE, F32, 1, shard=Shard(0, 3, all_reduce))
    rows = sum(LENGTHS)
    assert summed == [(BF16, (rows, 48))] * 8 + [(BF16, (3, 48))] * 8


def test_a_stage_leaves_what_it_is_given_as_it_is():
    """A message within one process is the sender's own tensor."""
    stage = split_stages(SHAPE.num_layers, 2)[1]
    for dtype, held in ((F32, F32), (BF16, BF16), (BF16, F32)):
        model = StageModel(SHAPE, RandomWeights(dtype, scale=0.3), stage, dtype, weight_dtype=held)
        cache = torch.zeros(2, 2, 1, 3, CAPACITY, 8, dtype=dtype)
        given = torch.randn(5, 48).to(dtype)
        before = given.clone()
        with torch.inference_mode():
            out = model.encode(given, cache, encode_context(whole_inputs([5])))
        assert torch.equal(given, before) and not torch.equal(out.to(dtype), before)
