"""The library refuses what it cannot serve, in words, and then has written nothing."""

import ctypes
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from xrunner.ops.cpu import native
from xrunner.ops.cpu.products import is_pairs_served

HEADER = (Path(__file__).resolve().parents[3] / "csrc/ops/cpu/native.h").read_text("utf-8")
PLAIN = re.sub(r"/\*.*?\*/", "", HEADER, flags=re.S)
CODES = {name: int(number) for name, number in re.findall(r"(XGPT_WRONG_\w+) = (\d+)", HEADER)}
pytestmark = pytest.mark.skipif(native.library() is None, reason=native.describe())

# Arguments that are served, by the names that native.h gives them: two queries, two heads of size
# four that share one KV head, three slots of five entries.
SERVED: dict[str, Any] = {
    "dtype": 0, "kv_dtype": 0, "query_stride": 8, "stride": 8, "slots": [0, 2],
    "lengths": [5, 1], "n": 2, "first": [0, 4], "tokens": [2, 1], "num_spans": 2, "num_inputs": 2,
    "heads": 2, "kv_heads": 1, "dim": 4,
    "blocks": [0, 2], "most_blocks": 1, "num_blocks": 3, "block_size": 5,
    "num_slots": 3, "capacity": 5, "scale": 1.0, "bias_width": 9, "bias_center": 4,
    "threads": 2, "hidden_size": 8, "eps": 1e-5, "positions": [4, 0], "inner": 4,
    "num_arrays": 2, "slot_stride": 80, "sources": [2, 1], "targets": [0, 2], "num_moves": 2,
    "entry_bytes": 16, "block_tokens": 6, "vocabulary": 8, "first_token": 3,
    "size": 8, "inputs": 8, "outputs": 8, "relu": 1}
# A count of tokens, where the name is elsewhere a list.
OVER = {name: {"tokens": 2} for name in (
    "xgpt_add_rms_norm", "xgpt_add_layer_norm", "xgpt_place", "xgpt_silu_mul", "xgpt_quantise_rows",
    "xgpt_rescale_rows", "xgpt_pairs_product",
    "xgpt_pairs_gated")}
WRONG = {
    "XGPT_WRONG_DTYPE": [{"dtype": 2}, {"dtype": -1}, {"kv_dtype": 2}],
    "XGPT_WRONG_SIZE": [
        {"heads": 0}, {"kv_heads": 0}, {"dim": 0}, {"n": -1}, {"num_spans": -1}, {"num_inputs": -1},
        {"threads": 0}, {"heads": 3, "kv_heads": 2, "query_stride": 99}, {"query_stride": 7},
        {"stride": 7}, {"tokens": -1}, {"hidden_size": 0}, {"inner": 0}, {"num_moves": -1},
        {"vocabulary": -1}, {"size": 0}, {"inputs": 0}, {"outputs": 0},
        {"most_blocks": 0}, {"most_blocks": 2}, {"most_blocks": 2, "block_size": 8},
        {"most_blocks": 2, "block_size": 48},
        {"num_arrays": -1}, {"entry_bytes": 0}, {"slot_stride": 79}, {"dim": 3, "slot_stride": 99}],
    "XGPT_WRONG_SLOT": [
        {"blocks": [0, 3]}, {"blocks": [-1, 1]},
        {"most_blocks": 2, "block_size": 16, "blocks": [0, 3, 1, -1], "lengths": [17, 1],
         "first": [15, 0], "tokens": [2, 1]},
        {"slots": [0, 3]}, {"slots": [-1, 1]}, {"sources": [3, 0]}, {"targets": [0, -1]}],
    "XGPT_WRONG_LENGTH": [{"lengths": [6, 1]}, {"lengths": [1, -1]}, {"first": [-1, 0]},
                          {"first": [4, 0]}, {"tokens": [2, 6]}, {"tokens": [0, 1]},
                          {"positions": [5, 0]}, {"positions": [0, -1]}, {"block_tokens": 5}],
    "XGPT_WRONG_BIAS": [{"bias_center": 3}, {"bias_width": 4}],
}


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
