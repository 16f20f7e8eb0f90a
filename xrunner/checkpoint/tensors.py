"""Names and shapes of the tensors that a model of a given shape takes of its checkpoint, as the
layers of xrunner.models ask for them (a test compares the two); and whether its files are whole and
hold these, from their headers alone. Free of torch.

A run finds out too, but on every rank, and after the model's layers have been timed. Of PyTorch's
own files only their presence is checked: they have no header that can be read without torch."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from xgpt.core.errors import InputError, Mistake
from xgpt.core.model import ModelSpec
from xgpt.core.model_file import load_json

Shape = tuple[int, ...]
# safetensors' names of the types that a tensor is read in; any other (F8_E4M3, I8, I32, ...) holds
# weights that are wrong without their scales
READ_TYPES = ("F64", "F32", "F16", "BF16")
HEAD = "lm_head.weight"  # where it is absent, the embedding serves

# Published checkpoints differ in how deep the decoder is nested; tried in this order.
_PREFIXES = ("", "model.", "transformer.")
# Stored by some and used by nobody: tables of positions and masks that the model's own code makes,
# T5's second names of its one embedding, and what its first converter left behind.
_NOT_WEIGHTS = (".inv_freq", ".attn.bias", ".attn.masked_bias", ".position_ids", ".version",
                "coder.embed_tokens.weight", "EncDecAttention.relative_attention_bias.weight", HEAD)
_OPT_PADDING_ROWS = 2  # of its position table
MAX_SHOWN = 6  # a wrong size in config.json concerns every layer
_LENGTH_BYTES, _MOST_HEADER_BYTES = 8, 100_000_000
_LFS = b"version https://git-lfs"
NO_WEIGHTS = "no model.safetensors, pytorch_model.bin or index of either"


def serving_file(directory: Path) -> Path | None:
    """The file that holds a model's weights, or the index (.json) of those that do."""
    names = (f"{stem}{more}" for stem in ("model.safetensors", "pytorch_model.bin")
             for more in (".index.json", ""))
    return next((path for name in names if (path := directory / name).is_file()), None)


def locate(name: str, files: Mapping[str, object]) -> str | None:
    """The name under which a checkpoint of these tensors holds `name`; None where it has none."""
    for prefix in _PREFIXES:
        for candidate in (prefix + name, name.removeprefix(prefix or "\0")):
            if candidate in files:
                return candidate
    return None


def wanted_tensors(spec: ModelSpec) -> Iterator[tuple[str, Shape]]:
    """(name, shape) of each, those of the first layer first. An untied head is among them."""
    yield from _FAMILIES[spec.family](spec)
    if not spec.tied_embeddings:
        yield HEAD, (spec.vocab_size, spec.hidden_size)


def _llama(spec: ModelSpec) -> Iterator[tuple[str, Shape]]:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    width, kv_width = spec.num_heads * spec.head_dim, spec.kv_heads * spec.head_dim
    yield "model.embed_tokens.weight", (spec.vocab_size, hidden)
    for index in range(spec.num_layers):
        layer = f"model.layers.{index}."
        for name, out in (("q", width), ("k", kv_width), ("v", kv_width)):
            yield f"{layer}self_attn.{name}_proj.weight", (out, hidden)
            if spec.qkv_bias:
                yield f"{layer}self_attn.{name}_proj.bias", (out,)
        yield f"{layer}self_attn.o_proj.weight", (hidden, width)
        for name in ("gate", "up"):
            yield f"{layer}mlp.{name}_proj.weight", (inner, hidden)
        yield f"{layer}mlp.down_proj.weight", (hidden, inner)
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{layer}{name}.weight", (hidden,)
    yield "model.norm.weight", (hidden,)


def _opt(spec: ModelSpec) -> Iterator[tuple[str, Shape]]:
    hidden, ffn = spec.hidden_size, spec.intermediate_size
    assert spec.max_positions is not None
    yield "model.decoder.embed_tokens.weight", (spec.vocab_size, hidden)
    yield "model.decoder.embed_positions.weight", (spec.max_positions + _OPT_PADDING_ROWS, hidden)
    for index in range(spec.num_layers):
        layer = f"model.decoder.layers.{index}."
        for name, out, into in (
                *((f"self_attn.{n}_proj", hidden, hidden) for n in ("q", "k", "v", "out")),
                ("fc1", ffn, hidden), ("fc2", hidden, ffn)):
            yield f"{layer}{name}.weight", (out, into)
            if spec.has_bias:
                yield f"{layer}{name}.bias", (out,)
        for name in ("self_attn_layer_norm", "final_layer_norm"):
            yield from _norm(layer + name, hidden)
    yield from _norm("model.decoder.final_layer_norm", hidden)


