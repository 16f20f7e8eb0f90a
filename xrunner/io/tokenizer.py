"""Text to tokens and back, with the model's chat template; free of torch.

Uses the `tokenizers` library on tokenizer.json; a checkpoint with only the older vocabulary files
goes through transformers once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from xgpt.errors import MissingExtraError, XgptError

# Any of these makes a directory one with a tokenizer; without, requests must give tokens.
_VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "tokenizer.model", "spiece.model")


class TextTokenizer:
    """The tokenizer of one checkpoint directory. A directory without one (random weights) serves
    requests that give tokens; their answers have no text."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._backend = _load_backend(directory)
        self._settings = _read_json(directory / "tokenizer_config.json")
        self._template = _find_template(directory, self._settings)

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode_many(self, texts: Sequence[str], *, special: bool) -> list[list[int]]:
        """Tokens of several texts at once (the library works them in parallel)."""
        if not texts:
            return []
        if self._backend is None:
            raise XgptError(f"{self.directory} has no tokenizer: requests must give tokens")
        return [e.ids for e in self._backend.encode_batch(list(texts), add_special_tokens=special)]

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """`messages` in the model's chat template, up to where the assistant begins to speak.
        Raises XgptError without a template, ValueError if the template refuses the messages."""
        if self._template is None:
            raise XgptError(f"{self.directory}: the tokenizer has no chat template")
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def refuse(message: str) -> None:
            raise ValueError(message)

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        environment.filters["tojson"] = lambda v, **kw: json.dumps(v, ensure_ascii=False, **kw)
        tokens = {k: _token_text(v) for k, v in self._settings.items() if k.endswith("_token")}
        try:
            return environment.from_string(self._template).render(
                messages=messages, add_generation_prompt=True, **tokens)
        except TemplateError as cause:
            raise ValueError(f"chat template: {cause}") from None

    def decode(self, ids: Sequence[int]) -> str:
        if self._backend is None:
            return ""
        text: str = self._backend.decode(list(ids), skip_special_tokens=True)
        return text


def eos_ids(directory: Path) -> frozenset[int]:
    """End-of-sequence tokens: generation_config.json's, else config.json's."""
    for name in ("generation_config.json", "config.json"):
        value = _read_json(directory / name).get("eos_token_id")
        if value is not None:
            return frozenset(value if isinstance(value, list) else [value])
    return frozenset()


def start_token(directory: Path) -> int:
    """What an encoder-decoder model's decoder is fed first: generation_config.json's, else
    config.json's, else the padding token (T5's). Raises XgptError where none is named."""
    for key in ("decoder_start_token_id", "pad_token_id"):
        for name in ("generation_config.json", "config.json"):
            value = _read_json(directory / name).get(key)
            if value is not None:
                return int(value)
    raise XgptError(f"{directory}: config.json names no decoder_start_token_id")


def _load_backend(directory: Path) -> Any:
    """The `tokenizers` object; None where the directory has no vocabulary. Raises XgptError."""
    if not any((directory / name).is_file() for name in _VOCABULARIES):
        return None
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise MissingExtraError("tokenizers", "run", "tokenising prompts") from None
    path = directory / "tokenizer.json"
    if path.is_file():
        backend = Tokenizer.from_file(str(path))
    else:
        from transformers import AutoTokenizer

        try:
            backend = AutoTokenizer.from_pretrained(directory, use_fast=True).backend_tokenizer
        except (ValueError, OSError, ImportError) as cause:
            raise XgptError(f"{directory}: its tokenizer cannot be read: {cause}") from None
    # a checkpoint may carry the padding and truncation of its training
    backend.no_padding()
    backend.no_truncation()
    return backend


def _find_template(directory: Path, settings: Mapping[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several, by name
        template = next((t["template"] for t in template if t["name"] == "default"), None)
    return template


def _token_text(value: object) -> object:
    return value["content"] if isinstance(value, dict) and "content" in value else value


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
