"""OPT layers: learned positions (offset 2), pre-layer-norm, biases, ReLU."""

from functools import partial

import torch
from torch import Tensor

from xgpt.core.model import ModelSpec
from xrunner.models.decoder import DecoderLayer, LayerWeights
from xrunner.models.learned import learned_ends, read_norm
from xrunner.models.mlp import PlainMlp
from xrunner.models.shard import WHOLE, Shard
from xrunner.models.weights import TensorPart, WeightSource
from xrunner.ops.linear import Product

POSITION_OFFSET = 2  # the first two rows of OPT's position table belong to padding
opt_ends = partial(learned_ends, norm_name="model.decoder.final_layer_norm",
                   table=("model.decoder.embed_positions.weight", POSITION_OFFSET))


def opt_layer(spec: ModelSpec, weights: WeightSource, index: int,
              shard: Shard = WHOLE) -> DecoderLayer:
    """Makes a layer that computes what transformers' OPTDecoderLayer does, with
    do_layer_norm_before."""
    hidden, ffn = spec.hidden_size, spec.intermediate_size
    prefix = f"model.decoder.layers.{index}."

    def bias(name: str, out: int, part: TensorPart | None) -> Tensor | None:
        return weights.get(f"{prefix}{name}.bias", (out,), part) if spec.has_bias else None

    def columns(name: str, out: int, into: int) -> tuple[Tensor, Tensor | None]:
        part = shard.part(0, out)
        return weights.get(f"{prefix}{name}.weight", (out, into), part), bias(name, out, part)

    def rows(name: str, out: int, into: int) -> Product:
        return Product(weights.get(f"{prefix}{name}.weight", (out, into), shard.part(1, into)),
                       bias(name, out, None) if shard.is_first else None)

    parts = [columns(f"self_attn.{n}_proj", hidden, hidden) for n in "qkv"]
    biases = [bias for _, bias in parts if bias is not None]
    return DecoderLayer(spec, shard, index, LayerWeights(
        input_norm=read_norm(spec, weights, f"{prefix}self_attn_layer_norm"),
        qkv=Product(torch.cat([weight for weight, _ in parts]),
                    torch.cat(biases) if biases else None),
        out=rows("self_attn.out_proj", hidden, hidden),
        mlp_norm=read_norm(spec, weights, f"{prefix}final_layer_norm"),
        mlp=PlainMlp(Product(*columns("fc1", ffn, hidden), activation="relu"),
                     rows("fc2", hidden, ffn))))
