"""What a model's positions leave for an output. Those of an encoder-decoder model's encoder and
decoder are apart: an input takes none of its output's."""

from typing import Any

import numpy as np

from xgpt.core.lengths import BoolArray, IntArray
from xgpt.core.model import ModelSpec

UNLIMITED = 2**31 - 1  # tokens; no request may ask for more


def output_room(model: ModelSpec, inputs: Any) -> Any:
    """Most tokens of output after so many tokens of `inputs` (a number or an array): below 1 where
    an input leaves no room for one, UNLIMITED of a model without positions."""
    most = model.max_positions
    if most is None:
        return np.full_like(inputs, UNLIMITED)
    if model.is_encoder_decoder:
        return np.where(np.asarray(inputs) <= most, most, 0)
    return most - inputs


def has_room(model: ModelSpec, inputs: IntArray, forced: IntArray) -> BoolArray:
    """Which queries a model's positions hold: some output after so many tokens of `inputs`, and all
    of it where its length is `forced` (0: the model decides)."""
    return np.asarray(np.maximum(forced, 1) <= output_room(model, inputs))
