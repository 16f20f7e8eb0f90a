"""Text to tokens and back, as transformers does it, by the `tokenizers` library; free of torch."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from xgpt.core.errors import MissingExtraError, XgptError, wrong
from xgpt.core.model_file import load_json, wrong_file
from xgpt.core.whole_file import read_text
from xrunner.checkpoint.source import cache_dir
from xrunner.checkpoint.tokenizer_copy import BACKEND, SAID, copy_of
from xrunner.files.chat_template import ChatTemplate

# What transformers takes out of decoded text, where a tokenizer is said to be cleaned up after.
_CLEANED = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")


class TextTokenizer:
    """The tokenizer of one checkpoint directory. A directory without one (random weights) serves
    requests that give tokens; their answers have no text."""

    def __init__(self, directory: Path, now: datetime | None = None) -> None:
        """`now`: what chat templates are told, if not the time of day. Raises XgptError."""
        self.directory = directory
        copy = copy_of(directory, cache_dir() / "tokenizers")
        self._backend: Any = None
        said = dict[str, Any]()
        if copy is not None:
            self._backend, said = _read(copy)
        self._cleans_up = bool(said.get("cleans_up"))
        template = said.get("chat_template")
        self.template = None if template is None else ChatTemplate(
            template, said["special_tokens"], now or datetime.now())

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
                    tools: Sequence[Mapping[str, Any]] | None = None,
                    options: Mapping[str, Any] | None = None) -> str:
        """See ChatTemplate.render. Raises XgptError without a template."""
        if self.template is None:
            raise XgptError(f"{self.directory}: the tokenizer has no chat template")
        return self.template.render(messages, tools, options)

    def decode(self, ids: Sequence[int], *, skips_special: bool = True) -> str:
        """The text of an answer; "" where there is no tokenizer."""
        if self._backend is None:
            return ""
        text: str = self._backend.decode(list(ids), skip_special_tokens=skips_special)
        for spaced in _CLEANED if self._cleans_up else ():
            text = text.replace(spaced, spaced.strip())
        return text

    def token_text(self, token: int) -> str:
        """The text of a single token, special ones included; a name of it where there is no
        tokenizer."""
        return self.decode([token], skips_special=False) if self.is_there else f"token_id:{token}"


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


@lru_cache(maxsize=1)
def _read(copy: Path) -> tuple[Any, dict[str, Any]]:
    """The `tokenizers` object of a copy, read once, and what that does not keep."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise MissingExtraError("tokenizers", "run", "tokenising prompts") from None
    said = load_json(copy / SAID)
    try:
        backend = Tokenizer.from_str(read_text(copy / BACKEND))
    except Exception as cause:  # the library raises nothing more precise
        raise wrong_file(copy / BACKEND, f"cannot be read: {cause}. Remove the folder to have it "
                                         "made again") from None
    # a checkpoint may carry the padding and truncation of its training
    backend.no_padding()
    backend.no_truncation()
    backend.encode_special_tokens = said["splits_special_tokens"]
    return backend, said


def _read_json(path: Path) -> dict[str, Any]:
    return load_json(path) if path.is_file() else {}