def _gpt2(spec: ModelSpec) -> Iterator[tuple[str, Shape]]:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    assert spec.max_positions is not None
    yield "wte.weight", (spec.vocab_size, hidden)
    yield "wpe.weight", (spec.max_positions, hidden)
    for index in range(spec.num_layers):
        for name, into, out in (("attn.c_attn", hidden, 3 * hidden),
                                ("attn.c_proj", hidden, hidden), ("mlp.c_fc", hidden, inner),
                                ("mlp.c_proj", inner, hidden)):
            yield f"h.{index}.{name}.weight", (into, out)
            yield f"h.{index}.{name}.bias", (out,)
        for name in ("ln_1", "ln_2"):
            yield from _norm(f"h.{index}.{name}", hidden)
    yield from _norm("ln_f", hidden)


def _t5(spec: ModelSpec) -> Iterator[tuple[str, Shape]]:
    hidden, inner, width = spec.hidden_size, spec.intermediate_size, spec.num_heads * spec.head_dim
    ups = ("wi_0", "wi_1") if spec.is_gated_mlp else ("wi",)
    yield "shared.weight", (spec.vocab_size, hidden)
    for side, count, attentions in (
            ("encoder", spec.num_encoder_layers, ("SelfAttention",)),
            ("decoder", spec.num_layers, ("SelfAttention", "EncDecAttention"))):
        yield (f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
               (spec.relative_buckets, spec.num_heads))
        for index in range(count):
            for place, attention in enumerate(attentions):
                block = f"{side}.block.{index}.layer.{place}."
                for name in ("q", "k", "v"):
                    yield f"{block}{attention}.{name}.weight", (width, hidden)
                yield f"{block}{attention}.o.weight", (hidden, width)
                yield f"{block}layer_norm.weight", (hidden,)
            block = f"{side}.block.{index}.layer.{len(attentions)}."
            for name in ups:
                yield f"{block}DenseReluDense.{name}.weight", (inner, hidden)
            yield f"{block}DenseReluDense.wo.weight", (hidden, inner)
            yield f"{block}layer_norm.weight", (hidden,)
        yield f"{side}.final_layer_norm.weight", (hidden,)


def _norm(name: str, hidden: int) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (hidden,)
    yield f"{name}.bias", (hidden,)


_FAMILIES = {"llama": _llama, "opt": _opt, "gpt2": _gpt2, "t5": _t5}


def check_weights(directory: Path, spec: ModelSpec, *, may_unpickle: bool = False) -> None:
    """Raises InputError with every file and tensor that is missing or wrong. `may_unpickle`: the
    user trusts who made PyTorch's own files, which are pickles."""
    files, mistakes = _files(directory)
    if not may_unpickle:
        mistakes += [_mistake(path, None, "a pickle, which can run code where it is read: convert "
                              "it to safetensors (its model's page often has one) or, if you trust "
                              "who made it, say `run: {pickles: true}`; even then tensors alone "
                              "are read") for path in files if path.suffix != ".safetensors"]
    tensors: dict[str, StoredTensor] = {}
    for path, names in files.items():
        if path.suffix != ".safetensors":
            continue
        try:
            held = header(path)
        except ValueError as cause:
            mistakes.append(_mistake(path, None, str(cause)))
            continue
        tensors.update(held if names is None else {n: held[n] for n in names if n in held})
        mistakes += [_mistake(path, name, "no such tensor there, but the index says so")
                     for name in names or () if name not in held]
    if not mistakes and all(path.suffix == ".safetensors" for path in files):
        mistakes = list(_misfits(directory, spec, tensors))
    if len(mistakes) > MAX_SHOWN:
        rest = len(mistakes) - MAX_SHOWN
        mistakes = [*mistakes[:MAX_SHOWN],
                    _mistake(directory, None, f"{rest} more like these are not shown")]
    if mistakes:
        raise InputError(mistakes)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """What a file's header says of a tensor; `type` by safetensors' names."""

    shape: Shape
    type: str


