"""The slice of a model that one stage holds: its layers, and the ends where it has them."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from xgpt.core.deployment import StageAssignment
from xgpt.core.errors import XgptError
from xgpt.core.model import ModelSpec, refuse_tp_degree
from xrunner.models.cross import (
    T5_SCORING,
    BartReader,
    CrossLayer,
    EncoderLayer,
    T5Reader,
    bart_ends,
    t5_ends,
)
from xrunner.models.decoder import DecoderEnds, DecoderLayer
from xrunner.models.gated import gated_ends, gated_layer
from xrunner.models.learned import gpt2_ends, gpt2_layer, opt_ends, opt_layer
from xrunner.models.weights import WHOLE, OnDevice, Shard, WeightSource, WideVectors
from xrunner.ops.attention import PLAIN, Scoring, decode_attention, encode_attention
from xrunner.ops.contexts import DecodeContext, EncodeContext, Layers, Places
from xrunner.ops.linear import activations_of
from xrunner.ops.output_head import Scores
from xrunner.ops.rows import Residual, place


class Family(NamedTuple):
    """Reads a checkpoint's layers and ends, by its names and layout."""

    layer: Callable[[ModelSpec, WeightSource, int, Shard], DecoderLayer]
    ends: Callable[..., DecoderEnds]


FAMILIES: dict[str, Family] = {
    "llama": Family(gated_layer, gated_ends),
    "opt": Family(opt_layer, opt_ends),
    "gpt2": Family(gpt2_layer, gpt2_ends),
}


class EncoderDecoder(NamedTuple):
    """How an encoder-decoder family's layers and ends of either side are read, and the scores of
    all its attention made."""

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


PIECE_TOKENS = 2080  # as many as XProfiler's largest usual encode step


def packed(layer: Any, weight_dtype: torch.dtype) -> Any:
    """The layer, its products laid out for the processor."""
    for product in layer.products:
        product.pack(weight_dtype)
    return layer


def residual(inputs: Tensor, dtype: torch.dtype, *, is_own: bool) -> Residual:
    """What a step begins with, as `dtype`. `is_own`: nobody else has the tensor (within a process
    a message may be another rank's, too)."""
    hidden = inputs.to(dtype)
    return Residual(hidden if is_own or hidden is not inputs else inputs.clone())


