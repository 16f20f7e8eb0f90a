"""Checkpoints of fewer bits: a toy's weights quantised and packed as each method documents it, and
the model that transformers makes of the same weights, widened. Written from the formats'
descriptions, value by value: nothing of xrunner.checkpoint.quantised is used."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from toys import EOS, VOCAB, stir_norms_and_biases

Tensors = dict[str, Tensor]
LAYERS, HIDDEN, INNER = 3, 64, 96
WORD = 2**32


class Packed(NamedTuple):
    """One weight's tensors by how their names end, and what they mean [outputs, inputs]."""

    tensors: Tensors
    weight: Tensor


Packer = Callable[[Tensor, torch.Generator], Packed]


def words(values: list[int], bits: int) -> list[int]:
    """Values one after the other from the lowest bit on, as 32-bit words with a sign."""
    joint = sum(value << (place * bits) for place, value in enumerate(values))
    count = -(-len(values) * bits // 32)
    found = [(joint >> (32 * place)) % WORD for place in range(count)]
    return [word - WORD if word >= WORD // 2 else word for word in found]


def packed_rows(values: Tensor, bits: int) -> Tensor:
    """values [n, m] -> words [n, m * bits / 32]."""
    return torch.tensor([words(row, bits) for row in values.tolist()], dtype=torch.int32)


def quantised(weight: Tensor, groups: list[int], bits: int, generator: torch.Generator, *,
              is_symmetric: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """weight [outputs, inputs], of each input its group -> (values, zeros [outputs, groups], scales
    likewise, what they mean)."""
    outputs, count = weight.shape[0], max(groups) + 1
    zeros = torch.randint(0, 2**bits, (outputs, count), generator=generator)
    if is_symmetric:
        zeros = torch.full_like(zeros, 2 ** (bits - 1))
    spread = weight.abs().max() * (1 + torch.rand(outputs, count, generator=generator))
    scales = (spread / 2 ** (bits - 1)).half()
    values = (weight / scales[:, groups].float() + zeros[:, groups]).round().clamp(0, 2**bits - 1)
    values = values.long()
    return values, zeros, scales, (values - zeros[:, groups]) * scales[:, groups].float()


def awq(group: int) -> Packer:
    def pack(weight: Tensor, generator: torch.Generator) -> Packed:
        size = weight.shape[1] if group == -1 else group
        groups = [place // size for place in range(weight.shape[1])]
        values, zeros, scales, means = quantised(weight, groups, 4, generator)

        def interleaved(rows: Tensor) -> Tensor:  # [n, outputs]: eight at a time
            order = [first + place for first in range(0, rows.shape[1], 8)
                     for place in (0, 2, 4, 6, 1, 3, 5, 7)]
            return packed_rows(rows[:, order], 4)

        return Packed({"qweight": interleaved(values.T), "qzeros": interleaved(zeros.T),
                       "scales": scales.T.contiguous()}, means)

    return pack


def gptq(bits: int, group: int, *, less: int = 1, is_ordered: bool = False,
         has_list: bool = True, is_symmetric: bool = False) -> Packer:
    def pack(weight: Tensor, generator: torch.Generator) -> Packed:
        inputs = weight.shape[1]
        size = inputs if group == -1 else group
        groups = [place // size for place in range(inputs)]
        if is_ordered:
            order = torch.randperm(inputs, generator=generator).tolist()
            groups = [groups[place] for place in order]
        values, zeros, scales, means = quantised(weight, groups, bits, generator,
                                                 is_symmetric=is_symmetric)
        stored = (zeros - less) % 2**bits
        tensors = {"qweight": packed_rows(values, bits).T.contiguous(),
                   "qzeros": packed_rows(stored.T, bits), "scales": scales.T.contiguous()}
        if has_list:
            tensors["g_idx"] = torch.tensor(groups, dtype=torch.int32)
        return Packed(tensors, means)

    return pack


def compressed(bits: int, group: int, *, has_zeros: bool = False) -> Packer:
    """pack-quantized: values and zero points are stored as two's complement plus half the range."""
    def pack(weight: Tensor, generator: torch.Generator) -> Packed:
        size = weight.shape[1] if group == -1 else group
        groups = [place // size for place in range(weight.shape[1])]
        values, zeros, scales, means = quantised(weight, groups, bits, generator,
                                                 is_symmetric=not has_zeros)
        tensors = {"weight_packed": packed_rows(values, bits), "weight_scale": scales,
                   "weight_shape": torch.tensor(weight.shape)}
        if has_zeros:
            tensors["weight_zero_point"] = packed_rows(zeros.T, bits).T.contiguous()
        return Packed(tensors, means)

    return pack


def scaled(high: int | None, wide: int | None, *, name: str = "weight_scale",
           dtype: torch.dtype = torch.float8_e4m3fn, has_zeros: bool = False,
           shape: tuple[int, ...] | None = None) -> Packer:
    """A scale for each `high` outputs and `wide` inputs (None: all of them)."""
    def pack(weight: Tensor, generator: torch.Generator) -> Packed:
        rows, columns = high or weight.shape[0], wide or weight.shape[1]
        grid = (-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
        scales = (torch.rand(grid, generator=generator) + 0.5) * weight.abs().max() / 100
        zeros = torch.randint(-20, 20, grid, generator=generator) * int(has_zeros)

        def on_each(values: Tensor) -> Tensor:
            wide = values.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
            return wide[:weight.shape[0], :weight.shape[1]]

        value = weight / on_each(scales) + on_each(zeros)
        stored = (value.round().clamp(-127, 127) if dtype == torch.int8 else value).to(dtype)
        means = (stored.float() - on_each(zeros)) * on_each(scales)
        tensors = {"weight": stored, name: scales if shape is None else scales.reshape(shape)}
        if has_zeros:
            tensors["weight_zero_point"] = zeros.to(torch.int8)
        return Packed(tensors, means)

    return pack


class Variant(NamedTuple):
    """A method with its settings: config.json's `quantization_config`, and who packs."""

    config: dict[str, Any]
    pack: Packer


AWQ = {"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True,
       "modules_to_not_convert": None}
GPTQ = {"quant_method": "gptq", "sym": False, "desc_act": False, "checkpoint_format": "gptq"}
VARIANTS: dict[str, Variant] = {
    "awq": Variant({**AWQ, "group_size": 32}, awq(32)),
    "awq-row": Variant({**AWQ, "group_size": -1}, awq(-1)),
    "gptq-4": Variant({**GPTQ, "bits": 4, "group_size": 32}, gptq(4, 32)),
    "gptq-8": Variant({**GPTQ, "bits": 8, "group_size": -1}, gptq(8, -1, has_list=False)),
    "gptq-2": Variant({**GPTQ, "bits": 2, "group_size": 32}, gptq(2, 32)),
    "gptq-3": Variant({**GPTQ, "bits": 3, "group_size": 32}, gptq(3, 32)),
    "gptq-4-ordered": Variant({**GPTQ, "bits": 4, "group_size": 16, "desc_act": True},
                              gptq(4, 16, is_ordered=True)),
    "gptq-4-v2": Variant({**GPTQ, "bits": 4, "group_size": 32, "checkpoint_format": "gptq_v2"},
                         gptq(4, 32, less=0)),
    "gptq-4-symmetric": Variant({**GPTQ, "bits": 4, "group_size": 40, "sym": True},
                                gptq(4, 40, is_symmetric=True)),
}
LEFT_OUT = "model.layers.1.mlp.down_proj"  # a product that each config excludes

COMPRESSED = {"quant_method": "compressed-tensors", "quantization_status": "compressed",
              "ignore": ["lm_head", LEFT_OUT], "kv_cache_scheme": None}


def scheme(form: str, *, is_dynamic: bool = False, **weights: Any) -> dict[str, Any]:
    """compressed-tensors' config of one group; `is_dynamic`: activations are quantised, too."""
    own = {"type": "int", "symmetric": True, "dynamic": False, "group_size": None, **weights}
    activations = {"num_bits": 8, "type": own["type"], "dynamic": True, "strategy": "token"}
    return {**COMPRESSED, "format": form, "config_groups": {"group_0": {
        "targets": ["Linear"], "weights": own, "output_activations": None,
        "input_activations": activations if is_dynamic else None}}}


VARIANTS |= {
    "w4a16": Variant(scheme("pack-quantized", num_bits=4, strategy="group", group_size=32),
                     compressed(4, 32)),
    "w4a16-zeros": Variant(scheme("pack-quantized", num_bits=4, strategy="group", group_size=16,
                                  symmetric=False), compressed(4, 16, has_zeros=True)),
    "w8a16": Variant(scheme("pack-quantized", num_bits=8, strategy="channel"), compressed(8, -1)),
    "w8a16-zeros": Variant(scheme("pack-quantized", num_bits=8, strategy="channel",
                                  symmetric=False), compressed(8, -1, has_zeros=True)),
    "w8a8": Variant(scheme("int-quantized", num_bits=8, strategy="channel", is_dynamic=True),
                    scaled(1, None, dtype=torch.int8)),
    "w8a8-zeros": Variant(scheme("int-quantized", num_bits=8, strategy="channel", symmetric=False,
                                 is_dynamic=True),
                          scaled(1, None, dtype=torch.int8, has_zeros=True)),
    "fp8-channel": Variant(scheme("float-quantized", num_bits=8, type="float", strategy="channel",
                                  is_dynamic=True), scaled(1, None)),
    "fp8-tensor": Variant(scheme("float-quantized", num_bits=8, type="float", strategy="tensor",
                                 is_dynamic=True), scaled(None, None, shape=(1,))),
    "fp8-blocks": Variant(
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
         "weight_block_size": [40, 24]}, scaled(40, 24, name="weight_scale_inv")),
    "fp8-whole": Variant({"quant_method": "fp8", "activation_scheme": "static"},
                         scaled(None, None, shape=())),
}


def make_quantised(name: str, directory: Path) -> Any:
    """Writes a Llama of three layers whose products are stored as VARIANTS[name], all but LEFT_OUT
    and the head; returns transformers' own of the same weights in float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
        initializer_range=0.3, bos_token_id=1, eos_token_id=EOS, pad_token_id=0))
    stir_norms_and_biases(model)
    model.eval().save_pretrained(directory)
    variant, generator = VARIANTS[name], torch.Generator().manual_seed(7)
    stored = load_file(directory / "model.safetensors")
    state = model.state_dict()
    for weight in [key for key in stored if "_proj." in key and not key.startswith(LEFT_OUT)]:
        packed = variant.pack(stored.pop(weight), generator)
        stored |= {weight.removesuffix("weight") + ending: tensor
                   for ending, tensor in packed.tensors.items()}
        state[weight].copy_(packed.weight)
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    own = {} if "ignore" in variant.config else {"modules_to_not_convert": [LEFT_OUT]}
    write_config(directory, quantization_config={**variant.config, **own})
    return model


def write_config(directory: Path, **changes: Any) -> None:
    """Changes keys of its config.json."""
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
