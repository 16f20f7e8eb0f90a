"""OPT layers: learned positions (offset 2), pre-layer-norm, biases, ReLU."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from xgpt.core.model import ModelSpec
from xrunner.models.pre_norm import PreNormEnds, PreNormLayer, read_norm
from xrunner.models.shard import WHOLE, Shard
from xrunner.models.weights import Part, WeightSource

POSITION_OFFSET = 2  # the first two rows of OPT's position table belong to padding


class OptLayer(PreNormLayer):
    """As in transformers' OPTDecoderLayer with do_layer_norm_before."""

    def __init__(self, spec: ModelSpec, weights: WeightSource, index: int,
                 shard: Shard = WHOLE) -> None:
        hidden, ffn = spec.hidden_size, spec.intermediate_size
        super().__init__(spec, shard, F.relu)
        prefix = f"model.decoder.layers.{index}."

        def bias(name: str, out: int, part: Part | None) -> Tensor | None:
            return weights.get(f"{prefix}{name}.bias", (out,), part) if spec.has_bias else None

        def columns(name: str, out: int, into: int) -> tuple[Tensor, Tensor | None]:
            part = shard.part(0, out)
            return (weights.get(f"{prefix}{name}.weight", (out, into), part),
                    bias(name, out, part))

        def rows(name: str, out: int, into: int) -> tuple[Tensor, Tensor | None]:
            return (weights.get(f"{prefix}{name}.weight", (out, into), shard.part(1, into)),
                    bias(name, out, None) if shard.is_first else None)

        parts = [columns(f"self_attn.{n}_proj", hidden, hidden) for n in "qkv"]
        self.qkv_weight = torch.cat([weight for weight, _ in parts])
        biases = [bias for _, bias in parts if bias is not None]
        self.qkv_bias = torch.cat(biases) if biases else None
        self.out_weight, self.out_bias = rows("self_attn.out_proj", hidden, hidden)
        self.up_weight, self.up_bias = columns("fc1", ffn, hidden)
        self.down_weight, self.down_bias = rows("fc2", hidden, ffn)
        self.input_norm = read_norm(weights, f"{prefix}self_attn_layer_norm", hidden)
        self.mlp_norm = read_norm(weights, f"{prefix}final_layer_norm", hidden)


class OptEnds(PreNormEnds):
    """Both ends, under a checkpoint's names."""

    def __init__(self, spec: ModelSpec, weights: WeightSource, *, first: bool, last: bool,
                 shard: Shard = WHOLE) -> None:
        super().__init__(
            spec, weights, first=first, last=last, shard=shard,
            tokens="model.decoder.embed_tokens.weight", norm="model.decoder.final_layer_norm",
            positions="model.decoder.embed_positions.weight", position_offset=POSITION_OFFSET)
