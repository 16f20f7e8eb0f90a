"""A GGUF file as a model's folder: config.json of its metadata, its tokenizer's files, and a link
to it. The folder is made once, in xgpt's cache; the weights stay where they are.

What of the metadata is not understood is refused by its key: it may change the answers."""

import contextlib
import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from xgpt.core.errors import InputError, MissingExtraError, Mistake, XgptError
from xgpt.core.units import format_bytes
from xrunner.checkpoint.gguf_file import ARCHITECTURES, FREQUENCIES, NAME, GgufFile
from xrunner.checkpoint.tokenizer_copy import by_transformers

_SIZES = {"embedding_length": "hidden_size", "block_count": "num_hidden_layers",
          "feed_forward_length": "intermediate_size", "attention.head_count": "num_attention_heads",
          "context_length": "max_position_embeddings"}
_UNDERSTOOD = {
    *_SIZES, "attention.head_count_kv", "attention.key_length", "attention.value_length",
    "attention.layer_norm_rms_epsilon", "attention.sliding_window", "rope.dimension_count",
    "rope.freq_base", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.original_context_length", "rope.scaling.finetuned", "vocab_size"}
_MAY_BE_ABSENT = ("attention.head_count_kv", "attention.key_length", "rope.freq_base",
                  "rope.dimension_count")
_TOKENS = {"eos_token_id": "eos_token_id", "bos_token_id": "bos_token_id",
           "padding_token_id": "pad_token_id"}


def folder_of(path: Path, cache: Path) -> Path:
    """The folder of the file at `path`, made if need be. Raises XgptError."""
    status = path.stat()
    state = f"{path.resolve()} {status.st_size} {status.st_mtime_ns}"
    target = cache / f"{path.stem}-{hashlib.sha256(state.encode()).hexdigest()[:16]}"
    if not (target / "config.json").is_file():
        config = config_of(GgufFile(path))
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            made = Path(scratch) / "model"
            made.mkdir()
            (made / NAME).symlink_to(path.resolve())
            _describe(path, config, made)
            with contextlib.suppress(OSError):  # another process was quicker: its result serves
                os.replace(made, target)
    return target


def write_plain(path: Path, target: Path) -> None:
    """The same with the weights as safetensors in float32, which other engines read, too. Raises
    XgptError where there is no room for them."""
    try:
        from safetensors.numpy import save_file
    except ImportError:
        raise MissingExtraError("safetensors", "run", "converting a GGUF model") from None
    file = GgufFile(path)
    config = config_of(file)
    del config["quantization_config"]
    shapes = {name: file.stored(name).shape for name in file.places if name != FREQUENCIES}
    needed = 4 * sum(map(math.prod, shapes.values()))
    if needed > (free := shutil.disk_usage(target.parent).free):
        raise XgptError(f"{target.parent}: {format_bytes(needed)} are needed there for the weights "
                        f"of {path.name} as safetensors, and {format_bytes(free)} are free")
    target.mkdir()
    save_file({name: file.rows(name)[0] for name in shapes}, target / "model.safetensors",
              metadata={"format": "pt"})
    _describe(path, config, target)


def _describe(path: Path, config: dict[str, Any], target: Path) -> None:
    """Writes the tokenizer's files and config.json."""
    by_transformers(path.parent, path, gguf_file=path.name).save_pretrained(target)
    (target / "config.json").write_text(json.dumps(config, indent=1) + "\n", "utf-8")


def config_of(file: GgufFile) -> dict[str, Any]:
    """The config.json that states what the file's metadata does. Raises InputError."""
    if mistakes := list(_mistakes(file)):
        raise InputError(mistakes)
    heads, hidden = file.value("attention.head_count"), file.value("embedding_length")
    head = file.value("attention.key_length", hidden // heads)
    window, context = file.value("attention.sliding_window"), file.value("context_length")
    is_windowed = file.architecture == "llama" and window and window < context
    model_type = "mistral" if is_windowed else ARCHITECTURES[file.architecture][0]
    is_biased = model_type in ("llama", "qwen3") and (
        "model.layers.0.self_attn.q_proj.bias" in file.places)  # of the others it is no question
    config = {
        "model_type": model_type, "architectures": [f"{model_type.title()}ForCausalLM"],
        **{ours: file.value(key) for key, ours in _SIZES.items()},
        "num_key_value_heads": file.value("attention.head_count_kv", heads), "head_dim": head,
        "vocab_size": file.stored("model.embed_tokens.weight").shape[0],
        "rms_norm_eps": _shortest(file.value("attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest(file.value("rope.freq_base", 10000.0)),
        "partial_rotary_factor": file.value("rope.dimension_count", head) / head,
        "tie_word_embeddings": "lm_head.weight" not in file.places,
        **({"attention_bias": True} if is_biased else {}),
        "rope_scaling": _scaling(file, context),
        **({"sliding_window": window} if is_windowed else {}),
        **{ours: file.metadata[f"tokenizer.ggml.{key}"] for key, ours in _TOKENS.items()
           if f"tokenizer.ggml.{key}" in file.metadata},
        "quantization_config": {"quant_method": "gguf", "types": file.types}}
    return config


def _mistakes(file: GgufFile) -> Iterator[Mistake]:
    prefix = f"{file.architecture}."

    def mistake(key: str, allowed: str) -> Mistake:
        return Mistake(file=str(file.path), line=None, key=prefix + key, value=file.value(key),
                       allowed=allowed)

    for key in (*_SIZES, "attention.layer_norm_rms_epsilon", *_MAY_BE_ABSENT):
        value = file.value(key, 1 if key in _MAY_BE_ABSENT else None)
        if not isinstance(value, (int, float)) or not value > 0:
            yield mistake(key, "a number above 0")
    if (parts := file.metadata.get("split.count", 1)) > 1:
        yield Mistake(file=str(file.path), line=None, key="split.count", value=parts,
                      allowed="one file: join its parts (llama-gguf-split --merge)")
    for key in file.metadata:
        own = key.removeprefix(prefix)
        if own != key and own not in _UNDERSTOOD and file.metadata[key] not in (0, False):
            yield mistake(own, "left out, or 0: what else it says is not executed")
    if file.value("rope.scaling.type", "none") not in ("none", "linear", "yarn"):
        yield mistake("rope.scaling.type", "none, linear or yarn")
    if file.value("attention.value_length") not in (None, file.value("attention.key_length")):
        yield mistake("attention.value_length", "that of keys")
    if "model.embed_tokens.weight" not in file.places:
        yield mistake("embedding_length", "the size of token_embd.weight, which the file lacks")


def _scaling(file: GgufFile, context: int) -> dict[str, Any] | None:
    if FREQUENCIES in file.places:  # the same as short factors within the trained positions
        factors = file.rows(FREQUENCIES)[0].tolist()
        return {"rope_type": "longrope", "short_factor": factors, "long_factor": factors,
                "factor": 1.0, "original_max_position_embeddings": context}
    kind = file.value("rope.scaling.type", "none")
    if kind == "none":
        return None
    scaling = {"rope_type": kind, "factor": file.value("rope.scaling.factor", 1.0)}
    original = file.value("rope.scaling.original_context_length")
    return scaling if original is None else {
        **scaling, "original_max_position_embeddings": original}


def _shortest(value: float) -> float:
    """Of the numbers that are the same in the file's 32 bits, the one with the fewest digits."""
    return float(str(np.float32(value)))
