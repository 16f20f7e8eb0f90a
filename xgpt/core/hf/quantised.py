"""Reads how a checkpoint's `config.json` quantises its weights, with one reader for each
`quant_method`. xrunner.checkpoint.quantised reads the stored tensors."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from xgpt.core.hf.values import ConfigValues

PLAIN = "take the checkpoint they were made from, in float32, float16 or bfloat16"
_Kind = Literal["int", "float"]
# keys of a compressed-tensors scheme that decide how weights are stored
_DECIDING = ("num_bits", "type", "symmetric", "strategy", "group_size", "block_structure",
             "actorder")
_TRANSPOSED = ("gpt2",)  # families that store weights as [inputs, outputs], which no method does


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantised:
    """Storage of the weights of linear layers. `group`: number of an output's inputs that share a
    scale (None: all). `block`: (outputs, inputs) of rectangles that share one, if they do."""

    format: str  # a row of xrunner.checkpoint.quantised.formats
    method: str  # as users know it
    bits: int  # of a value; the most of them if each tensor has a type of its own (`types`)
    kind: _Kind = "int"
    group: int | None = None
    block: tuple[int, int] | None = None
    is_per_tensor: bool = False  # one scale for a whole weight
    has_zeros: bool = True  # a zero point beside each scale; False: 0 is stored as the middle
    is_ordered: bool = False  # a list assigns inputs to groups, not their order
    zero_offset: int = 0  # added to a stored zero point
    types: tuple[str, ...] = ()
    activations: bool = False  # whether the method quantises them, too; our runner does not

    def __str__(self) -> str:
        if self.types:
            return f"{self.method} ({', '.join(self.types)})"
        scales = ("a scale a tensor" if self.is_per_tensor else
                  "blocks of {} x {}".format(*self.block) if self.block is not None else
                  "a scale a row" if self.group is None else f"groups of {self.group}")
        plain = "; activations stay plain" if self.activations else ""
        return f"{self.bits} bits ({self.method}, {scales}{plain})"


def read_quantised(config: ConfigValues, family: str = "") -> Quantised | None:
    """Storage of the weights by the config; None if they are plain, or stored in a way that is not
    supported (then `config` holds the mistakes)."""
    for key in ("quantization_config", "compression_config"):
        section = config.section(key)
        if not section.values:
            continue
        method = section.values.get("quant_method", "compressed-tensors" if "config_groups" in
                                    section.values else section.values.get("format"))
        reader = _READERS.get(method) if isinstance(method, str) else None
        if reader is None:
            named = "a method that is not named" if method is None else method
            config.reject(key, f"weights quantised by {named} are neither planned nor executed: "
                               f"known are {', '.join(_READERS)}; or {PLAIN}", value=named)
            return None
        if family in _TRANSPOSED:
            config.reject(key, f"weights of the {family} family are not executed of fewer bits: "
                               f"{PLAIN}", value=method)
            return None
        return reader(section)
    return None


def quantised_of(config: Mapping[str, Any], path: Path) -> Quantised | None:
    """Storage of the weights by the config.json at `path`; None if plain. Raises InputError."""
    values = ConfigValues(config, path)
    found = read_quantised(values)
    values.finish()
    return found


def _group(section: ConfigValues, *keys: str) -> int | None:
    """Size of a group; None for one group per row, which files state as -1 or null."""
    key = next((key for key in keys if key in section.values), keys[0])
    if section.values.get(key) == -1:
        return None
    return section.size_or_none(key)


def _bits(section: ConfigValues, allowed: tuple[int, ...], *keys: str) -> int:
    key = next((key for key in keys if key in section.values), keys[0])
    value = section.values.get(key)
    if type(value) is not int or value not in allowed:
        section.reject(key, f"{' or '.join(map(str, allowed))} bits")
        return allowed[0]
    return value


def _read_awq(section: ConfigValues) -> Quantised:
    """Reads AutoAWQ's section (Lin et al., arXiv:2306.00978)."""
    key = "version" if "version" in section.values else "format"
    section.text(key, "gemm", ("gemm", "GEMM"))
    section.only("zero_point", True)
    return Quantised(format="awq", method="AWQ", bits=_bits(section, (4,), "bits", "w_bit"),
                     group=_group(section, "group_size", "q_group_size"))


