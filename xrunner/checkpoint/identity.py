"""Identity of a model: hashes of the files that decide its answers; free of torch.

Names and dates of folders do not matter. Small files are hashed whole. Of weights, which may be
hundreds of gigabytes, the size, the beginning (safetensors' header) and evenly spaced blocks are.
Other weights, training steps or types differ in all of these. Only `weights_whole`, which reads
all, sees a change of a few bytes between two blocks."""

import hashlib
from collections.abc import Collection, Mapping
from functools import lru_cache
from pathlib import Path

_WEIGHTS = (".safetensors", ".bin", ".gguf")
# config, generation_config, tokenizer, its vocabulary and merges, chat template
WITHOUT_WEIGHTS = (".json", ".txt", ".model", ".jinja")
_BLOCKS, _BLOCK_BYTES, _BEGINNING_BYTES = 32, 2**14, 2**20  # chosen


def model_files(directory: Path,
                suffixes: Collection[str] = (*_WEIGHTS, *WITHOUT_WEIGHTS)) -> dict[str, str]:
    """Hash (16 hex digits) by name of the files that decide a model's answers. `suffixes`: only of
    files with these. Raises OSError."""
    return {path.relative_to(directory).as_posix(): _digest(path)
            for path in _deciding(directory, suffixes)}


def _deciding(directory: Path, suffixes: Collection[str]) -> list[Path]:
    paths = [*directory.iterdir(), *directory.glob("additional_chat_templates/*.jinja")]
    return sorted(path for path in paths if path.suffix in suffixes and path.is_file())


def files_state(directory: Path) -> str:
    """Hash (16 hex digits) of these files' sizes and times: changes when one is written. Reads no
    contents. Raises OSError."""
    digest = hashlib.sha256()
    for path in _deciding(directory, (*_WEIGHTS, *WITHOUT_WEIGHTS)):
        found = path.stat()
        digest.update(repr((path.name, found.st_ino, found.st_size, found.st_mtime_ns,
                            found.st_ctime_ns)).encode())
    return digest.hexdigest()[:16]


def weights_whole(directory: Path) -> dict[str, str]:
    """SHA-256 by name of the weight files. A file is hashed again only if its size or time has
    changed. Raises OSError."""
    found = {}
    for path in sorted(directory.iterdir()):
        if path.suffix in _WEIGHTS and path.is_file():
            state = path.stat()
            found[path.name] = _whole(path, state.st_size, state.st_mtime_ns)
    return found


@lru_cache(1024)
def _whole(path: Path, size: int, mtime_ns: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def changed_files(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Sorted names of files whose hashes differ or that only one side has."""
    return sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))


def _digest(path: Path) -> str:
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        if path.suffix not in _WEIGHTS or size <= _BEGINNING_BYTES + _BLOCKS * _BLOCK_BYTES:
            while part := file.read(_BEGINNING_BYTES):
                digest.update(part)
        else:
            digest.update(file.read(_BEGINNING_BYTES))
            for block in range(1, _BLOCKS + 1):
                file.seek((size - _BLOCK_BYTES) * block // _BLOCKS)
                digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()[:16]
