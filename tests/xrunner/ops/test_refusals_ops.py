"""The library refuses what it cannot serve, in words, and then has written nothing."""

import ctypes
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from xrunner.ops.cpu import native
from xrunner.ops.cpu.products import is_pairs_served

HEADER = (Path(__file__).resolve().parents[3] / "csrc/ops/cpu/native.h").read_text("utf-8")
PLAIN = re.sub(r"/\*.*?\*/", "", HEADER, flags=re.S)
CODES = {name: int(number) for name, number in re.findall(r"(XGPT_WRONG_\w+) = (\d+)", HEADER)}
pytestmark = pytest.mark.skipif(native.library() is None, reason=native.describe())

TOLD = yaml.safe_load(Path(__file__).with_name("refusals.yaml").read_text("utf-8"))
SERVED, WRONG = TOLD["served"], TOLD["wrong"]
OVER = {name: {"tokens": 2} for name in TOLD["counts_tokens"]}


def parameters(name: str) -> list[tuple[str, str]]:
    """(type, name) of each, as native.h declares them."""
    found = re.search(rf"\b{name}\(([^)]*)\)", PLAIN)
    pairs = [re.fullmatch(r"(.*?)(\w+)", part.strip(), re.S) for part in found.group(1).split(",")]
    return [(pair.group(1).strip(), pair.group(2)) for pair in pairs if pair]


def is_array(declared: str) -> bool:
    return declared == "const int64_t *"


# Products whose units not every processor has.
UNSERVED = () if is_pairs_served() else ("xgpt_pairs_product", "xgpt_pairs_gated")
OPERATORS = [name for name, signature in native.OPERATORS.items()
             if len(signature) > 4 and name not in UNSERVED]


class Call:
    """One operator's arguments, and memory for every array that it is given."""

    def __init__(self, name: str, changed: dict[str, Any]) -> None:
        self.name, self._kept = name, list[Any]()
        values = SERVED | OVER.get(name, {}) | changed
        self.memory = {p: torch.ones(400) for kind, p in parameters(name)
                       if "*" in kind and not is_array(kind) and p != "arrays"}
        self.arguments = [self._argument(kind, p, values) for kind, p in parameters(name)]

    def _argument(self, kind: str, name: str, values: dict[str, Any]) -> Any:
        if name == "arrays":
            self.memory |= {"arrays 0": torch.ones(400), "arrays 1": torch.ones(400)}
            return self._array([self.memory["arrays 0"].data_ptr(),
                                self.memory["arrays 1"].data_ptr()])
        if is_array(kind):
            return self._array(values[name])
        return self.memory[name].data_ptr() if "*" in kind else values[name]

    def _array(self, numbers: list[int]) -> Any:
        self._kept.append((ctypes.c_int64 * len(numbers))(*numbers))
        return self._kept[-1]

    def __call__(self) -> int:
        lib = native.library()
        return int(getattr(lib, self.name)(*self.arguments))


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("dtype", [0, 1])
@pytest.mark.parametrize("kv_dtype", [0, 1])
def test_what_the_wrong_arguments_are_made_from_is_served(name, dtype, kv_dtype):
    assert Call(name, {"dtype": dtype, "kv_dtype": kv_dtype})() == 0


# What one operator refuses and another serves: it has no capacity, or no heads that share.
SERVED_THERE = {("xgpt_packed_attention", "lengths", (6, 1)), ("xgpt_place", "heads", 3),
                *((f"xgpt_{kind}_attention", "dim", 3) for kind in ("decode", "encode", "packed"))}


def is_wrong(name: str, changed: dict[str, Any]) -> bool:
    """Whether the operator has such arguments, of these kinds, and cannot serve them."""
    kinds = {p: kind for kind, p in parameters(name)}
    first = next(iter(changed))
    return first in kinds and all(
        p not in kinds or isinstance(value, list) == is_array(kinds[p])
        for p, value in changed.items()) and not any(
        (name, p, tuple(value) if isinstance(value, list) else value) in SERVED_THERE
        for p, value in changed.items())


@pytest.mark.parametrize(
    ("name", "code", "changed"),
    [(name, code, changed) for name in OPERATORS for code, cases in WRONG.items()
     for changed in cases if is_wrong(name, changed)],
    ids=lambda v: v if isinstance(v, str) else str(v))
def test_wrong_arguments_are_refused_and_nothing_is_written(name, code, changed):
    call = Call(name, changed)
    assert call() == CODES[code]
    with pytest.raises(ValueError, match="native operator: "):
        native.check(CODES[code])
    assert all((memory == 1).all() for memory in call.memory.values())


def test_every_code_has_words_of_its_own():
    lib = native.library()
    words = {lib.xgpt_words(code) for code in (0, *CODES.values(), 99)}
    assert len(words) == len(CODES) + 2


@pytest.mark.parametrize(("name", "counts"), [
    ("xgpt_decode_attention", {"n": 0}), ("xgpt_encode_attention", {"num_spans": 0}),
    ("xgpt_packed_attention", {"num_inputs": 0}), ("xgpt_place", {"tokens": 0}),
    ("xgpt_add_rms_norm", {"tokens": 0}), ("xgpt_add_layer_norm", {"tokens": 0}),
    ("xgpt_silu_mul", {"tokens": 0}), ("xgpt_kv_compact", {"num_moves": 0}),
    ("xgpt_kv_gather", {"n": 0}), ("xgpt_kv_scatter", {"n": 0}),
    ("xgpt_kv_compact", {"num_arrays": 0}), ("xgpt_kv_gather", {"num_arrays": 0})])
def test_nothing_to_do_is_served_and_nothing_is_written(name, counts):
    call = Call(name, counts)
    assert call() == 0
    assert all((memory == 1).all() for memory in call.memory.values())
