"""A GGUF file's tensors by the names that Hugging Face's checkpoints of the same families have, and
its metadata. The package `gguf` knows the types and widens them; it needs numpy alone.

Of the architecture `llama` (Mistral's files have it, too) llama.cpp stores the rows of each head of
queries and keys in the order in which it rotates them, pair by pair; they are put back here."""

from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from xgpt.core.errors import MissingExtraError
from xgpt.core.model_file import wrong_file
from xrunner.checkpoint.quantised.parts import Stored

NAME = "model.gguf"  # in a folder that was made of one
FREQUENCIES = "rope_freqs.weight"  # what each pair's frequency is divided by (Llama 3.1)
# architectures that are read: our `model_type`, and whether heads lie pair by pair
ARCHITECTURES = {"llama": ("llama", True), "qwen2": ("qwen2", False), "qwen3": ("qwen3", False)}
_LAYER = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
          "self_attn.q_norm", "self_attn.k_norm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
          "input_layernorm", "post_attention_layernorm")
_PAIRED = {"self_attn.q_proj": "attention.head_count",
           "self_attn.k_proj": "attention.head_count_kv"}
_VOCABULARY = ("tokens", "merges", "scores", "token_type", "added_tokens")


class _Place(NamedTuple):
    """A tensor of the file; `heads`: of rows that lie pair by pair, None of others."""

    tensor: Any
    heads: int | None


class GgufFile:
    """The file at `path`. Raises InputError where it is none, or of an architecture that is not
    read; MissingExtraError without the package."""

    def __init__(self, path: Path) -> None:
        self.path, self._gguf, self._reader = path, *_opened(path)
        self.metadata = {key: field.contents() for key, field in self._reader.fields.items()
                         if not key.endswith(_VOCABULARY)}
        self.architecture = str(self.metadata.get("general.architecture"))
        if self.architecture not in ARCHITECTURES:
            raise wrong_file(path, f"its architecture {self.architecture!r} is not read: known are "
                                   f"{', '.join(ARCHITECTURES)}")

    def value(self, key: str, default: Any = None) -> Any:
        """Of the metadata, under the architecture's own name."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    @cached_property
    def places(self) -> dict[str, _Place]:
        """Those of which we have no name under the file's own."""
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
        """Of all its tensors, by GGUF's names, that of the most elements first."""
        elements = Counter[str]()
        for tensor in self._reader.tensors:
            elements[tensor.tensor_type.name] += int(tensor.n_elements)
        return [name for name, _ in elements.most_common()]

    def stored(self, name: str) -> Stored:
        tensor = self.places[name].tensor
        return Stored(tuple(int(size) for size in reversed(tensor.shape)), tensor.tensor_type.name)

    def rows(self, name: str, rows: range | None = None, columns: range | None = None,
             ) -> tuple[npt.NDArray[np.float32], int]:
        """(the tensor, or those rows and columns of it, widened; the bytes that were read)."""
        (tensor, heads), kind = self.places[name], self.places[name].tensor.tensor_type
        data = tensor.data
        if rows is not None:
            wanted: Any = slice(rows.start, rows.stop)
            data = data[wanted if heads is None else _of_pairs(rows, len(data) // heads)]
        elif heads is not None:
            data = data[_of_pairs(range(len(data)), len(data) // heads)]
        if columns is None:
            taken = np.ascontiguousarray(data)
            return self._gguf.dequantize(taken, kind).astype(np.float32, copy=False), taken.nbytes
        elements, size = self._gguf.GGML_QUANT_SIZES[kind]
        unit = size // data.itemsize  # of the array's last dimension, a block
        first, last = columns.start // elements, -(-columns.stop // elements)
        taken = np.ascontiguousarray(data[:, first * unit:last * unit])
        widened = self._gguf.dequantize(taken, kind).astype(np.float32, copy=False)
        begin = columns.start - first * elements
        return widened[:, begin:begin + len(columns)], taken.nbytes

    def _names(self) -> Iterator[tuple[str, str]]:
        """(the file's name, ours) of every tensor that our families have."""
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
    """Where the rows of heads of `height` lie that in our order are `rows`: a head's row j height
    / 2 + i (j of 0, 1) lies at 2 i + j."""
    own = np.arange(rows.start, rows.stop)
    head, row = np.divmod(own, height)
    half, pair = np.divmod(row, height // 2)
    places: npt.NDArray[np.intp] = head * height + 2 * pair + half
    return places


def _opened(path: Path) -> tuple[Any, Any]:
    """(the package, its reader of the file)"""
    try:
        import gguf
    except ImportError:
        raise MissingExtraError("gguf", "run", "reading a GGUF model") from None
    try:
        return gguf, gguf.GGUFReader(path)
    except (ValueError, OSError, IndexError, KeyError, OverflowError) as cause:
        raise wrong_file(path, f"cannot be read as GGUF: {cause}") from None
