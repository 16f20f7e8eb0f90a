"""The slice of a model that one stage holds, and the readers of decoder-only checkpoints. OPT
(positions offset by 2, ReLU), GPT-2 and GPT-3 (GELU by tanh) have layer norms with biases and
learned positions. Gated decoders are Llama and its successors."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from xgpt.core.deployment import StageAssignment
from xgpt.core.errors import XgptError
from xgpt.core.model import ModelSpec, refuse_tp_degree
from xrunner.checkpoint.layout import EXPERTS, norm_names
from xrunner.models.cross import (
    POSITION_OFFSET,
    T5_SCORING,
    BartReader,
    CrossLayer,
    EncoderLayer,
    T5Reader,
    bart_ends,
    t5_ends,
)
from xrunner.models.decoder import (
    DecoderEnds,
    DecoderLayer,
    GatedMlp,
    HeadNorms,
    LayerWeights,
    Mixture,
    Mlp,
    Norm,
    PlainMlp,
    all_heads,
    read_norm,
    rms_weight,
)
from xrunner.models.passes import Pass
from xrunner.models.rotary import element_order
from xrunner.models.weights import WHOLE, PlacedWeights, Shard, TensorPart, WeightSource
from xrunner.ops.attention import PLAIN, Scoring
from xrunner.ops.contexts import DecodeContext, EncodeContext, Layers
from xrunner.ops.linear import Product, activations_of
from xrunner.ops.output_head import Scores

opt_ends = partial(DecoderEnds, norm="model.decoder.final_layer_norm",
                   table=("model.decoder.embed_positions.weight", POSITION_OFFSET))


def opt_layer(spec: ModelSpec, weights: WeightSource, index: int,
              shard: Shard = WHOLE) -> DecoderLayer:
    """A layer as transformers' OPTDecoderLayer with do_layer_norm_before. It is a decoder layer of
    BART without cross-attention."""
    read = BartReader(spec, weights, "model.decoder", index, shard)
    return DecoderLayer(spec, shard, index, LayerWeights(
        input_norm=read.norm("self"), qkv=read.joint("self", "qkv"), out=read.output("self"),
        mlp_norm=read.norm("mlp"), mlp=read.mlp()))


gpt2_ends = partial(DecoderEnds, table=("wpe.weight", 0), norm="ln_f")


def gpt2_layer(spec: ModelSpec, weights: WeightSource, index: int,
               shard: Shard = WHOLE) -> DecoderLayer:
    """A layer as transformers' GPT2Block."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    prefix = f"h.{index}."

    def columns(name: str, out: int, parts: list[TensorPart | None],
                activation: str = "none") -> Product:
        """Product of these parts of the columns of a weight [H, out] and its bias [out]."""
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


class _Reader:
    """Reads one layer's weights: rank `shard` of `model.layers.i`."""

    def __init__(self, spec: ModelSpec, weights: WeightSource, index: int, shard: Shard) -> None:
        self._spec, self._weights, self._shard = spec, weights, shard
        self._kv_shard = shard.of_kv(spec)
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

    def _columns(self, name: str, *shape: int, first: int = 0, size: int | None = None,
                 shard: Shard | None = None) -> Tensor:
        """This shard's rows of a weight or bias (columns of the product). first, size: of these
        rows alone, where several weights are stored as one."""
        part = (shard or self._shard).part(0, size or shape[0], first=first)
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
            own = self._shard if name == "q" else self._kv_shard
            if spec.decoder.is_fused:
                weight = self._columns("self_attn.qkv_proj.weight", sum(sizes.values()), hidden,
                                       first=first, size=size, shard=own)
                first += size
            else:
                weight = self._columns(f"self_attn.{name}_proj.weight", size, hidden, shard=own)
            parts.append(self._ordered(weight) if name != "v" else weight)
            if spec.qkv_bias:
                bias = self._columns(f"self_attn.{name}_proj.bias", size, shard=own)
                biases.append(self._ordered(bias) if name != "v" else bias)
        # one product instead of three: fewer, larger kernels at small batches
        return Product(torch.cat(parts), torch.cat(biases) if biases else None)

    def _ordered(self, rows: Tensor) -> Tensor:
        """Rows of heads' elements [h d, ...] in the order of rotation."""
        if self._order is None:
            return rows
        heads = rows.view(-1, self._spec.head_dim, *rows.shape[1:])
        return heads[:, self._order.to(rows.device)].reshape(rows.shape)

    def _head_norms(self) -> HeadNorms | None:
        spec, kind, name = self._spec, self._spec.decoder.qk_norm, "self_attn.{}_norm"
        if not kind:
            return None
        dim, shard, kv_shard = spec.head_dim, self._shard, self._kv_shard
        sides = [(self._prefix + name.format(side), count, part) for side, count, part in (
            ("q", spec.num_heads, shard), ("k", spec.kv_heads, kv_shard))]
        if kind == "head":
            weight = torch.cat([
                rms_weight(self._weights, own, dim, adds_one=spec.decoder.norm_adds_one
                           ).expand(part.share(count), dim) for own, count, part in sides])
            return HeadNorms(self._heads_ordered(weight), spec.norm_eps)
        weight = torch.cat([all_heads(self._weights, own, count, dim, part)
                            for own, count, part in sides])
        # the group's sums count a copied head once a copy
        keys = spec.kv_heads * shard.degree // kv_shard.degree
        return HeadNorms(self._heads_ordered(weight), spec.norm_eps,
                         over=(spec.num_heads * dim, keys * dim),
                         sums=None if shard.degree == 1 else shard.exact_sum)

    def _heads_ordered(self, weight: Tensor) -> Tensor:
        """The weight [heads, d] in the order of rotation."""
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
    """A layer as transformers' decoder layer of the family."""
    return DecoderLayer(spec, shard, index, _Reader(spec, weights, index, shard).layer())


