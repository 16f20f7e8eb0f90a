"""The slice of an encoder-decoder model that one stage holds: layers of both kinds, and ends. An
encode step goes through the encoder's layers, stage after stage. Its output then goes to every
stage with decoder layers, which store keys and values of it in their cross-attention caches."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from xgpt.core.deployment import StageAssignment
from xgpt.core.model import ModelSpec
from xgpt.core.policies import Role
from xrunner.devices import on_device
from xrunner.models.passes import residual
from xrunner.models.stage_model import ENCODER_DECODER_CLASSES, Stage, StageModel, packed
from xrunner.models.weights import WHOLE, PlacedWeights, Shard, WeightSource
from xrunner.ops.attention import decode_attention, packed_attention, store_packed
from xrunner.ops.contexts import DecodeContext, Layers, encode_context, whole_inputs
from xrunner.ops.rows import rotate_and_store


class EncoderDecoderStage(Stage):
    """Encoder and decoder layers of a stage, by its StageAssignment; it loads only those.

    The first stage (`is_first`) takes tokens, the last one returns the encoder output and logits. A
    stage without encoder layers passes the hidden state on. A pool with one role holds the encoder
    or the decoder alone, with its ends."""

    def __init__(self, spec: ModelSpec, weights: WeightSource, stage: StageAssignment,
                 shard: Shard = WHOLE, device: torch.device | str = "cpu",
                 weight_dtype: torch.dtype | None = None, role: Role = "both") -> None:
        """`role`: the pool's."""
        super().__init__(spec, weights.dtype, shard, device, weight_dtype)
        classes = ENCODER_DECODER_CLASSES[spec.family]
        self._scoring, as_type = classes.scoring, self.as_type
        encodes, decodes = role != "decode", role != "encode"
        self.is_first = (stage.first_layer if decodes else stage.first_encoder_layer) == 0
        self.is_last = (
            stage.first_layer + stage.num_layers == spec.num_layers if decodes else
            stage.first_encoder_layer + stage.num_encoder_layers == spec.num_encoder_layers)
        placed = PlacedWeights(weights, self.device, self.work_dtype)
        shard = shard.rounding(self.dtype)
        self.encoder_layers: list[Any] = [
            packed(classes.encoder_layer(spec, placed, stage.first_encoder_layer + i, shard),
                   as_type) for i in range(stage.num_encoder_layers)]
        self.layers: list[Any] = [
            packed(classes.decoder_layer(spec, placed, stage.first_layer + i, shard), as_type)
            for i in range(stage.num_layers)]
        self.ends: Any = None
        self.encoder_ends: Any = None
        if decodes:
            self.ends = classes.decoder_ends(spec, placed, first=self.is_first, last=self.is_last,
                                             shard=shard)
            if self.is_last:
                self.ends.head.pack(as_type)
        if encodes:
            self.encoder_ends = classes.encoder_ends(
                spec, placed, first=self.is_first, last=self.is_last, shard=shard,
                embedding=self.ends.embedding if decodes else None)  # one table serves both

    def encode(self, inputs: Tensor, lengths: Sequence[int]) -> Tensor:
        """Hidden states [T, H] of whole inputs, packed; the encoder output on the last stage.
        `inputs`: tokens [T] on the first stage, hidden [T, H] after it."""
        positions = on_device(torch.cat([torch.arange(n) for n in lengths]), inputs.device)
        hidden = residual(self.encoder_ends.embed(inputs, positions) if self.is_first else inputs,
                          self.work_dtype, is_own=self.is_first)
        if self.encoder_layers:
            bias = self.encoder_ends.bias(max(lengths))
            for layer in self.encoder_layers:
                attended = packed_attention(layer.qkv(hidden), layer.heads, lengths,
                                            self._scoring.scale, bias)
                layer.finish(hidden, attended)
        out: Tensor = hidden.total()
        return (self.encoder_ends.finish(out) if self.is_last else out).to(self.dtype)

    def store_encoded(self, encoded: Tensor, cache: Layers, first_slot: int,
                      lengths: Sequence[int]) -> None:
        """Stores keys and values of the encoder output [T, H] in the cross-attention cache.
        `cache`: [layers, 2, slots, k, capacity, d], written from `first_slot` on."""
        places = encode_context(whole_inputs(lengths, first_slot), encoded.device).places
        encoded = encoded.to(self.work_dtype)
        for layer, (keys, values) in zip(self.layers, cache, strict=True):
            key, value = layer.cross_kv(encoded)
            store_packed(key, value, (keys, values), places)

    def decode(self, inputs: Tensor, cache: Layers, encoded: Layers, step: DecodeContext,
               across: DecodeContext) -> Tensor:
        """Hidden states [n, H] of one token of each active request. `inputs`: tokens [n] on the
        first stage, hidden [n, H] after it. `cache`: of the tokens so far, read by `step`.
        `encoded`: of the inputs, read whole by `across`."""
        hidden = residual(self.ends.embed(inputs, step.positions) if self.is_first else inputs,
                          self.work_dtype, is_own=self.is_first)
        bias = self.ends.bias(step.longest)
        for layer, (keys, values), (cross_keys, cross_values) in zip(
                self.layers, cache, encoded, strict=True):
            query = rotate_and_store(layer.qkv(hidden), layer.heads, (keys, values), step.places)
            attended = decode_attention(query, (keys, values), step, self._scoring, bias)
            query = layer.cross_query(hidden, attended)
            attended = decode_attention(query, (cross_keys, cross_values), across,
                                            self._scoring)
            layer.finish(hidden, attended)
        return hidden.total() if self.is_last else hidden.total().to(self.dtype)


def load_stage(spec: ModelSpec, weights: WeightSource, stage: StageAssignment,
               shard: Shard = WHOLE, device: torch.device | str = "cpu",
               weight_dtype: torch.dtype | None = None,
               role: Role = "both") -> StageModel | EncoderDecoderStage:
    """A stage of any family, in a pool of that role."""
    if spec.is_encoder_decoder:
        return EncoderDecoderStage(spec, weights, stage, shard, device, weight_dtype, role)
    return StageModel(spec, weights, stage, weights.dtype, shard, device, weight_dtype)
