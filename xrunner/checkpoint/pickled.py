"""What one of PyTorch's own files (`pytorch_model.bin`) says of its tensors, read without torch and
without running anything: a file of `torch.save` is a zip archive whose `data.pkl` is a pickle that
makes tensors of storages lying beside it. The few functions that such a pickle calls are replaced
here by ones that only note what they are told; any other it names is refused."""

import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from xrunner.checkpoint.quantised.parts import Stored

_MOST_PICKLE_BYTES = 100_000_000
_RECORDS = "data.pkl"
# torch's storages, and its dtypes, as safetensors calls the type of what they hold.
_STORAGES = {"DoubleStorage": "F64", "FloatStorage": "F32", "HalfStorage": "F16",
             "BFloat16Storage": "BF16", "LongStorage": "I64", "IntStorage": "I32",
             "ShortStorage": "I16", "CharStorage": "I8", "ByteStorage": "U8",
             "BoolStorage": "BOOL", "UntypedStorage": "U8"}
_DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
           "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "int64": "I64", "int32": "I32",
           "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL"}


class PickledTensor(NamedTuple):
    """A tensor, the record of the archive that holds its storage, and the element of it that the
    tensor begins with."""

    stored: Stored
    record: str
    first: int = 0


def pickled_tensors(path: Path) -> dict[str, PickledTensor]:
    """The tensors of a file of torch.save by name; what else it holds is left out. Raises
    ValueError where it is none, or names what no tensor is made by."""
    try:
        with zipfile.ZipFile(path) as archive:
            sizes = {entry.filename: entry.file_size for entry in archive.infolist()}
            name = next((name for name in sizes if name.split("/")[-1] == _RECORDS), None)
            if name is None or sizes[name] > _MOST_PICKLE_BYTES:
                raise ValueError("cannot be read: an archive without tensors")
            with archive.open(name) as records:
                held = _Noting(records, name.removesuffix(_RECORDS)).load()
    except zipfile.BadZipFile:
        raise ValueError("cannot be read: cut off, or no file of torch.save (those of PyTorch "
                         "before 1.6 are none any more)") from None
    except (pickle.UnpicklingError, EOFError, LookupError, TypeError, AttributeError,
            NotImplementedError, RecursionError, OverflowError) as cause:
        raise ValueError(f"cannot be read: {cause}") from None
    if not isinstance(held, dict):
        raise ValueError("holds no tensors by their names")
    tensors = {str(key): value for key, value in held.items() if isinstance(value, PickledTensor)}
    gone = [key for key, tensor in tensors.items() if tensor.record not in sizes]
    if gone:
        raise ValueError(f"cannot be read: what {gone[0]!r} is made of is not in it")
    return tensors


class _Noting(pickle.Unpickler):
    def __init__(self, records: Any, folder: str) -> None:
        super().__init__(records)
        self._folder = folder  # of the archive

    def find_class(self, module: str, name: str) -> Any:
        """The names that a pickle of tensors has; nothing is imported for any."""
        if module in ("torch", "torch.storage"):
            if name in _STORAGES:
                return _STORAGES[name]
            if name in _DTYPES:
                return _DTYPES[name]
            if name == "Size":
                return tuple
        made = _MADE.get((module, name))
        if made is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of a tensor")
        return made

    def persistent_load(self, pid: Any) -> tuple[str, str]:
        """A storage: (type, record)."""
        kind, of_type, key, *_ = pid
        if kind != "storage" or of_type not in _STORAGES.values():
            raise pickle.UnpicklingError(f"it refers to a {kind}")
        return of_type, f"{self._folder}data/{key}"


def _tensor(storage: tuple[str, str], first: int, shape: tuple[int, ...], *_: Any) -> PickledTensor:
    of_type, record = storage
    return PickledTensor(Stored(tuple(int(size) for size in shape), of_type), record, int(first))


def _typed_tensor(storage: tuple[str, str], first: int, shape: tuple[int, ...],
                  *others: Any) -> PickledTensor:
    """The same of a type that no storage is called by."""
    made, (_strides, _needs_grad, _hooks, dtype, *_) = _tensor(storage, first, shape), others
    return made._replace(stored=made.stored._replace(type=str(dtype)))


def _parameter(tensor: PickledTensor, *_: Any) -> PickledTensor:
    return tensor


_MADE: dict[tuple[str, str], Callable[..., Any]] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _typed_tensor,
    ("torch._utils", "_rebuild_parameter"): _parameter}
