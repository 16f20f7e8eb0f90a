"""The checkpoints of gated decoders (Llama and what came after it), read into a decoder layer."""

from functools import partial

import torch
from torch import Tensor

from xgpt.core.model import ModelSpec
from xrunner.checkpoint.layout import EXPERTS, norm_names
from xrunner.models.decoder import (
    DecoderLayer,
    GatedMlp,
    HeadNorms,
    LayerWeights,
    Mixture,
    Mlp,
    Norm,
    all_heads,
    read_ends,
    rms_weight,
)
from xrunner.models.rotary import element_order
from xrunner.models.weights import (
    WHOLE,
    Shard,
    TensorPart,
    WeightSource,
)
from xrunner.ops.linear import Product


class _Reader:
    """Reads one layer's weights: rank `shard` of `model.layers.i`."""

    def __init__(self, spec: ModelSpec, weights: WeightSource, index: int, shard: Shard) -> None:
        self._spec, self._weights, self._shard = spec, weights, shard
        self._prefix, self._order = f"model.layers.{index}.", element_order(spec)

    def layer(self) -> LayerWeights:
        names = norm_names(self._spec)
        return LayerWeights(
            qkv=self._qkv(), out=self._out(), mlp=self._mlp(), head_norms=self._head_norms(),
            **{role: Norm(self._norm(name), None, self._spec.norm_eps)
               for role, name in names.items()})

    def _norm(self, name: str) -> Tensor:
        return rms_weight(self._weights, self._prefix + name, self._spec.hidden_size,
                          adds_one=self._spec.decoder.norm_adds_one)

    def _columns(self, name: str, *shape: int, first: int = 0, size: int | None = None) -> Tensor:
        """This shard's rows of a weight or bias (columns of the product); of the `size` of them
        from `first` on, where several are stored as one."""
        part = self._shard.part(0, size or shape[0], first=first)
        if part is None and size is not None:
            part = TensorPart(0, first, first + size)
        return self._weights.get(self._prefix + name, shape, part)

    def _rows(self, name: str, *shape: int) -> Tensor:
        return self._weights.get(self._prefix + name, shape, self._shard.part(1, shape[1]))

    def _qkv(self) -> Product:
        spec, hidden = self._spec, self._spec.hidden_size
        width, kv_width = spec.num_heads * spec.head_dim, spec.kv_heads * spec.head_dim
        sizes = {"q": width, "k": kv_width, "v": kv_width}
        parts, biases, first = [], [], 0
        for name, size in sizes.items():
            if spec.decoder.is_fused:
                weight = self._columns("self_attn.qkv_proj.weight", sum(sizes.values()), hidden,
                                       first=first, size=size)
                first += size
            else:
                weight = self._columns(f"self_attn.{name}_proj.weight", size, hidden)
            parts.append(self._ordered(weight) if name != "v" else weight)
            if spec.qkv_bias:
                bias = self._columns(f"self_attn.{name}_proj.bias", size)
                biases.append(self._ordered(bias) if name != "v" else bias)
        # one product instead of three: fewer, larger kernels at small batches
        return Product(torch.cat(parts), torch.cat(biases) if biases else None)

    def _ordered(self, rows: Tensor) -> Tensor:
        """Rows of heads' elements [h d, ...] in the order in which they are rotated."""
        if self._order is None:
            return rows
        heads = rows.view(-1, self._spec.head_dim, *rows.shape[1:])
        return heads[:, self._order.to(rows.device)].reshape(rows.shape)

    def _head_norms(self) -> HeadNorms | None:
        spec, kind, name = self._spec, self._spec.decoder.qk_norm, "self_attn.{}_norm"
        if not kind:
            return None
        dim, shard, counts = spec.head_dim, self._shard, (spec.num_heads, spec.kv_heads)
        sides = [(self._prefix + name.format(side), count)
                 for side, count in zip("qk", counts, strict=True)]
        if kind == "head":
            weight = torch.cat([
                rms_weight(self._weights, own, dim, adds_one=spec.decoder.norm_adds_one
                           ).expand(shard.share(count), dim) for own, count in sides])
            return HeadNorms(self._heads_ordered(weight), spec.norm_eps)
        weight = torch.cat([all_heads(self._weights, own, count, dim, shard)
                            for own, count in sides])
        return HeadNorms(self._heads_ordered(weight), spec.norm_eps,
                         over=(counts[0] * dim, counts[1] * dim),
                         sums=None if shard.degree == 1 else shard.exact_sum)

    def _heads_ordered(self, weight: Tensor) -> Tensor:
        """[heads, d]"""
        return weight if self._order is None else weight[:, self._order.to(weight.device)]

    def _out(self) -> Product:
        spec, width = self._spec, self._spec.num_heads * self._spec.head_dim
        has_bias = spec.out_bias and self._shard.is_first
        bias = self._weights.get(f"{self._prefix}self_attn.o_proj.bias",
                                 (spec.hidden_size,)) if has_bias else None
        return Product(self._rows("self_attn.o_proj.weight", spec.hidden_size, width), bias)

    def _mlp(self) -> Mlp:
        spec, hidden, inner = self._spec, self._spec.hidden_size, self._spec.intermediate_size
        if spec.decoder.experts is not None:
            return self._mixture()
        if spec.decoder.is_fused:
            name = "mlp.gate_up_proj.weight"
            gate_up = torch.cat([self._columns(name, 2 * inner, hidden, first=first, size=inner)
                                 for first in (0, inner)])
        else:
            gate_up = torch.cat([self._columns(f"mlp.{name}_proj.weight", inner, hidden)
                                 for name in ("gate", "up")])
        down = Product(self._rows("mlp.down_proj.weight", hidden, inner))
        return GatedMlp(gate_up, down, spec.activation)

    def _mixture(self) -> Mixture:
        experts, hidden = self._spec.decoder.experts, self._spec.hidden_size
        assert experts is not None
        names = EXPERTS[experts.names]
        router = self._weights.get(f"{self._prefix}{names.router}.weight", (experts.count, hidden))
        mlps = []
        for index in range(experts.count):
            gate, up, down = (f"{names.expert.format(index)}.{name}.weight"
                              for name in (names.gate, names.up, names.down))
            joint = torch.cat([self._columns(name, experts.inner, hidden) for name in (gate, up)])
            mlps.append(GatedMlp(joint, Product(self._rows(down, hidden, experts.inner)),
                                 self._spec.activation))
        return Mixture(router, mlps, experts)


def gated_layer(spec: ModelSpec, weights: WeightSource, index: int,
                shard: Shard = WHOLE) -> DecoderLayer:
    """As in transformers' decoder layer of the family."""
    return DecoderLayer(spec, shard, index, _Reader(spec, weights, index, shard).layer())


gated_ends = partial(read_ends, norm="model.norm")
