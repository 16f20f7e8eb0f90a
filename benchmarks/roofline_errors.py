"""What the comparisons with public measurements share: the catalog's GPUs, and their errors."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from xgpt.core import catalog
from xgpt.core.model import ModelSpec
from xprofiler.roofline import Roofline

FloatArray = NDArray[np.float64]
DEVICES = {"a100": "A100-80", "a40": "A40", "h200": "H200"}


def roofline(gpu: str, heads: int = 48, kv_heads: int | None = None) -> Roofline:
    """The catalog's GPU, with a model that has these heads of 128."""
    model = ModelSpec(name="heads", family="llama", num_layers=1, hidden_size=128 * heads,
                      num_heads=heads, num_kv_heads=kv_heads, vocab_size=32000,
                      intermediate_size=512 * heads)
    return Roofline(model, catalog.device(DEVICES[gpu]), "bfloat16")


def error(predicted: FloatArray, measured: FloatArray) -> FloatArray:
    return np.abs(predicted / measured - 1)


def spread(errors: FloatArray) -> str:
    if len(errors) == 0:
        return "-"
    return f"{np.median(errors):.1%} ({np.quantile(errors, 0.9):.0%})"
