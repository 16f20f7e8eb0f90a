"""What a model's positions leave for an output."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from xgpt.core import catalog
from xgpt.core.hf.config import from_hf_config
from xgpt.core.problem import UNLIMITED, output_room

BART = {"model_type": "bart", "vocab_size": 97, "d_model": 48, "encoder_layers": 3,
        "decoder_layers": 2, "encoder_attention_heads": 6, "decoder_attention_heads": 6,
        "encoder_ffn_dim": 80, "decoder_ffn_dim": 80, "max_position_embeddings": 32}


def test_an_encoder_takes_none_of_its_decoders_positions() -> None:
    inputs = np.array([1, 31, 32, 33])
    bart = from_hf_config(BART, "toy")
    assert output_room(bart, inputs).tolist() == [32, 32, 32, 0]
    decoder = replace(catalog.model("opt-13b"), max_positions=32)
    assert output_room(decoder, inputs).tolist() == [31, 1, 0, -1]
    assert output_room(catalog.model("t5-11b"), inputs).tolist() == [UNLIMITED] * 4
    assert int(output_room(bart, 7)) == 32 and int(output_room(decoder, 7)) == 25
