"""The slice of a model that one stage holds: its layers, and the ends where it has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from xgpt.errors import XgptError
from xgpt.model import ModelSpec
from xgpt.schedule import StageAssignment
from xrunner.models.attention import DecodeContext, attend_decode, attend_encode
from xrunner.models.llama import LlamaEnds, LlamaLayer
from xrunner.models.opt import OptEnds, OptLayer
from xrunner.models.weights import WeightSource


class Layer(Protocol):
    """A decoder layer without its attention kernel, which is the same for all families."""

    def qkv(self, hidden: Tensor, prepared: Any) -> tuple[Tensor, Tensor, Tensor]: ...

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor: ...


LAYER_CLASSES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaLayer, LlamaEnds),
    "opt": (OptLayer, OptEnds),
}


class StageModel:
    """Layers first_layer .. first_layer + num_layers - 1. Loads only what the stage executes."""

    def __init__(self, spec: ModelSpec, weights: WeightSource, stage: StageAssignment,
                 dtype: torch.dtype) -> None:
        if spec.family not in LAYER_CLASSES:
            raise XgptError(f"model {spec.name!r}: family {spec.family!r} cannot be executed yet; "
                            f"can be: {', '.join(LAYER_CLASSES)}")
        layer_class, ends_class = LAYER_CLASSES[spec.family]
        self.spec, self.dtype = spec, dtype
        self.is_first = stage.first_layer == 0
        self.is_last = stage.first_layer + stage.num_layers == spec.num_layers
        self.layers: list[Layer] = [layer_class(spec, weights, stage.first_layer + i)
                                    for i in range(stage.num_layers)]
        self.ends = ends_class(spec, weights, first=self.is_first, last=self.is_last)

    def encode(self, inputs: Tensor, cache: Tensor, first_slot: int,
               lengths: Sequence[int]) -> Tensor:
        """Whole inputs, packed. `inputs`: tokens [T] on the first stage, hidden [T, H] after it;
        cache [layers, 2, slots, k, capacity, d]. Returns hidden [T, H]."""
        positions = torch.cat([torch.arange(n, device=inputs.device) for n in lengths])
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
        hidden = self.ends.embed(inputs, step.positions) if self.is_first else inputs
        prepared = self.ends.prepare(step.positions, self.dtype)
        for layer, (keys, values) in zip(self.layers, cache, strict=True):
            query, key, value = layer.qkv(hidden, prepared)
            attended = attend_decode(query, key, value, keys, values, step)
            hidden = layer.finish(hidden, attended)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [n, H] -> logits [n, V]; last stage only."""
        logits: Tensor = self.ends.logits(hidden)
        return logits
