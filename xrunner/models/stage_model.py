"""The slice of a model that one stage holds: its layers, and the ends where it has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from xgpt.core.errors import XgptError
from xgpt.core.model import ModelSpec, refuse_tp_degree
from xgpt.core.schedule import StageAssignment
from xrunner.models.gpt2 import gpt2_ends, gpt2_layer
from xrunner.models.llama import LlamaEnds, LlamaLayer
from xrunner.models.opt import opt_ends, opt_layer
from xrunner.models.shard import WHOLE, Shard
from xrunner.models.t5 import T5DecoderEnds, T5DecoderLayer, T5EncoderEnds, T5EncoderLayer
from xrunner.models.weights import OnDevice, WeightSource
from xrunner.ops.attention import DecodeContext, attend_decode, attend_encode, attend_spans
from xrunner.rules.slots import Span


class Layer(Protocol):
    """A decoder layer, or a shard of one, without its attention kernel, which is the same for all
    families. `heads`, `kv_heads`: this shard's; `dim`: the size of each."""

    heads: int
    kv_heads: int
    dim: int

    def qkv(self, hidden: Tensor, prepared: Any) -> tuple[Tensor, Tensor, Tensor]: ...

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor: ...


LAYER_CLASSES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaLayer, LlamaEnds),
    "opt": (opt_layer, opt_ends),
    "gpt2": (gpt2_layer, gpt2_ends),
}


class EncoderDecoder(NamedTuple):
    """The classes of an encoder-decoder family; its two kinds of layer are called differently."""

    encoder_layer: Any
    encoder_ends: Any
    decoder_layer: Any
    decoder_ends: Any


# Executed by xrunner.models.encoder_decoder.
ENCODER_DECODER_CLASSES: dict[str, EncoderDecoder] = {
    "t5": EncoderDecoder(T5EncoderLayer, T5EncoderEnds, T5DecoderLayer, T5DecoderEnds),
}


class StageModel:
    """Layers first_layer .. first_layer + num_layers - 1. Loads only what the stage executes."""

    def __init__(self, spec: ModelSpec, weights: WeightSource, stage: StageAssignment,
                 dtype: torch.dtype, shard: Shard = WHOLE,
                 device: torch.device | str = "cpu") -> None:
        """`shard`: this rank's part of every layer and of the head; weights go to `device`."""
        assert spec.family in LAYER_CLASSES, f"{spec.family = } is not decoder-only"
        if (reason := refuse_tp_degree(spec, shard.degree)) is not None:
            raise XgptError(f"model {spec.name!r}: {reason}")
        layer_class, ends_class = LAYER_CLASSES[spec.family]
        self.spec, self.dtype, self.shard, self.device = spec, dtype, shard, torch.device(device)
        self.is_first = stage.first_layer == 0
        self.is_last = stage.first_layer + stage.num_layers == spec.num_layers
        placed = weights if self.device.type == "cpu" else OnDevice(weights, self.device)
        self.layers: list[Layer] = [layer_class(spec, placed, stage.first_layer + i, shard)
                                    for i in range(stage.num_layers)]
        self.ends = ends_class(spec, placed, first=self.is_first, last=self.is_last, shard=shard)

    @property
    def kv_heads(self) -> int:
        """Key-value heads of this shard, as its caches hold them."""
        return self.shard.share(self.spec.kv_heads)

    def encode(self, inputs: Tensor, cache: Tensor, first_slot: int,
               lengths: Sequence[int]) -> Tensor:
        """Whole inputs, packed. `inputs`: tokens [T] on the first stage, hidden [T, H] after it;
        cache [layers, 2, slots, k, capacity, d]. Returns hidden [T, H]."""
        positions = torch.cat([torch.arange(n) for n in lengths]).to(inputs.device)
        hidden = self.ends.embed(inputs, positions) if self.is_first else inputs
        prepared = self.ends.prepare(positions, self.dtype)
        for layer, (keys, values) in zip(self.layers, cache, strict=True):
            query, key, value = layer.qkv(hidden, prepared)
            attended = attend_encode(query, key, value, keys, values, first_slot, lengths)
            hidden = layer.finish(hidden, attended)
        return hidden

    def decode(self, inputs: Tensor, cache: Tensor, step: DecodeContext) -> Tensor:
        """One token of each active query. `inputs`: tokens [n] on the first stage, hidden [n, H]
        after it. Returns hidden [n, H]."""
        hidden = self.ends.embed(inputs, self._within(step.positions)) if self.is_first else inputs
        prepared = self.ends.prepare(step.positions, self.dtype)
        for layer, (keys, values) in zip(self.layers, cache, strict=True):
            query, key, value = layer.qkv(hidden, prepared)
            attended = attend_decode(query, key, value, keys, values, step)
            hidden = layer.finish(hidden, attended)
        return hidden

    def mixed(self, inputs: Tensor, cache: Tensor, step: DecodeContext | None,
              spans: Sequence[Span]) -> Tensor:
        """One token of each of n queries (None: of none), then spans of inputs, packed: one product
        for all rows, attention apart (ORCA's selective batching). `inputs`: tokens [n + T] on the
        first stage, hidden [n + T, H] after it. Returns hidden [n + T, H]."""
        n = 0 if step is None else len(step.positions)
        within = [torch.arange(span.first, span.first + span.tokens) for span in spans]
        positions = torch.cat(within).to(inputs.device) if within else inputs.new_empty(
            0, dtype=torch.long)
        if step is not None:
            positions = torch.cat([step.positions, positions])
        hidden = self.ends.embed(inputs, positions) if self.is_first else inputs
        prepared = self.ends.prepare(positions, self.dtype)
        for layer, (keys, values) in zip(self.layers, cache, strict=True):
            query, key, value = layer.qkv(hidden, prepared)
            attended = []
            if step is not None:
                attended.append(attend_decode(query[:n], key[:n], value[:n], keys, values, step))
            if spans:
                attended.append(attend_spans(query[n:], key[n:], value[n:], keys, values, spans))
            hidden = layer.finish(hidden, torch.cat(attended))
        return hidden

    def _within(self, positions: Tensor) -> Tensor:
        """A static batch decodes the rows of queries that are done, beyond the model's positions if
        others need as long; what comes of it is dropped."""
        most = self.spec.max_positions
        return positions if most is None else positions.clamp(max=most - 1)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [n, H] -> logits [n, V_local] of this shard's tokens; last stage only."""
        logits: Tensor = self.ends.logits(hidden)
        return logits
