"""GGUF files: their tensors by Hugging Face's names, and a model folder made of them.

The folder is made once, in xgpt's cache: config.json from the metadata, tokenizer files, and a link
to the file. Weights stay where they are. The package `gguf`, which needs only numpy, widens the
types.

For architecture `llama` (also Mistral's) llama.cpp stores the rows of query and key heads in its
order of rotation, pair by pair; they are reordered here. Unknown metadata is refused by its key,
since it may change answers. transformers' reader is not used: for `llama` it ignores rope_freqs,
`rope.scaling.*` and `attention.sliding_window`, and it holds all tensors at once."""

import contextlib
import hashlib
import json
import math
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from xgpt.core.errors import InputError, MissingExtraError, Mistake, XgptError
from xgpt.core.hf.values import wrong_file
from xgpt.core.units import format_bytes
from xrunner.checkpoint.quantised.parts import Stored
from xrunner.checkpoint.tokenizer_copy import by_transformers

NAME = "model.gguf"  # in a folder made of a GGUF file
FREQUENCIES = "rope_freqs.weight"  # divisors of each pair's frequency (Llama 3.1)
# architecture -> our `model_type`, and whether heads lie pair by pair
ARCHITECTURES = {"llama": ("llama", True), "qwen2": ("qwen2", False), "qwen3": ("qwen3", False)}
_LAYER = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
          "self_attn.q_norm", "self_attn.k_norm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
          "input_layernorm", "post_attention_layernorm")
_PAIRED = {"self_attn.q_proj": "attention.head_count",
           "self_attn.k_proj": "attention.head_count_kv"}
_VOCABULARY = ("tokens", "merges", "scores", "token_type", "added_tokens")
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


class _Place(NamedTuple):
    """A tensor of the file. `heads`: their number if rows lie pair by pair, else None."""

    tensor: Any
    heads: int | None


