"""Weights of fewer bits: tokens equal transformers' of the widened weights, on any part of a rank;
what is missing or wrong is named."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from examples import some
from quantised_toys import LEFT_OUT, VARIANTS, make_quantised, write_config
from safetensors.torch import load_file, save_file
from toy_runs import run_in_process
from toys import generate, random_queries, spec_of

from xgpt.core.errors import InputError, XgptError
from xrunner.checkpoint.layout import wanted_tensors
from xrunner.checkpoint.reader import CheckpointReader
from xrunner.checkpoint.tensors import check_weights
from xrunner.models.weights import TensorPart

Made = Callable[[str], tuple[Path, Any]]
LAYOUTS = ((1,), (1, 1), (2,))  # tensor-parallel degrees of the stages


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """(directory, transformers' model of the same weights) of a variant, made when first asked."""

    @cache
    def make(name: str) -> tuple[Path, Any]:
        directory = tmp_path_factory.mktemp(name)
        return directory, make_quantised(name, directory)

    return make


# every weight of all of them is compared below
@pytest.mark.parametrize("name", some(VARIANTS, lambda name: name in (
    "awq", "gptq-3", "gptq-4-ordered", "w4a16-zeros", "w8a8", "fp8-blocks")))
def test_tokens_equal_generate_of_the_widened_weights(toy: Made, name: str) -> None:
    (directory, model), queries = toy(name), random_queries(5)
    check_weights(directory, spec_of(directory))
    expected = {q.index: generate(model, q) for q in queries}
    assert len(set(map(tuple, expected.values()))) > 3
    for degrees in LAYOUTS:
        sink, _ = run_in_process(directory, queries, degrees=degrees)
        assert {r.query.index: list(r.output_ids) for r in sink.results} == expected


@pytest.mark.parametrize("name", VARIANTS)
def test_any_rows_or_columns_are_those_of_the_whole_and_all_is_exact(toy: Made, name: str) -> None:
    directory, model = toy(name)
    reader, state = CheckpointReader(directory, torch.float32), model.state_dict()
    for tensor, shape in wanted_tensors(spec_of(directory)):
        assert torch.equal(reader.get(tensor, shape), state[tensor]), tensor
    tensor = "model.layers.0.mlp.down_proj.weight"
    whole = state[tensor]
    for dim, count in enumerate(whole.shape):
        for first, last in ((0, 1), (3, 3), (5, count - 7), (count // 2, count), (33, 47)):
            part = TensorPart(dim, first, last)
            assert torch.equal(reader.get(tensor, tuple(whole.shape), part), part.of(whole)), part


def test_fewer_bytes_are_read_than_the_weights_have_and_no_more_than_a_ranks(toy: Made) -> None:
    directory, _ = toy("gptq-4")
    shape, name = (96, 64), "model.layers.0.mlp.up_proj.weight"
    reader = CheckpointReader(directory, torch.bfloat16)
    taken = reader.get(name, shape, TensorPart(0, 48, 96))
    assert taken.dtype == torch.bfloat16 and taken.shape == (48, 64)
    values, scales, zeros, order = 48 * 64 // 2, 2 * 2 * 48, 2 * 48 // 2, 4 * 64
    assert reader.bytes_read == values + scales + zeros + order


def test_what_is_stored_is_said_and_what_is_left_out_is_plain(toy: Made) -> None:
    directory, _ = toy("awq")
    assert spec_of(directory).stored_as == "4 bits (AWQ, groups of 32)"
    assert f"{LEFT_OUT}.weight" in load_file(directory / "model.safetensors")


QWEIGHT = "model.layers.0.mlp.up_proj.qweight"


@pytest.mark.parametrize(("name", "ending", "change", "words"), [
    ("awq", "qzeros", None, ("no such tensor", "AWQ", r"\[2, 12\]")),
    ("awq", "scales", lambda t: t[:1], (r"\[2, 96\]", "AWQ, groups of 32", r"\[1, 96\]")),
    ("awq", "qweight", lambda t: t.long(), ("I32", "I64")),
    ("gptq-4-ordered", "g_idx", None, ("no such tensor", "GPTQ", r"\[64\]")),
    ("gptq-4", "qweight", lambda t: t.T, (r"\[8, 96\]", r"\[96, 8\]")),
    ("w4a16-zeros", "weight_zero_point", None, ("no such tensor", r"\[12, 4\]")),
    ("w8a16", "weight_packed", lambda t: t[:, :-1], (r"\[96, 16\]", "pack-quantized")),
    ("w8a8", "weight_scale", None, ("no such tensor", r"\[96, 1\] or \[96\]")),
    ("fp8-blocks", "weight_scale_inv", None, ("no such tensor", r"fp8.*\[3, 3\]")),
    ("fp8-blocks", "weight_scale_inv", lambda t: t[:1], (r"\[3, 3\]", "blocks of 40 x 24")),
    ("fp8-channel", "weight", lambda t: t.to(torch.int8), ("F8_E4M3", "I8"))])
def test_a_tensor_that_is_missing_or_wrong_is_named_with_its_method(
        toy: Made, tmp_path: Path, name: str, ending: str,
        change: Callable[[torch.Tensor], torch.Tensor] | None, words: tuple[str, ...]) -> None:
    directory, _ = toy(name)
    (tmp_path / "config.json").write_text((directory / "config.json").read_text())
    stored = load_file(directory / "model.safetensors")
    broken = QWEIGHT.replace("qweight", ending)
    old = stored.pop(broken)
    if change is not None:
        stored[broken] = change(old).contiguous()
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(InputError) as caught:
        check_weights(tmp_path, spec_of(tmp_path))
    (mistake,) = caught.value.mistakes
    assert mistake.key == broken
    with pytest.raises(XgptError) as loading:
        CheckpointReader(tmp_path, torch.float32).get(QWEIGHT.replace("qweight", "weight"),
                                                      (96, 64))
    for said in (str(caught.value), str(loading.value)):
        for word in words:
            assert re.search(word, said), (word, said)


def test_shapes_that_a_method_cannot_store_are_named(toy: Made, tmp_path: Path) -> None:
    directory, _ = toy("awq")
    for file in directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    write_config(tmp_path, quantization_config={**VARIANTS["awq"].config, "group_size": 48})
    with pytest.raises(InputError, match="its 64 inputs are no multiple of 48"):
        check_weights(tmp_path, spec_of(tmp_path))


def test_biases_of_zeros_that_autogptq_adds_are_left_and_others_refused(
        toy: Made, tmp_path: Path) -> None:
    directory, _ = toy("gptq-4")
    (tmp_path / "config.json").write_text((directory / "config.json").read_text())
    stored = load_file(directory / "model.safetensors")
    bias = stored.setdefault(QWEIGHT.replace("qweight", "bias"), torch.zeros(96).half())
    save_file(stored, tmp_path / "model.safetensors")
    check_weights(tmp_path, spec_of(tmp_path))
    bias[95] = 0.5
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match="up_proj.bias.*no layer of the llama family takes it"):
        check_weights(tmp_path, spec_of(tmp_path))


def test_a_shape_beside_the_weight_has_to_be_its_own(toy: Made, tmp_path: Path) -> None:
    directory, _ = toy("w4a16")
    (tmp_path / "config.json").write_text((directory / "config.json").read_text())
    stored = load_file(directory / "model.safetensors")
    stored[QWEIGHT.replace("qweight", "weight_shape")][1] = 60
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(XgptError, match=r"weight_shape says \[96, 60\].*\[96, 64\]"):
        CheckpointReader(tmp_path, torch.float32).get(QWEIGHT.replace("qweight", "weight"),
                                                      (96, 64))


def test_inputs_of_a_group_that_is_not_there_are_refused(toy: Made, tmp_path: Path) -> None:
    directory, _ = toy("gptq-4-ordered")
    (tmp_path / "config.json").write_text((directory / "config.json").read_text())
    stored = load_file(directory / "model.safetensors")
    stored[QWEIGHT.replace("qweight", "g_idx")][5] = 4
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(XgptError, match="up_proj.weight.*g_idx names the group 4 of 4"):
        CheckpointReader(tmp_path, torch.float32).get(QWEIGHT.replace("qweight", "weight"),
                                                      (96, 64))
