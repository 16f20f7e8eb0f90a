"""Native operators of csrc/ for CPUs: one shared library, loaded on first use.

`XGPT_NATIVE` is `auto` (native where available, else torch), `off`, or `require` (an error where
unavailable). An operator takes addresses, None for a null:

check(library().xgpt_silu_mul(code, out.data_ptr(), joint.data_ptr(), tokens, inner, threads()))"""

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from xgpt.core.errors import XgptError
from xrunner.checkpoint.source import cache_dir
from xrunner.ops.build import (
    LIBRARY,
    VARIABLE,
    BuildError,
    cached_library,
    extra_flags,
    source_folder,
)

WISHES = ("auto", "off", "require")
# in the order of csrc/ops/cpu/native.h
LEVELS = ("portable", "avx2", "avx512", "avx512_bf16")

# Signatures of csrc/ops/cpu/native.h, which names the arguments: result, then arguments. p:
# address; i: int; l: int64_t; f: float; s: text; v: nothing.
OPERATORS = {
    "xgpt_words": "s i",
    "xgpt_best_level": "i",
    "xgpt_least_level": "i",
    "xgpt_level": "i",
    "xgpt_use_level": "i i",
    "xgpt_use_openmp": "v p",
    "xgpt_decode_attention": "i iipplppplpllllllfplli",
    "xgpt_encode_attention": "i iipplppplppllllllfi",
    "xgpt_packed_attention": "i ipppplplllfplli",
    "xgpt_add_rms_norm": "i ippppllfi",
    "xgpt_add_layer_norm": "i ipppppllfi",
    "xgpt_place": "i iippppppplllllli",
    "xgpt_silu_mul": "i ipplli",
    "xgpt_keep_best": "i ipppllli",
    "xgpt_quantise_rows": "i ippplli",
    "xgpt_rescale_rows": "i ppplli",
    "xgpt_pack_four_bits": "i ippllii",
    "xgpt_unpack_four_bits": "i ippllli",
    "xgpt_has_pairs": "i",
    "xgpt_pairs_product": "i ppppillli",
    "xgpt_pairs_gated": "i pppllli",
    "xgpt_kv_compact": "i pllpppllllli",
    "xgpt_kv_gather": "i plpllppllllli",
    "xgpt_kv_scatter": "i plpllppllllli",
}
_TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int, "l": ctypes.c_int64, "f": ctypes.c_float,
          "s": ctypes.c_char_p, "v": None}
_DTYPES = {torch.float32: 0, torch.bfloat16: 1}


class Native(NamedTuple):
    """Result of loading. `origin`: where the library is from; `reason`: why there is none."""

    library: ctypes.CDLL | None
    origin: str = ""
    reason: str = ""


_native: Native | None = None
_lock = threading.Lock()


def library() -> ctypes.CDLL | None:
    """The library; None if torch is used. Raises XgptError if it is required and unavailable."""
    return (_native or _load_once()).library


def describe() -> str:
    """Which native operators are used on CPUs, or why none, in a line."""
    native = _native or _load_once()
    if native.library is None:
        return f"native operators: none, torch's serve: {native.reason}"
    products = ", products in bfloat16" if native.library.xgpt_has_pairs() else ""
    return (f"native operators: {LEVELS[native.library.xgpt_level()]}{products}, {native.origin}")


def check(code: int) -> None:
    """Raises ValueError if an operator returned another code than 0."""
    if code:
        lib = library()
        assert lib is not None, f"{code = } of no library"
        raise ValueError(f"native operator: {lib.xgpt_words(code).decode()}")


def dtype_code(tensor: Tensor) -> int | None:
    """The operators' number of the tensor's dtype; None if they do not support it."""
    return _DTYPES.get(tensor.dtype)


def serves(tensor: Tensor) -> bool:
    """Whether native operators support such a tensor here."""
    return tensor.is_cpu and tensor.dtype in _DTYPES and library() is not None


def threads() -> int:
    """Number of threads that an operator may use: torch's number."""
    return torch.get_num_threads()


def levels() -> tuple[str, ...]:
    """Instruction sets that this build and this processor have, the best one last."""
    lib = library()
    return () if lib is None else LEVELS[lib.xgpt_least_level():lib.xgpt_best_level() + 1]


@contextmanager
def torch_only() -> Iterator[None]:
    """Uses torch meanwhile, to compare the two."""
    global _native
    before, _native = _native, Native(None, reason="left aside")
    try:
        yield
    finally:
        _native = before


def open_native(wish: str) -> Native:
    """Loads the library as `wish` (of `WISHES`) says. Raises XgptError."""
    if wish not in WISHES:
        raise XgptError(f"{VARIABLE} is {wish!r}; it may be {', '.join(WISHES)}")
    if wish == "off":
        return Native(None, reason=f"{VARIABLE} is off")
    native = _open()
    if native.library is None and wish == "require":
        raise XgptError(f"{VARIABLE} is require, and there are no native operators: "
                        f"{native.reason}")
    return native


def _load_once() -> Native:
    global _native
    with _lock:
        if _native is None:
            _native = open_native(os.environ.get(VARIABLE, "").strip() or "auto")
    return _native


def _open() -> Native:
    """Loads the wheel's library, or the one compiled here."""
    why = []
    packaged = source_folder() / LIBRARY
    if packaged.is_file() and not extra_flags():
        try:
            return Native(_loaded(packaged), origin="as installed")
        except (OSError, AttributeError) as error:
            why.append(f"the installed library cannot be loaded ({error})")
    try:
        built = cached_library(cache_dir() / "native")
        return Native(_loaded(built), origin=f"compiled here ({built.name})")
    except (BuildError, OSError, AttributeError) as error:
        why.append(str(error))
    return Native(None, reason="; ".join(why))


def _loaded(path: Path) -> ctypes.CDLL:
    """The library with every operator declared and torch's threads. Raises OSError, also if it is
    for another processor, or AttributeError if it is of other sources."""
    lib = ctypes.CDLL(str(path))
    for name, signature in OPERATORS.items():
        result, _, arguments = signature.partition(" ")
        operator = getattr(lib, name)
        operator.restype = _TYPES[result]
        operator.argtypes = [_TYPES[kind] for kind in arguments]
    if lib.xgpt_best_level() < lib.xgpt_least_level():
        raise OSError(f"{path}: compiled for {LEVELS[lib.xgpt_least_level()]} and more, and this "
                      f"processor has {LEVELS[lib.xgpt_best_level()]}")
    lib.xgpt_use_openmp(_gomp_parallel())
    return lib


def _gomp_parallel() -> int | None:
    """Address of OpenMP's entry in torch's own library; None if torch's OpenMP has none."""
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        entry = ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_NOW).GOMP_parallel
    except (OSError, AttributeError):
        return None
    return ctypes.cast(entry, ctypes.c_void_p).value