class GgufFile:
    """The file at `path`. Raises InputError if it is no GGUF file or its architecture is unknown,
    MissingExtraError without the package."""

    def __init__(self, path: Path) -> None:
        self.path, self._gguf, self._reader = path, *_opened(path)
        self.metadata = {key: field.contents() for key, field in self._reader.fields.items()
                         if not key.endswith(_VOCABULARY)}
        self.architecture = str(self.metadata.get("general.architecture"))
        if self.architecture not in ARCHITECTURES:
            raise wrong_file(path, f"its architecture {self.architecture!r} is not read: known are "
                                   f"{', '.join(ARCHITECTURES)}")

    def value(self, key: str, default: Any = None) -> Any:
        """Metadata `key` of the architecture."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    @cached_property
    def places(self) -> dict[str, _Place]:
        """Tensors by our names; those without keep the file's."""
        named, is_paired = dict(self._names()), ARCHITECTURES[self.architecture][1]
        found = {}
        for tensor in self._reader.tensors:
            name = named.get(tensor.name, tensor.name)
            heads = next((self.value(key, self.value("attention.head_count"))
                          for part, key in _PAIRED.items() if is_paired and f".{part}." in name),
                         None)
            found[name] = _Place(tensor, heads)
        return found

    @property
    def types(self) -> list[str]:
        """GGUF types of all tensors, the one with the most elements first."""
        elements = Counter[str]()
        for tensor in self._reader.tensors:
            elements[tensor.tensor_type.name] += int(tensor.n_elements)
        return [name for name, _ in elements.most_common()]

    def stored(self, name: str) -> Stored:
        tensor = self.places[name].tensor
        return Stored(tuple(int(size) for size in reversed(tensor.shape)), tensor.tensor_type.name)

    def rows(self, name: str, rows: range | None = None, columns: range | None = None,
             ) -> tuple[npt.NDArray[np.float32], int]:
        """(the tensor, or these rows and columns of it, in float32; bytes read)."""
        tensor, heads = self.places[name]
        data, kind, first = tensor.data, tensor.tensor_type, 0
        own = range(len(data)) if rows is None else rows
        data = (data[own.start:own.stop] if heads is None else
                data[_of_pairs(own, len(data) // heads)])
        elements, size = self._gguf.GGML_QUANT_SIZES[kind]
        if columns is not None:
            unit = size // data.itemsize  # of the array's last dimension, a block
            first, last = columns.start // elements, -(-columns.stop // elements)
            data = data[:, first * unit:last * unit]
        taken = np.ascontiguousarray(data)
        widened = self._gguf.dequantize(taken, kind).astype(np.float32, copy=False)
        if columns is not None:
            widened = widened[:, columns.start - first * elements:columns.stop - first * elements]
        return widened, taken.nbytes

    def _names(self) -> Iterator[tuple[str, str]]:
        """Yields (the file's name, ours) of every tensor that our families have."""
        architecture = next(key for key, name in self._gguf.MODEL_ARCH_NAMES.items()
                            if name == self.architecture)
        layers = int(self.value("block_count", 0))
        known = self._gguf.get_tensor_name_map(architecture, layers)
        modules = ("model.embed_tokens", "model.norm", "lm_head", *(
            f"model.layers.{layer}.{part}" for layer in range(layers) for part in _LAYER))
        for module in modules:
            if (own := known.get_name(module)) is not None:
                for ending in ("weight", "bias"):
                    yield f"{own}.{ending}", f"{module}.{ending}"


def _of_pairs(rows: range, height: int) -> npt.NDArray[np.intp]:
    """Rows in the file that are `rows` in our order, for heads of `height` rows. A head's row j *
    height / 2 + i, with j 0 or 1, lies at 2 i + j."""
    own = np.arange(rows.start, rows.stop)
    head, row = np.divmod(own, height)
    half, pair = np.divmod(row, height // 2)
    places: npt.NDArray[np.intp] = head * height + 2 * pair + half
    return places


def _opened(path: Path) -> tuple[Any, Any]:
    """(the package, its reader of the file)."""
    try:
        import gguf
    except ImportError:
        raise MissingExtraError("gguf", "run", "reading a GGUF model") from None
    try:
        return gguf, gguf.GGUFReader(path)
    except (ValueError, OSError, IndexError, KeyError, OverflowError) as cause:
        raise wrong_file(path, f"cannot be read as GGUF: {cause}") from None


def model_folder(path: Path, cache: Path) -> Path:
    """The folder made of the file at `path`; makes it if need be. Raises XgptError."""
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
            with contextlib.suppress(OSError):  # another process was faster: its folder is used
                os.replace(made, target)
    return target


def write_safetensors(path: Path, target: Path) -> None:
    """Writes a folder with the weights as float32 safetensors, which other engines read too. Raises
    XgptError if the disk is too full."""
    try:
        from safetensors.numpy import save_file
    except ImportError:
        raise MissingExtraError("safetensors", "run", "converting a GGUF model") from None
    file = GgufFile(path)
    config = {**config_of(file), "dtype": "float32"}
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
    """A config.json equal to the file's metadata. Raises InputError."""
    if mistakes := list(_mistakes(file)):
        raise InputError(mistakes)
    heads, hidden = file.value("attention.head_count"), file.value("embedding_length")
    head = file.value("attention.key_length", hidden // heads)
    window, context = file.value("attention.sliding_window"), file.value("context_length")
    is_windowed = file.architecture == "llama" and window and window < context
    model_type = "mistral" if is_windowed else ARCHITECTURES[file.architecture][0]
    is_biased = model_type in ("llama", "qwen3") and (
        "model.layers.0.self_attn.q_proj.bias" in file.places)  # others have no such key
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
    if FREQUENCIES in file.places:  # equal to short factors within the trained positions
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
    """The number with the fewest digits that equals `value` in float32."""
    return float(str(np.float32(value)))