def _read_gptq(section: ConfigValues) -> Quantised:
    """Reads AutoGPTQ's and GPTQModel's section (Frantar et al., arXiv:2210.17323)."""
    key = "checkpoint_format" if "checkpoint_format" in section.values else "format"
    version = section.text(key, "gptq", ("gptq", "gptq_v2"))
    section.only("is_marlin_format", False)
    section.only("pack_dtype", "int32")
    own = section.section("dynamic").values  # "-:pattern": layers that are left as they are
    if any(not str(pattern).startswith("-") for pattern in own):
        section.reject("dynamic", "layers that are left out (-:pattern), none with bits or groups "
                                  "of their own")
    section.flag("sym", True)
    return Quantised(format="gptq", method="GPTQ", bits=_bits(section, (2, 3, 4, 8), "bits"),
                     group=_group(section, "group_size"),
                     is_ordered=section.flag("desc_act", False),
                     zero_offset=1 if version == "gptq" else 0)


def _read_compressed(section: ConfigValues) -> Quantised:
    """Reads compressed-tensors' section (llm-compressor writes it); all layers by one scheme."""
    for key in ("sparsity_config", "transform_config"):
        own = section.section(key).values
        if own and own.get("format") != "dense":
            section.reject(key, "is not supported, only none is", value=own.get("format"))
    groups = section.section("config_groups")
    schemes = [groups.section(name) for name in groups.values]
    weights = [scheme.section("weights") for scheme in schemes]
    if not weights or any(one.values.get(key) != weights[0].values.get(key)
                          for one in weights for key in _DECIDING):
        section.reject("config_groups", "one or several that store weights alike",
                       value=", ".join(map(str, groups.values)) or None)
        return Quantised(format="pack-quantized", method="compressed-tensors", bits=4)
    scheme, first = schemes[0], weights[0]
    holder = scheme if scheme.values.get("format") is not None else section
    form = holder.text("format", "", _COMPRESSED)
    ours, kind, bits, strategies = _COMPRESSED.get(form, _COMPRESSED["pack-quantized"])
    first.text("type", kind, (kind,))
    group = _group(first, "group_size")
    strategy = first.text("strategy", "group" if group else "channel" if first.values.get(
        "group_size") == -1 else "tensor", strategies)
    if strategy == "group" and group is None:
        first.reject("group_size", "a whole number >= 1, of the strategy group")
    return Quantised(
        format=ours, method=f"compressed-tensors {form}", kind=kind,
        bits=_bits(first, bits, "num_bits"), group=group if strategy == "group" else None,
        block=_block(first, "block_structure") if strategy == "block" else None,
        is_per_tensor=strategy == "tensor", has_zeros=not first.flag("symmetric", True),
        is_ordered=first.values.get("actorder") in ("group", "dynamic"),
        activations=scheme.values.get("input_activations") is not None)


# format of compressed-tensors: our format, kind, and the bits and strategies that it allows
_COMPRESSED: dict[str, tuple[str, _Kind, tuple[int, ...], tuple[str, ...]]] = {
    "pack-quantized": ("pack-quantized", "int", (4, 8), ("group", "channel", "tensor")),
    "int-quantized": ("scaled", "int", (8,), ("channel", "tensor", "group")),
    "float-quantized": ("scaled", "float", (8,), ("channel", "tensor", "block", "group"))}


def _read_fp8(section: ConfigValues) -> Quantised:
    """Reads DeepSeek-V3's and Qwen3-FP8's blocks (arXiv:2412.19437), or one scale per weight."""
    section.only("fmt", "e4m3")
    section.text("activation_scheme", "dynamic", ("dynamic", "static"))
    block = _block(section, "weight_block_size")
    return Quantised(format="scaled", method="fp8", bits=8, kind="float", block=block,
                     is_per_tensor=block is None, has_zeros=False, activations=True)


def _block(section: ConfigValues, key: str) -> tuple[int, int] | None:
    """(outputs, inputs) of a block; None if the key is absent or null."""
    value = section.values.get(key)
    if value is None:
        return None
    if not (isinstance(value, list) and len(value) == 2 and all(
            type(size) is int and size >= 1 for size in value)):
        section.reject(key, "two whole numbers >= 1: outputs and inputs")
        return None
    return value[0], value[1]


def _read_gguf(section: ConfigValues) -> Quantised:
    """Reads the section that xgpt writes for a GGUF file (xrunner.checkpoint.gguf_file)."""
    types = section.values.get("types")
    if not isinstance(types, list) or not types:
        section.reject("types", "GGUF's types, as xgpt writes them")
        types = ["F32"]
    return Quantised(format="gguf", method="GGUF", bits=32, types=tuple(map(str, types)))


_READERS: dict[str, Callable[[ConfigValues], Quantised]] = {
    "awq": _read_awq, "gptq": _read_gptq, "compressed-tensors": _read_compressed, "fp8": _read_fp8,
    "gguf": _read_gguf}
