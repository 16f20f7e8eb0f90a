"""Weights for tests that ask what is carried out on which device, and not what comes out."""

from __future__ import annotations

import torch
from torch import Tensor

from xrunner.models.weights import TensorPart


class Zeros:
    """A WeightSource in the host's memory."""

    dtype = torch.float32

    def get(self, name: str, shape: tuple[int, ...], part: TensorPart | None = None) -> Tensor:
        return torch.zeros(shape if part is None else part.shape(shape))

    def has(self, name: str) -> bool:
        return True