gated_ends = partial(DecoderEnds, norm="model.norm")


class Family(NamedTuple):
    """Readers of a checkpoint's layers and ends, by its names and layout."""

    layer: Callable[[ModelSpec, WeightSource, int, Shard], DecoderLayer]
    ends: Callable[..., DecoderEnds]


FAMILIES: dict[str, Family] = {
    "llama": Family(gated_layer, gated_ends),
    "opt": Family(opt_layer, opt_ends),
    "gpt2": Family(gpt2_layer, gpt2_ends),
}


class EncoderDecoder(NamedTuple):
    """Readers of an encoder-decoder family's layers and ends, and how its scores are computed."""

    scoring: Scoring
    encoder_layer: Callable[[ModelSpec, WeightSource, int, Shard], EncoderLayer]
    encoder_ends: Callable[..., Any]  # CrossEnds
    decoder_layer: Callable[[ModelSpec, WeightSource, int, Shard], CrossLayer]
    decoder_ends: Callable[..., Any]


# Executed by xrunner.models.encoder_decoder.
ENCODER_DECODER_CLASSES: dict[str, EncoderDecoder] = {
    name: EncoderDecoder(scoring, partial(EncoderLayer, reader), partial(ends, "encoder"),
                         partial(CrossLayer, reader), partial(ends, "decoder"))
    for name, scoring, reader, ends in (("t5", T5_SCORING, T5Reader, t5_ends),
                                        ("bart", PLAIN, BartReader, bart_ends))}


PIECE_TOKENS = 2080  # chosen: as many as XProfiler's largest usual encode step


def packed(layer: Any, weight_dtype: torch.dtype) -> Any:
    """Packs the layer's products for the processor and returns the layer."""
    for product in layer.products:
        product.pack(weight_dtype)
    return layer


class Stage:
    """One rank's `shard` of every layer and of the head of a stage, on `device`. Weights are
    multiplied as `as_type`. Activations are of `work_dtype` (float32 for int8 weights); caches and
    messages of `dtype`."""

    ends: Any

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, shard: Shard,
                 device: torch.device | str, weight_dtype: torch.dtype | None) -> None:
        """`weight_dtype`: None for `dtype`. Raises XgptError if the model cannot be split that
        way."""
        if (reason := refuse_tp_degree(spec, shard.degree)) is not None:
            raise XgptError(f"model {spec.name!r}: {reason}")
        self.spec, self.dtype, self.shard, self.device = spec, dtype, shard, torch.device(device)
        self.as_type = weight_dtype or dtype
        self.work_dtype = activations_of(self.as_type)

    @property
    def kv_heads(self) -> int:
        """Number of KV heads of this shard."""
        return self.shard.of_kv(self.spec).share(self.spec.kv_heads)

    def scores(self, hidden: Tensor) -> Scores:
        """Logits [n, V_local] of this shard's tokens, from hidden [n, H]; last stage only."""
        scores: Scores = self.ends.scores(hidden)
        return scores


class StageReader(NamedTuple):
    """Readers of a stage's layers, by their number in it, and of its ends from `weights`, or from a
    source that stands for it."""

    weights: WeightSource
    layer: Callable[[WeightSource, int], DecoderLayer]
    ends: Callable[[WeightSource], DecoderEnds]