def header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file by name. Raises ValueError where the file is none, or
    shorter or longer than its header says."""
    size = path.stat().st_size
    with path.open("rb") as file:
        begin = file.read(max(_LENGTH_BYTES, len(_LFS)))
        if begin.startswith(_LFS):
            raise ValueError("a pointer of Git LFS, not the file itself: fetch it (git lfs pull)")
        length = int.from_bytes(begin[:_LENGTH_BYTES], "little")
        if size < _LENGTH_BYTES + length and length <= _MOST_HEADER_BYTES:
            raise ValueError(f"cut off: it has {size} bytes, its header alone is longer")
        file.seek(_LENGTH_BYTES)
        try:
            if length > _MOST_HEADER_BYTES:
                raise ValueError
            table = json.loads(file.read(length))
            table.pop("__metadata__", None)
            tensors = {name: StoredTensor(tuple(entry["shape"]), str(entry["dtype"]))
                       for name, entry in table.items()}
            end = max((entry["data_offsets"][1] for entry in table.values()), default=0)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise ValueError("no safetensors file: its header cannot be read") from None
    if size != (expected := _LENGTH_BYTES + length + end):
        what = "cut off" if size < expected else "longer than it should be"
        raise ValueError(f"{what}: it has {size} bytes, its header speaks of {expected}")
    return tensors


def _files(directory: Path) -> tuple[dict[Path, list[str] | None], list[Mistake]]:
    """The files that serve, with the tensors that an index says are there (None without an index);
    and what is wrong with that index."""
    path = serving_file(directory)
    if path is None:
        return {}, [_mistake(directory, None, f"{NO_WEIGHTS}: a run needs the weights")]
    return _listed(path) if path.suffix == ".json" else ({path: None}, [])


def _listed(listing: Path) -> tuple[dict[Path, list[str] | None], list[Mistake]]:
    table = load_json(listing).get("weight_map")
    if not isinstance(table, dict) or not table or not all(
            isinstance(file, str) for file in table.values()):
        return {}, [_mistake(listing, "weight_map", "missing, or no mapping of tensors to files")]
    held: dict[str, list[str]] = {}
    for name, file in table.items():
        held.setdefault(file, []).append(name)
    files: dict[Path, list[str] | None] = {}
    mistakes = []
    for file, names in held.items():
        if Path(file).name != file:
            mistakes.append(_mistake(listing, "weight_map", "the name of a file of this folder",
                                     file))
        elif (listing.parent / file).is_file():
            files[listing.parent / file] = names
        else:
            mistakes.append(_mistake(listing, "weight_map", "this file is missing from the folder; "
                                     f"it holds {len(names)} tensors", file))
    return files, mistakes


def _misfits(directory: Path, spec: ModelSpec,
             tensors: Mapping[str, StoredTensor]) -> Iterator[Mistake]:
    taken = {HEAD}
    for name, wanted in wanted_tensors(spec):
        stored = locate(name, tensors)
        taken.add(stored or name)
        if stored is None and name != HEAD:
            yield _mistake(directory, name, "the weights hold no such tensor; by config.json "
                                            f"there is one of shape {list(wanted)}")
        elif stored is not None and tensors[stored].shape != wanted:
            yield _mistake(directory, name, f"by config.json its shape is {list(wanted)}",
                           list(tensors[stored].shape))
        elif stored is not None and tensors[stored].type not in READ_TYPES:
            yield _mistake(directory, name, "weights of fewer bits need scales, which are not "
                           f"read: one of {', '.join(READ_TYPES)}", tensors[stored].type)
    for name in sorted(tensors.keys() - taken):
        if not name.endswith(_NOT_WEIGHTS):
            yield _mistake(directory, name, f"no layer of the {spec.family} family takes it: its "
                           "answers would be wrong without it (scales of quantised weights, or a "
                           "variant that is not executed)")


def _mistake(path: Path, key: str | None, allowed: str, value: object = None) -> Mistake:
    return Mistake(file=str(path), line=None, key=key or "weights", value=value, allowed=allowed)
