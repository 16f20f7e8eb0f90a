"""Copies of models' tokenizers in xgpt's cache, made once by transformers for the `tokenizers`
library. transformers decides which keys of which files count."""

import contextlib
import hashlib
import io
import json
import os
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

from xgpt.core.errors import InputError, MissingExtraError, XgptError, wrong
from xgpt.core.hf.values import load_json, wrong_file
from xgpt.core.system.whole_file import sync_files
from xrunner.checkpoint.identity import WITHOUT_WEIGHTS, model_files

BACKEND, SAID = "tokenizer.json", "said.json"  # settings that tokenizer.json lacks
# a folder has a tokenizer if it has one of these, or a file `*.model`
_VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "tekken.json")
_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "config.json")
_FORMAT = 1


def copy_of(directory: Path, cache: Path) -> Path | None:
    """Folder of the copy; makes it if need be. Other files or another version of transformers get
    another copy. None if the model's folder has no tokenizer. Raises XgptError."""
    files = model_files(directory, WITHOUT_WEIGHTS) if directory.is_dir() else {}
    if not any(name in _VOCABULARIES or name.endswith(".model") for name in files):
        return None
    try:
        version = metadata.version("transformers")
    except metadata.PackageNotFoundError:
        raise MissingExtraError("transformers", "run", "tokenising prompts") from None
    key = hashlib.sha256(json.dumps([_FORMAT, version, files]).encode()).hexdigest()[:16]
    target = cache / key
    if not target.is_dir():
        for name in files:
            if name in (*_VOCABULARIES, *_SETTINGS) and name.endswith(".json"):
                load_json(directory / name)  # reports where a file is broken
        try:
            tokenizer = by_transformers(directory, directory / BACKEND)
        except InputError as cause:
            raise _blamed(directory, cause) from None
        try:
            _write(tokenizer, _said(tokenizer, directory), target)
        except OSError as cause:
            raise XgptError(f"{target}: the tokenizer of {directory} cannot be kept there: "
                            f"{cause.strerror}") from None
    return target


def _blamed(directory: Path, cause: InputError) -> InputError:
    """The error with the file and key that prevent a tokenizer, if one alone does."""
    for path in sorted(directory.iterdir()):
        is_template = path.suffix == ".jinja"  # a template has no keys
        values = load_json(path) if path.name in _SETTINGS else {"": None} if is_template else {}
        for key in sorted(values, key="model_type".__eq__):  # last: without it nothing is checked
            with tempfile.TemporaryDirectory() as scratch, contextlib.suppress(InputError):
                for other in {*directory.iterdir()} - {path}:
                    Path(scratch, other.name).symlink_to(other.resolve())
                if not is_template:
                    Path(scratch, path.name).write_text(json.dumps(
                        {name: value for name, value in values.items() if name != key}))
                by_transformers(Path(scratch), path)
                return wrong(path, key, values[key], cause.mistakes[0].allowed)
    return cause


def by_transformers(folder: Path, named: Path, **options: Any) -> Any:
    """The tokenizer that transformers makes of a folder. Raises XgptError, naming file `named`."""
    try:
        from transformers import AutoTokenizer
        from transformers.utils import logging
    except ImportError as cause:
        raise MissingExtraError(str(cause.name), "run", "reading a model's tokenizer") from None
    quiet: Any = logging  # its functions are unannotated
    quiet.set_verbosity_error()
    try:
        # code in the folder is never run; unset, transformers would ask on the terminal
        with contextlib.redirect_stderr(io.StringIO()):  # hides progress bars
            return AutoTokenizer.from_pretrained(
                folder, trust_remote_code=False, local_files_only=True, **options)
    except Exception as cause:  # transformers raises any error
        raise wrong_file(named, "something of which transformers makes a tokenizer: "
                                f"{type(cause).__name__}: {cause}") from None


def _said(tokenizer: Any, directory: Path) -> dict[str, Any]:
    """Settings that `tokenizers` does not keep. Raises InputError for unsupported ones."""
    settings, backend = directory / _SETTINGS[0], getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise wrong(settings, "tokenizer_class", type(tokenizer).__name__,
                    "a class of transformers that the `tokenizers` library works for")
    template = tokenizer.chat_template
    texts = template.values() if isinstance(template, dict) else [template or ""]
    if not all(isinstance(text, str) for text in texts):
        raise wrong(settings, "chat_template", template, "text, or a list of named texts")
    # byte-pair encodings keep their spaces, in versions that know this switch
    is_cleaned = type(backend.model).__name__ != "BPE" or getattr(
        tokenizer, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", True)
    return {"special_tokens": tokenizer.special_tokens_map, "chat_template": template,
            "splits_special_tokens": bool(tokenizer.split_special_tokens),
            "cleans_up": bool(tokenizer.clean_up_tokenization_spaces and is_cleaned)}


def _write(tokenizer: Any, said: dict[str, Any], target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch) / "tokenizer"
        made.mkdir()
        tokenizer.backend_tokenizer.save(str(made / BACKEND))
        (made / SAID).write_text(json.dumps(said), encoding="utf-8")
        sync_files(made)
        with contextlib.suppress(OSError):  # another process was faster: its copy is used
            os.replace(made, target)
