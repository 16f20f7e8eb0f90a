"""OPT (positions offset by 2, ReLU) and GPT-2 and 3 (GELU by tanh): layer norms with biases ahead
of each block, and positions that are learned as a table."""

from functools import partial

import torch
from torch import Tensor

from xgpt.core.model import ModelSpec
from xrunner.models.decoder import (
    DecoderEnds,
    DecoderLayer,
    EndWeights,
    LayerWeights,
    Norm,
    PlainMlp,
)
from xrunner.models.weights import (
    WHOLE,
    Shard,
    TensorPart,
    WeightSource,
    embedding_weight,
    head_weight,
)
from xrunner.ops.linear import Product
from xrunner.ops.output_head import OutputHead


def learned_ends(spec: ModelSpec, weights: WeightSource, *, first: bool, last: bool,
                 table: tuple[str, int], norm_name: str, shard: Shard = WHOLE) -> DecoderEnds:
    """`table`: what a family's checkpoints call that of positions, and its row of position 0."""
    assert spec.max_positions is not None, "a model with learned positions"
    embedding = positions = norm = head = None
    name, offset = table
    if first:
        embedding = embedding_weight(spec, weights)
        positions = weights.get(name, (spec.max_positions + offset, spec.hidden_size))
    if last:
        norm = read_norm(spec, weights, norm_name)
        head = OutputHead(head_weight(spec, weights, embedding, shard))
    return DecoderEnds(spec, EndWeights(embedding, positions, offset, norm, head))


def read_norm(spec: ModelSpec, weights: WeightSource, name: str) -> Norm:
    size = (spec.hidden_size,)
    return Norm(weights.get(f"{name}.weight", size), weights.get(f"{name}.bias", size),
                spec.norm_eps)


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
