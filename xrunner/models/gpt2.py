"""GPT-2 and GPT-3 layers: learned positions, pre-layer-norm, biases, GELU by tanh.

A checkpoint stores each linear weight as [in, out] (transformers' Conv1D), and query, key and value
as one such matrix; here they are turned to [out, in] once, when they are loaded.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from xgpt.core.model import ModelSpec
from xrunner.models.pre_norm import PreNormEnds, PreNormLayer, read_norm
from xrunner.models.shard import WHOLE, Shard
from xrunner.models.weights import Part, WeightSource


class Gpt2Layer(PreNormLayer):
    """As in transformers' GPT2Block."""

    def __init__(self, spec: ModelSpec, weights: WeightSource, index: int,
                 shard: Shard = WHOLE) -> None:
        hidden, inner = spec.hidden_size, spec.intermediate_size
        super().__init__(spec, shard, partial(F.gelu, approximate="tanh"))
        prefix = f"h.{index}."

        def columns(name: str, out: int, parts: list[Part | None]) -> tuple[Tensor, Tensor]:
            """`parts` of a product's columns: of the weight [H, out] and of the bias [out]."""
            held = [weights.get(f"{prefix}{name}.weight", (hidden, out), p).t() for p in parts]
            biases = [weights.get(f"{prefix}{name}.bias", (out,), _of_bias(p)) for p in parts]
            return torch.cat(held).contiguous(), torch.cat(biases)

        def rows(name: str, into: int) -> tuple[Tensor, Tensor | None]:
            weight = weights.get(f"{prefix}{name}.weight", (into, hidden), shard.part(0, into))
            bias = weights.get(f"{prefix}{name}.bias", (hidden,)) if shard.is_first else None
            return weight.t().contiguous(), bias

        # a shard's heads lie in three places of the joint matrix: in query's, key's and value's
        joint = [shard.part(1, hidden, first=i * hidden) for i in range(3)]
        self.qkv_weight, self.qkv_bias = columns("attn.c_attn", 3 * hidden,
                                                 joint if shard.degree > 1 else [None])
        self.out_weight, self.out_bias = rows("attn.c_proj", hidden)
        self.up_weight, self.up_bias = columns("mlp.c_fc", inner, [shard.part(1, inner)])
        self.down_weight, self.down_bias = rows("mlp.c_proj", inner)
        self.input_norm = read_norm(weights, f"{prefix}ln_1", hidden)
        self.mlp_norm = read_norm(weights, f"{prefix}ln_2", hidden)


class Gpt2Ends(PreNormEnds):
    """Both ends, under a checkpoint's names."""

    def __init__(self, spec: ModelSpec, weights: WeightSource, *, first: bool, last: bool,
                 shard: Shard = WHOLE) -> None:
        super().__init__(spec, weights, first=first, last=last, shard=shard, tokens="wte.weight",
                         positions="wpe.weight", norm="ln_f")


def _of_bias(columns: Part | None) -> Part | None:
    return None if columns is None else Part(0, columns.start, columns.stop)
