"""Text to tokens and back, with the model's chat template; free of torch.

Uses the `tokenizers` library on tokenizer.json; a checkpoint with only the older vocabulary files
goes through transformers once."""

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from xgpt.core.errors import MissingExtraError, XgptError, wrong
from xgpt.core.model_file import load_json, wrong_file
from xgpt.core.whole_file import read_text

# Any of these makes a directory one with a tokenizer; without, requests must give tokens.
_VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "tokenizer.model", "spiece.model")

# What a template can raise besides its own errors, by what it does with the messages.
_IN_TEMPLATES = (TypeError, ArithmeticError, LookupError, AttributeError, RecursionError)


class TextTokenizer:
    """The tokenizer of one checkpoint directory. A directory without one (random weights) serves
    requests that give tokens; their answers have no text."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._backend = _backend_of(directory, tuple(
            (path.name, status.st_mtime_ns, status.st_size) for name in _VOCABULARIES
            if (path := directory / name).is_file() and (status := path.stat())))
        settings = _read_json(directory / "tokenizer_config.json")
        self.template = _find_template(directory, settings)  # of a chat, if there is one
        self._special_tokens = {  # a token is its text, or has it as its content
            k: v["content"] if isinstance(v, dict) and "content" in v else v
            for k, v in settings.items() if k.endswith("_token")}
        self._chat: Any = None  # the template, compiled once

    @property
    def is_there(self) -> bool:
        """Whether texts can be made tokens, and tokens texts."""
        return self._backend is not None

    def encode_many(self, texts: Sequence[str], *, special: bool) -> list[list[int]]:
        """Tokens of several texts at once (the library works them in parallel)."""
        if not texts:
            return []
        if self._backend is None:
            raise XgptError(f"{self.directory} has no tokenizer: requests must give tokens")
        return [e.ids for e in self._backend.encode_batch(list(texts), add_special_tokens=special)]

    def render_chat(self, messages: Sequence[Mapping[str, Any]],
                    tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        """`messages` in the model's chat template, up to where the assistant begins to speak, with
        the `tools` that it may call. Raises XgptError without a template, ValueError if the
        template refuses the messages or knows no tools."""
        if self.template is None:
            raise XgptError(f"{self.directory}: the tokenizer has no chat template")
        if tools and "tools" not in self.template:
            raise ValueError("tools: the model's chat template knows none, and would leave them "
                             "out; leave them out to have the line answered")
        from jinja2 import TemplateError

        try:
            self._chat = self._chat or _environment().from_string(self.template)
            text: str = self._chat.render(messages=messages, tools=tools,
                                          add_generation_prompt=True, **self._special_tokens)
        except (TemplateError, *_IN_TEMPLATES) as cause:
            raise ValueError(f"chat template: {cause}") from None
        return text

    def decode(self, ids: Sequence[int]) -> str:
        if self._backend is None:
            return ""
        text: str = self._backend.decode(list(ids), skip_special_tokens=True)
        return text


    def token_text(self, token: int) -> str:
        """The text of a single token, special ones included; a name of it where there is no
        tokenizer."""
        if self._backend is None:
            return f"token_id:{token}"
        text: str = self._backend.decode([token], skip_special_tokens=False)
        return text


def eos_ids(directory: Path) -> frozenset[int]:
    """End-of-sequence tokens: generation_config.json's, else config.json's."""
    for path, value in _configured(directory, "eos_token_id"):
        tokens = value if isinstance(value, list) else [value]
        if not all(is_token(token) for token in tokens):
            raise wrong(path, "eos_token_id", value, "a token id, or a list of them")
        return frozenset(tokens)
    return frozenset()


def start_token(directory: Path) -> int:
    """What an encoder-decoder model's decoder is fed first: generation_config.json's, else
    config.json's, else the padding token (T5's). Raises XgptError where none is named."""
    for key in ("decoder_start_token_id", "pad_token_id"):
        for path, value in _configured(directory, key):
            if not is_token(value):
                raise wrong(path, key, value, "a token id")
            return int(value)
    raise wrong(directory / "config.json", "decoder_start_token_id", None,
                "missing: the token that an encoder-decoder model's decoder is fed first")


def _configured(directory: Path, key: str) -> Iterator[tuple[Path, Any]]:
    """What each of the model's files says of `key`, with the file, the one that counts first."""
    for path in (directory / "generation_config.json", directory / "config.json"):
        if (value := _read_json(path).get(key)) is not None:
            yield path, value


def is_token(value: object) -> bool:
    """Whether it is a whole number from 0 on."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _environment() -> Any:
    """What a chat template may use."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise ValueError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.filters["tojson"] = lambda v, **kw: json.dumps(v, ensure_ascii=False, **kw)
    return environment


@lru_cache(maxsize=1)
def _backend_of(directory: Path, files: tuple[tuple[str, int, int], ...]) -> Any:
    """The `tokenizers` object, read once; None where the directory has no vocabulary. `files`: the
    (name, time, size) of what there is, by which another version is told. Raises XgptError."""
    if not files:
        return None
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise MissingExtraError("tokenizers", "run", "tokenising prompts") from None
    path = directory / "tokenizer.json"
    try:
        if path.is_file():
            backend = _from_file(Tokenizer, path)
        else:
            from transformers import AutoTokenizer

            # a folder's own code is never run: left open, transformers would ask on the terminal
            backend = AutoTokenizer.from_pretrained(
                directory, use_fast=True, trust_remote_code=False).backend_tokenizer
    except (ValueError, OSError, ImportError, LookupError, TypeError, AttributeError) as cause:
        raise wrong_file(path if path.is_file() else directory / "tokenizer",
                         f"cannot be read: {cause}") from None
    # a checkpoint may carry the padding and truncation of its training
    backend.no_padding()
    backend.no_truncation()
    return backend


def _from_file(library: Any, path: Path) -> Any:
    """Raises ValueError for a file that is no tokenizer."""
    text = read_text(path)
    try:
        return library.from_str(text)
    except Exception as cause:  # the library raises nothing more precise
        json.loads(text)  # says where it breaks off
        raise ValueError(cause) from None


def _find_template(directory: Path, settings: Mapping[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    if path.is_file():
        try:
            return read_text(path)
        except (OSError, ValueError) as cause:
            raise wrong_file(path, f"cannot be read: {cause}") from None
    template = settings.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise wrong(directory / "tokenizer_config.json", "chat_template", template, "text")
    return template


def _read_json(path: Path) -> dict[str, Any]:
    return load_json(path) if path.is_file() else {}
