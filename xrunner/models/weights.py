"""Where a layer's tensors come from: `WeightSource`, and random weights of any catalog shape."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class WeightSource(Protocol):
    """Tensors by their Hugging Face name."""

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor `name`, of exactly `shape`, in the run's dtype. Raises XgptError."""
        ...

    def has(self, name: str) -> bool: ...


class RandomWeights:
    """Weights for performance work: values drawn per name, so that every rank agrees on them."""

    def __init__(self, dtype: torch.dtype, *, scale: float = 0.02, seed: int = 0) -> None:
        self.dtype, self.scale, self.seed = dtype, scale, seed

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        digest = sum((i + 1) * byte for i, byte in enumerate(name.encode()))
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + digest)
        if name.endswith("norm.weight") or "layer_norm.weight" in name or "layernorm" in name:
            return torch.ones(shape, dtype=self.dtype)
        values = torch.empty(shape, dtype=torch.float32).normal_(0, self.scale, generator=generator)
        return values.to(self.dtype)

    def has(self, name: str) -> bool:
        return True
