"""Weights of fewer bits: tokens equal transformers' of the widened weights, on any part of a rank;
what is missing or wrong is named."""

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from examples import some
from quantised_toys import LEFT_OUT, VARIANTS, make_quantised, write_config
from replays import answers_of, generated
from safetensors.torch import load_file, save_file
from toy_runs import run_in_process
from toys import random_queries, spec_of

from xgpt.core.errors import InputError, XgptError
from xrunner.checkpoint.layout import wanted_tensors
from xrunner.checkpoint.reader import CheckpointReader
from xrunner.checkpoint.tensors import check_weights
from xrunner.models.weights import TensorPart

LAYOUTS = ((1,), (1, 1), (2,))  # tensor-parallel degrees of the stages


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """(directory, transformers' model of the same weights) of a variant, made when first asked."""

    @cache
    def make(name: str) -> tuple[Path, Any]:
        directory = tmp_path_factory.mktemp(name)
        return directory, make_quantised(name, directory)

    return make


# every weight of all of them is compared below
@pytest.mark.parametrize("name", some(VARIANTS, lambda name: name in (
    "awq", "gptq-3", "gptq-4-ordered", "w4a16-zeros", "w8a8", "fp8-blocks")))
def test_tokens_equal_generate_of_the_widened_weights(toy, name):
    (directory, model), queries = toy(name), random_queries(5)
    check_weights(directory, spec_of(directory))
    expected = generated(model, queries)
    assert len(set(map(tuple, expected.values()))) > 3
    for degrees in LAYOUTS:
        sink, _ = run_in_process(directory, queries, degrees=degrees)
        assert answers_of(sink) == expected


@pytest.mark.parametrize("name", VARIANTS)
def test_any_rows_or_columns_are_those_of_the_whole_and_all_is_exact(toy, name):
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


def test_fewer_bytes_are_read_than_the_weights_have_and_no_more_than_a_ranks(toy):
    directory, _ = toy("gptq-4")
    shape, name = (96, 64), "model.layers.0.mlp.up_proj.weight"
    reader = CheckpointReader(directory, torch.bfloat16)
    taken = reader.get(name, shape, TensorPart(0, 48, 96))
    assert taken.dtype == torch.bfloat16 and taken.shape == (48, 64)
    values, scales, zeros, order = 48 * 64 // 2, 2 * 2 * 48, 2 * 48 // 2, 4 * 64
    assert reader.bytes_read == values + scales + zeros + order


def test_what_is_stored_is_said_and_what_is_left_out_is_plain(toy):
    directory, _ = toy("awq")
    assert spec_of(directory).stored_as == "4 bits (AWQ, groups of 32)"
    assert f"{LEFT_OUT}.weight" in load_file(directory / "model.safetensors")


QWEIGHT = "model.layers.0.mlp.up_proj.qweight"


def rewritten(directory: Path, folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """A copy of a model with other tensors."""
    (folder / "config.json").write_text((directory / "config.json").read_text())
    stored = load_file(directory / "model.safetensors")
    change(stored)
    save_file(stored, folder / "model.safetensors")


def weight_of(folder: Path) -> torch.Tensor:
    return CheckpointReader(folder, torch.float32).get(QWEIGHT.replace("qweight", "weight"),
                                                       (96, 64))


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
        toy, tmp_path, name, ending, change, words):
    broken = QWEIGHT.replace("qweight", ending)

    def breaks(stored: dict[str, Any]) -> None:
        old = stored.pop(broken)
        if change is not None:
            stored[broken] = change(old).contiguous()

    rewritten(toy(name)[0], tmp_path, breaks)
    with pytest.raises(InputError) as caught:
        check_weights(tmp_path, spec_of(tmp_path))
    (mistake,) = caught.value.mistakes
    assert mistake.key == broken
    with pytest.raises(XgptError) as loading:
        weight_of(tmp_path)
    for said in (str(caught.value), str(loading.value)):
        for word in words:
            assert re.search(word, said), (word, said)


def test_shapes_that_a_method_cannot_store_are_named(toy, tmp_path):
    directory, _ = toy("awq")
    for file in directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    write_config(tmp_path, quantization_config={**VARIANTS["awq"].config, "group_size": 48})
    with pytest.raises(InputError, match="its 64 inputs are no multiple of 48"):
        check_weights(tmp_path, spec_of(tmp_path))


def test_biases_of_zeros_that_autogptq_adds_are_left_and_others_refused(toy, tmp_path):
    name = QWEIGHT.replace("qweight", "bias")
    rewritten(toy("gptq-4")[0], tmp_path, lambda stored: stored.setdefault(
        name, torch.zeros(96).half()))
    check_weights(tmp_path, spec_of(tmp_path))
    rewritten(tmp_path, tmp_path, lambda stored: stored[name].fill_(0.5))
    with pytest.raises(InputError, match="up_proj.bias.*no layer of the llama family takes it"):
        check_weights(tmp_path, spec_of(tmp_path))


@pytest.mark.parametrize(("name", "ending", "place", "value", "words"), [
    ("w4a16", "weight_shape", 1, 60, r"weight_shape says \[96, 60\].*\[96, 64\]"),
    ("gptq-4-ordered", "g_idx", 5, 4, "up_proj.weight.*g_idx names the group 4 of 4")])
def test_a_shape_beside_the_weight_and_groups_have_to_be_its_own(
        toy, tmp_path, name, ending, place, value, words):
    rewritten(toy(name)[0], tmp_path, lambda stored: stored[
        QWEIGHT.replace("qweight", ending)].index_fill_(0, torch.tensor([place]), value))
    with pytest.raises(XgptError, match=words):
        weight_of(tmp_path)
