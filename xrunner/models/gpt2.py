"""GPT-2 and GPT-3 layers: learned positions, pre-layer-norm, biases, GELU by tanh.

A checkpoint stores each linear weight as [in, out] (transformers' Conv1D), and query, key and value
as one such matrix; here they are turned to [out, in] once, when they are loaded.
"""

from functools import partial

import torch

from xgpt.core.model import ModelSpec
from xrunner.models.decoder import DecoderLayer, LayerWeights
from xrunner.models.learned import learned_ends, read_norm
from xrunner.models.mlp import PlainMlp
from xrunner.models.shard import WHOLE, Shard
from xrunner.models.weights import TensorPart, WeightSource
from xrunner.ops.linear import Product

gpt2_ends = partial(learned_ends, table=("wpe.weight", 0), norm_name="ln_f")


def gpt2_layer(spec: ModelSpec, weights: WeightSource, index: int,
               shard: Shard = WHOLE) -> DecoderLayer:
    """Makes a layer that computes what transformers' GPT2Block does."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    prefix = f"h.{index}."

    def columns(name: str, out: int, parts: list[TensorPart | None],
                activation: str = "none") -> Product:
        """`parts` of a product's columns: of the weight [H, out] and of the bias [out]."""
        held = [weights.get(f"{prefix}{name}.weight", (hidden, out), p).t() for p in parts]
        biases = [weights.get(f"{prefix}{name}.bias", (out,), _of_bias(p)) for p in parts]
        return Product(torch.cat(held).contiguous(), torch.cat(biases), activation=activation)

    def rows(name: str, into: int) -> Product:
        weight = weights.get(f"{prefix}{name}.weight", (into, hidden), shard.part(0, into))
        bias = weights.get(f"{prefix}{name}.bias", (hidden,)) if shard.is_first else None
        return Product(weight.t().contiguous(), bias)

    # a shard's heads lie in three places of the joint matrix: in query's, key's and value's
    joint = [shard.part(1, hidden, first=i * hidden) for i in range(3)]
    return DecoderLayer(spec, shard, index, LayerWeights(
        input_norm=read_norm(spec, weights, f"{prefix}ln_1"),
        qkv=columns("attn.c_attn", 3 * hidden, joint if shard.degree > 1 else [None]),
        out=rows("attn.c_proj", hidden),
        mlp_norm=read_norm(spec, weights, f"{prefix}ln_2"),
        mlp=PlainMlp(columns("mlp.c_fc", inner, [shard.part(1, inner)], "gelu"),
                     rows("mlp.c_proj", inner))))


def _of_bias(columns: TensorPart | None) -> TensorPart | None:
    return None if columns is None else TensorPart(0, columns.start, columns.stop)
