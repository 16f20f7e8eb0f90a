"""OPT (positions offset by 2, ReLU) and GPT-2 and 3 (GELU by tanh): layer norms with biases ahead
of each block, and positions that are learned as a table."""

from functools import partial

import torch

from xgpt.core.model import ModelSpec
from xrunner.models.cross import POSITION_OFFSET, BartReader
from xrunner.models.decoder import DecoderLayer, LayerWeights, PlainMlp, read_ends, read_norm
from xrunner.models.weights import WHOLE, Shard, TensorPart, WeightSource
from xrunner.ops.linear import Product

opt_ends = partial(read_ends, norm="model.decoder.final_layer_norm",
                   table=("model.decoder.embed_positions.weight", POSITION_OFFSET))


def opt_layer(spec: ModelSpec, weights: WeightSource, index: int,
              shard: Shard = WHOLE) -> DecoderLayer:
    """As in transformers' OPTDecoderLayer, with do_layer_norm_before: a decoder's layer of BART's
    without its cross-attention."""
    read = BartReader(spec, weights, "model.decoder", index, shard)
    return DecoderLayer(spec, shard, index, LayerWeights(
        input_norm=read.norm("self"), qkv=read.joint("self", "qkv"), out=read.output("self"),
        mlp_norm=read.norm("mlp"), mlp=read.mlp()))


gpt2_ends = partial(read_ends, table=("wpe.weight", 0), norm="ln_f")


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