class StageModel:
    """Layers first_layer .. first_layer + num_layers - 1. Loads only what the stage executes.

    `narrows`: whether the last layer leaves out what nobody asks for; XProfiler, which times whole
    layers, lets it do all."""

    narrows = True

    def __init__(self, spec: ModelSpec, weights: WeightSource, stage: StageAssignment,
                 dtype: torch.dtype, shard: Shard = WHOLE,
                 device: torch.device | str = "cpu",
                 weight_dtype: torch.dtype | None = None) -> None:
        """`shard`: this rank's part of every layer and of the head; weights go to `device`, and
        are multiplied as `weight_dtype` (None: `dtype`). Activations are of that type, too (int8:
        float32, narrowed within a product); the cache, and what goes to other ranks, of
        `dtype`."""
        assert spec.family in FAMILIES, f"{spec.family = } is not decoder-only"
        if (reason := refuse_tp_degree(spec, shard.degree)) is not None:
            raise XgptError(f"model {spec.name!r}: {reason}")
        family = FAMILIES[spec.family]
        self.spec, self.dtype, self.shard, self.device = spec, dtype, shard, torch.device(device)
        self.is_first = stage.first_layer == 0
        self.is_last = stage.first_layer + stage.num_layers == spec.num_layers
        placed = weights if self.device.type == "cpu" else OnDevice(weights, self.device)
        as_type = weight_dtype or dtype
        self.work_dtype = activations_of(as_type)
        placed, shard = WideVectors(placed, self.work_dtype), shard.rounding(dtype)
        self.layers: list[DecoderLayer] = [
            packed(family.layer(spec, placed, stage.first_layer + i, shard), as_type)
            for i in range(stage.num_layers)]
        self.ends = family.ends(spec, placed, first=self.is_first, last=self.is_last, shard=shard)
        if self.ends.head is not None:
            self.ends.head.pack(as_type)

    @property
    def kv_heads(self) -> int:
        """Key-value heads of this shard, as its caches hold them."""
        return self.shard.share(self.spec.kv_heads)

    def encode(self, inputs: Tensor, cache: Layers, step: EncodeContext, *,
               ends_only: bool = False) -> Tensor:
        """Whole inputs, or spans of them, packed. `inputs`: tokens [T] on the first stage, hidden
        [T, H] after it; cache [layers, 2, slots, k, capacity, d]. Returns hidden [T, H], or of
        `ends_only` as `mixed` does."""
        return self.mixed(inputs, cache, None, step, ends_only=ends_only)

    def decode(self, inputs: Tensor, cache: Layers, step: DecodeContext) -> Tensor:
        """One token of each active query. `inputs`: tokens [n] on the first stage, hidden [n, H]
        after it. Returns hidden [n, H]."""
        return self.mixed(inputs, cache, step, None)

    def mixed(self, inputs: Tensor, cache: Layers, decoded: DecodeContext | None,
              encoded: EncodeContext | None, *, ends_only: bool = False) -> Tensor:
        """One token of each of n queries (None: of none), then spans of inputs (None: none),
        packed: one product for all rows, attention apart (ORCA's selective batching). `inputs`:
        tokens [n + T] on the first stage, hidden [n + T, H] after it. Returns hidden [n + T, H].

        `ends_only` (of the last stage): of the spans, those rows alone that predict a token, an
        input's last; for the others the last layer ends once their keys and values are cached.

        On a CPU more than PIECE_TOKENS rows go through the layers in pieces of at most so many (but
        for a longer span): they are no quicker together, and leave its caches (measured: a sixth
        slower at 6,900)."""
        if encoded is None or self.device.type != "cpu" or len(inputs) <= PIECE_TOKENS:
            return self._together(inputs, cache, decoded, encoded, ends_only=ends_only)
        n = 0 if decoded is None else len(decoded.slots)
        out = [] if decoded is None else [self._together(inputs[:n], cache, decoded, None)]
        out += [self._together(inputs[n:][rows], cache, None, piece, ends_only=ends_only)
                for rows, piece in encoded.pieces(PIECE_TOKENS)]
        return torch.cat(out)

    def _together(self, inputs: Tensor, cache: Layers, decoded: DecodeContext | None,
                  encoded: EncodeContext | None, *, ends_only: bool = False) -> Tensor:
        n = 0 if decoded is None else len(decoded.slots)
        kept = None  # rows that the last layer goes on with; None: all
        if ends_only and encoded is not None:
            kept = torch.cat([torch.arange(n, device=inputs.device), encoded.ends + n])
        positions, *where = (torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(
            *((step.positions, *step.places) for step in (decoded, encoded) if step is not None),
            strict=True))
        places = Places(*where)
        hidden = residual(self.ends.embed(inputs, self._within(positions))
                          if self.is_first else inputs, self.work_dtype, is_own=self.is_first)
        rotations = self.ends.rotation(positions)
        for layer, (keys, values) in zip(self.layers, cache, strict=True):
            query = place(layer.qkv(hidden), layer.heads, (keys, values), places,
                          None if layer.rotary is None else rotations[layer.rotary])
            attended = []
            if decoded is not None:
                attended.append(decode_attention(query if encoded is None else query[:n],
                                                 (keys, values), decoded, layer.scoring))
            if encoded is not None:
                attended.append(encode_attention(query if decoded is None else query[n:],
                                                 (keys, values), encoded, layer.scoring))
            every = attended[0] if len(attended) == 1 else torch.cat(attended)
            if kept is not None and layer is self.layers[-1] and self.narrows:
                hidden, every, kept = Residual(hidden.total()[kept]), every[kept], None
            layer.finish(hidden, every)
        if kept is not None:
            hidden = Residual(hidden.total()[kept])
        return hidden.total() if self.is_last else hidden.total().to(self.dtype)

    def _within(self, positions: Tensor) -> Tensor:
        """A static batch decodes the rows of queries that are done, beyond the model's positions if
        others need as long; what comes of it is dropped."""
        most = self.spec.max_positions
        return positions if most is None else positions.clamp(max=most - 1)

    def normed(self, hidden: Tensor) -> Tensor:
        """hidden [n, H] -> the model's last hidden states [n, H]; last stage only."""
        return self.ends.normed(hidden)

    def scores(self, hidden: Tensor) -> Scores:
        """hidden [n, H] -> the logits [n, V_local] of this shard's tokens; last stage only."""
        return self.ends.scores(hidden)