class StageModel(Stage):
    """Layers first_layer .. first_layer + num_layers - 1 of a decoder-only model; it loads only
    these. `narrows`: the last layer skips rows that nobody reads. XProfiler, which times whole
    layers, turns it off."""

    narrows = True
    ends: DecoderEnds

    def __init__(self, spec: ModelSpec, weights: WeightSource, stage: StageAssignment,
                 dtype: torch.dtype, shard: Shard = WHOLE,
                 device: torch.device | str = "cpu",
                 weight_dtype: torch.dtype | None = None) -> None:
        assert spec.family in FAMILIES, f"{spec.family = } is not decoder-only"
        super().__init__(spec, dtype, shard, device, weight_dtype)
        family = FAMILIES[spec.family]
        self.is_first = stage.first_layer == 0
        self.is_last = stage.first_layer + stage.num_layers == spec.num_layers
        placed, shard = PlacedWeights(weights, self.device, self.work_dtype), shard.rounding(dtype)
        self.layers, self.ends = self._held(StageReader(
            placed,
            lambda own, index: family.layer(spec, own, stage.first_layer + index, shard),
            lambda own: family.ends(spec, own, first=self.is_first, last=self.is_last,
                                    shard=shard)), stage.num_layers)

    def _held(self, read: StageReader, count: int) -> tuple[Sequence[DecoderLayer], DecoderEnds]:
        """The stage's `count` layers and its ends, packed for the processor."""
        layers = [packed(read.layer(read.weights, index), self.as_type) for index in range(count)]
        ends = read.ends(read.weights)
        if ends.head is not None:
            ends.head.pack(self.as_type)
        return layers, ends

    def encode(self, inputs: Tensor, cache: Layers, step: EncodeContext, *,
               ends_only: bool = False) -> Tensor:
        """Hidden states [T, H] of whole inputs or spans of them, packed. `inputs`: tokens [T] on
        the first stage, hidden [T, H] after it. `cache`: [layers, 2, slots, k, capacity, d].
        `ends_only`: as in `mixed`."""
        return self.mixed(inputs, cache, None, step, ends_only=ends_only)

    def decode(self, inputs: Tensor, cache: Layers, step: DecodeContext) -> Tensor:
        """Hidden states [n, H] of one token of each active request. `inputs`: tokens [n] on the
        first stage, hidden [n, H] after it."""
        return self.mixed(inputs, cache, step, None)

    def mixed(self, inputs: Tensor, cache: Layers, decoded: DecodeContext | None,
              encoded: EncodeContext | None, *, ends_only: bool = False) -> Tensor:
        """Hidden states [n + T, H] of a decode step and of spans of inputs, in one pass.

        `inputs`: tokens [n + T] on the first stage, hidden [n + T, H] after it; decoding rows come
        first. decoded, encoded: None for no rows of that kind.

        ends_only, on the last stage: returns of the spans only rows that predict a token. For the
        others the last layer ends once their keys and values are cached.

        On a CPU more than PIECE_TOKENS rows are computed in pieces of at most as many (a longer
        span is one piece). Together they are no faster and exceed the processor's caches (measured:
        17 % slower at 6,900)."""
        if encoded is None or self.device.type != "cpu" or len(inputs) <= PIECE_TOKENS:
            return self._together(inputs, cache, decoded, encoded, ends_only=ends_only)
        n = 0 if decoded is None else len(decoded.slots)
        out = [] if decoded is None else [self._together(inputs[:n], cache, decoded, None)]
        out += [self._together(inputs[n:][rows], cache, None, piece, ends_only=ends_only)
                for rows, piece in encoded.pieces(PIECE_TOKENS)]
        return torch.cat(out)

    def _together(self, inputs: Tensor, cache: Layers, decoded: DecodeContext | None,
                  encoded: EncodeContext | None, *, ends_only: bool = False) -> Tensor:
        own = Pass(self, inputs, decoded, encoded, ends_only=ends_only)
        last = len(self.layers) - 1
        for index, (layer, entries) in enumerate(zip(self.layers, cache, strict=True)):
            own.through(layer, entries, is_last=index == last)
        return own.output()

    def embedded(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Hidden states [T, H] of tokens [T]; first stage only. Positions are clamped to the
        model's: a static batch decodes finished rows on, which nobody reads."""
        most = self.spec.max_positions
        return self.ends.embed(tokens, positions if most is None else positions.clamp(max=most - 1))

    def normed(self, hidden: Tensor) -> Tensor:
        """Last hidden states [n, H] after the final norm; last stage only."""
        return self.ends.normed(hidden)
