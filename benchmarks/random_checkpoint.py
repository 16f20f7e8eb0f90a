"""A checkpoint of random weights in Hugging Face's layout: of a catalog model's shape or of
SmolLM2-1.7B's, in bfloat16, for timing alone.

    python benchmarks/random_checkpoint.py FOLDER [--model smollm2-1.7b]

Every engine reads the same files. There is no tokenizer: requests give tokens.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

# config.json of HuggingFaceTB/SmolLM2-1.7B
SHAPES = {
    "smollm2-1.7b": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 2048,
        "num_hidden_layers": 24, "num_attention_heads": 32, "num_key_value_heads": 32,
        "intermediate_size": 8192, "vocab_size": 49152, "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5, "rope_theta": 130000.0, "hidden_act": "silu",
        "tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "dtype": "bfloat16"},
}
_LAYERS_A_FILE = 6
_STD = 0.02


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", choices=tuple(SHAPES), default="smollm2-1.7b")
    given = parser.parse_args()
    write_checkpoint(given.folder, given.model)


def write_checkpoint(folder: Path, name: str) -> None:
    """Writes config.json and weights of a row of SHAPES, a few layers at a time."""
    config = SHAPES[name]
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    layers = range(int(str(config["num_hidden_layers"])))
    parts = [layers[first:first + _LAYERS_A_FILE] for first in layers[::_LAYERS_A_FILE]]
    where: dict[str, str] = {}
    for number, part in enumerate(parts, 1):
        file = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        tensors = dict(_tensors(config, part, generator))
        save_file(tensors, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": where}, indent=1), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


def _tensors(config: dict[str, object], layers: range,
             generator: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    hidden, inner, vocab = (int(str(config[key])) for key in (
        "hidden_size", "intermediate_size", "vocab_size"))

    def drawn(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) * _STD).to(torch.bfloat16)

    if 0 in layers:
        yield "model.embed_tokens.weight", drawn(vocab, hidden)
        yield "model.norm.weight", torch.ones(hidden, dtype=torch.bfloat16)
    for layer in layers:
        at = f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{at}.{name}.weight", torch.ones(hidden, dtype=torch.bfloat16)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            yield f"{at}.self_attn.{name}.weight", drawn(hidden, hidden)
        for name, shape in (("gate_proj", (inner, hidden)), ("up_proj", (inner, hidden)),
                            ("down_proj", (hidden, inner))):
            yield f"{at}.mlp.{name}.weight", drawn(*shape)


if __name__ == "__main__":
    main()
