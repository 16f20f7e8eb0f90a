"""A model of random weights, for performance work: a folder that states a shape and holds nothing.

It has no tokenizer and names no end of sequence: requests give tokens, answers have no text and
run to their cap. Free of torch; the weights themselves are xrunner.models.weights.RandomWeights.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from xgpt.core.model import ModelSpec
from xgpt.core.whole_file import write_atomically

_KIND = "xgpt-random"  # in the place of a Hugging Face model_type
SERVED_BY = "random weights of its shape"


def write_random_model(folder: Path, spec: ModelSpec) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    # any token can be an encoder-decoder model's first
    config = {"model_type": _KIND, "shape": asdict(spec), "decoder_start_token_id": 0}
    write_atomically(folder / "config.json", json.dumps(config, indent=1) + "\n")


def random_shape(config: dict[str, Any]) -> ModelSpec | None:
    """The shape that a config.json of `write_random_model` states; None for any other."""
    if config.get("model_type") != _KIND:
        return None
    shape = dict(config["shape"])
    scaling = shape["rope_scaling"]
    shape["rope_scaling"] = None if scaling is None else tuple((k, v) for k, v in scaling)
    return ModelSpec(**shape)


def shape_to_make(folder: Path) -> ModelSpec | None:
    """The shape of a model whose weights are to be made; None for a checkpoint's folder."""
    return random_shape(json.loads((folder / "config.json").read_text(encoding="utf-8")))
