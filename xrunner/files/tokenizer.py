"""Text to tokens and back, as transformers does it, by the `tokenizers` library; free of torch.

A chat template renders messages as transformers' `apply_chat_template` does. Parts of a line that
it does not read are refused by name, since the answer would ignore them. Jinja's environment equals
theirs, by test: importing theirs takes most of a second."""

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from xgpt.core.errors import MissingExtraError, XgptError, wrong
from xgpt.core.hf.values import load_json, wrong_file
from xgpt.core.system.whole_file import read_text
from xrunner.checkpoint.source import cache_dir
from xrunner.checkpoint.tokenizer_copy import BACKEND, SAID, copy_of

_REASONING = ("reasoning_content", "thinking", "reasoning")  # names of one thing in transformers
_NOTHING: tuple[object, ...] = (None, False, "", [], {})  # values without effect
_OURS = {"messages", "tools", "add_generation_prompt"}


class ChatTemplate:
    """A model's chat templates: its default, and others by name. As in transformers, `tool_use` is
    taken for a chat with tools."""

    def __init__(self, sources: str | Mapping[str, str], special_tokens: Mapping[str, str],
                 now: datetime) -> None:
        """`now`: time of day that templates see, the same for all lines of a job."""
        self._sources = {"default": sources} if isinstance(sources, str) else sources
        self._special_tokens, self._now = special_tokens, now
        self._compiled = dict[str, Any]()

    def render(self, messages: Sequence[Mapping[str, Any]],
               tools: Sequence[Mapping[str, Any]] | None = None,
               options: Mapping[str, Any] | None = None) -> str:
        """Text of the messages up to where the assistant begins to speak. `tools`: that it may
        call. `options`: arguments of the template. Raises ValueError if the template refuses the
        messages, or would ignore a part of them."""
        name = "tool_use" if tools and "tool_use" in self._sources else "default"
        read, held = set[str](), dict[str, Any]()
        watched = [_Watched(_as_transformers(message), f"messages[{number}]", read, held)
                   for number, message in enumerate(messages)]
        try:
            if name not in self._sources:
                raise ValueError(f"none is the default; there are {', '.join(self._sources)}")
            if name not in self._compiled:
                self._compiled[name] = self._environment.from_string(self._sources[name])
            left_out = [f"chat_template_kwargs.{key}" for key in (options or {})
                        if key not in self.options]
            text: str = self._compiled[name].render(**{
                **self._special_tokens, "documents": None, **(options or {}),
                "messages": watched, "tools": tools, "add_generation_prompt": True})
        except Exception as cause:  # templates raise any kind of error
            said = str(cause).replace(f"'{__name__}.{_Watched.__name__} object'", "a message")
            raise ValueError(f"chat template: {said}") from None
        if tools and "tools" not in self._variables:
            left_out.append("tools")
        read.update(_implied(messages, read))
        for place in [one for one in held if one not in read and held[one] not in _NOTHING]:
            if not place.startswith(tuple(one + end for one in left_out for end in ".[")):
                left_out.append(place)  # not its parts as well
        if left_out:
            raise ValueError(f"{', '.join(left_out[:9])}: the model's chat template does not read "
                             "this, and would leave it out; leave it out to have the line answered")
        return text

    @cached_property
    def options(self) -> set[str]:
        """Arguments that the model's templates read besides messages and tools."""
        return self._variables - {*self._environment.globals} - _OURS

    @cached_property
    def _environment(self) -> Any:
        return _environment(self._now)  # ranks need not load its library

    @cached_property
    def _variables(self) -> set[str]:
        from jinja2 import TemplateError
        from jinja2.meta import find_undeclared_variables

        try:
            return {name for source in self._sources.values()
                    for name in find_undeclared_variables(self._environment.parse(source))}
        except TemplateError:  # reported when it is rendered
            return set()


def _noting(name: str, *, whole: bool = True) -> Any:
    def method(self: "_Watched", *args: Any) -> Any:
        self._read.update(self._place + str(key) for key in (
            dict.keys(self) if whole else args[:1]))
        return getattr(dict, name)(self, *args)
    return method


class _Watched(dict[str, Any]):
    """A dict that records in `read` which of its keys are read, as paths."""

    __slots__ = ("_place", "_read")

    def __init__(self, values: Mapping[str, Any], place: str, read: set[str],
                 held: dict[str, Any]) -> None:
        """`held`: filled with the value at each path."""
        self._place, self._read = f"{place}.", read
        for key, value in values.items():
            held[own := self._place + key] = value
            if isinstance(value, list):
                value = [_Watched(one, f"{own}[{number}]", read, held) if isinstance(one, dict)
                         else one for number, one in enumerate(value)]
            dict.__setitem__(self, key, _Watched(value, own, read, held) if isinstance(
                value, dict) else value)

    __getitem__, get, __contains__ = (
        _noting(name, whole=False) for name in ("__getitem__", "get", "__contains__"))
    __iter__, __repr__, keys, values, items, copy = map(
        _noting, ("__iter__", "__repr__", "keys", "values", "items", "copy"))


def _as_transformers(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with the model's reasoning under the names that templates know."""
    thought = next((message[key] for key in _REASONING if message.get(key) is not None), None)
    return dict(message) if thought is None else {
        "thinking": thought, **message, "reasoning_content": thought}


def _implied(messages: Sequence[Mapping[str, Any]], read: set[str]) -> Iterator[str]:
    """Paths that a template need not read. The result of a tool need not name its call if results
    come in order, and one name of the reasoning suffices."""
    calls: Iterator[Mapping[str, Any]] = iter(())
    for number, message in enumerate(messages):
        yield (place := f"messages[{number}].") + "role"
        is_thought = any(place + key in read for key in _REASONING)
        yield from (place + key for key in _REASONING if is_thought or key not in message)
        for own in range(len(found := message.get("tool_calls") or ())):
            yield from (f"{place}tool_calls[{own}].{key}" for key in ("id", "type", "index"))
        calls = iter(found) if found else calls
        call: Mapping[str, Any] = next(calls, {}) if message["role"] == "tool" else {}
        if call and message.get("tool_call_id") in (None, call.get("id")):
            yield place + "tool_call_id"
            if message.get("name") == call["function"]["name"]:
                yield place + "name"


def _environment(now: datetime) -> Any:
    """The Jinja environment of chat templates."""
    from jinja2 import TemplateError, nodes
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class Generation(Extension):
        """Marks what the assistant wrote, for trainers."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_text"), [], [], body).set_lineno(line)

        def _text(self, caller: Any) -> Any:
            return caller()

    class Dict:
        __call__: Any = staticmethod(dict)
        fromkeys: Any = staticmethod(dict.fromkeys)

    class Names(Namespace):
        def __init__(*args: Any, **values: Any) -> None:  # any name may be given, `self` too
            Namespace.__init__(args[0])
            for name, value in dict(*args[1:], **values).items():
                args[0][name] = value

        def __setitem__(self, name: str, value: Any) -> None:
            if isinstance(name, str) and name.startswith("_"):
                raise SecurityError(f"a namespace stores no attribute {name!r}")
            super().__setitem__(name, value)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.filters["tojson"] = (
        lambda value, ensure_ascii=False, indent=None, separators=None, sort_keys=False: json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
            sort_keys=sort_keys))
    environment.globals |= {"raise_exception": refuse, "strftime_now": now.strftime, "dict": Dict(),
                            "namespace": Names}
    return environment


# what transformers removes from decoded text if a tokenizer asks for cleaning up
_CLEANED = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")


class TextTokenizer:
    """Tokenizer of one checkpoint folder. A folder without one (random weights) serves requests
    that give tokens; their answers have no text."""

    def __init__(self, directory: Path, now: datetime | None = None) -> None:
        """`now`: time that chat templates see (None: the time of day). Raises XgptError."""
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
        """Whether the folder has a tokenizer."""
        return self._backend is not None

    @property
    def backend(self) -> Any:
        """The object of the `tokenizers` library, without padding and truncation."""
        return self._backend

    def encode_many(self, texts: Sequence[str], *, special: bool) -> list[list[int]]:
        """Tokens of several texts (the library works in parallel). `special`: add special
        tokens."""
        if not texts:
            return []
        if self._backend is None:
            raise XgptError(f"{self.directory} has no tokenizer: requests must give tokens")
        return [e.ids for e in self._backend.encode_batch(list(texts), add_special_tokens=special)]

    def render_chat(self, messages: Sequence[Mapping[str, Any]],
                    tools: Sequence[Mapping[str, Any]] | None = None,
                    options: Mapping[str, Any] | None = None) -> str:
        """Text of a chat: see ChatTemplate.render. Raises XgptError without a template."""
        if self.template is None:
            raise XgptError(f"{self.directory}: the tokenizer has no chat template")
        return self.template.render(messages, tools, options)

    def decode(self, ids: Sequence[int], *, skips_special: bool = True) -> str:
        """Text of an answer's tokens; "" without a tokenizer."""
        if self._backend is None:
            return ""
        text: str = self._backend.decode(list(ids), skip_special_tokens=skips_special)
        for spaced in _CLEANED if self._cleans_up else ():
            text = text.replace(spaced, spaced.strip())
        return text

    def token_text(self, token: int) -> str:
        """Text of a single token, special ones included; `token_id:N` without a tokenizer."""
        return self.decode([token], skips_special=False) if self.is_there else f"token_id:{token}"


def eos_ids(directory: Path) -> frozenset[int]:
    """End-of-sequence tokens, by generation_config.json, else config.json."""
    for path, value in _configured(directory, "eos_token_id"):
        tokens = value if isinstance(value, list) else [value]
        if not all(is_token(token) for token in tokens):
            raise wrong(path, "eos_token_id", value, "a token id, or a list of them")
        return frozenset(tokens)
    return frozenset()


def start_token(directory: Path) -> int:
    """First decoder token of an encoder-decoder model. By generation_config.json, else config.json,
    else the padding token (T5). Raises XgptError if none is named."""
    for key in ("decoder_start_token_id", "pad_token_id"):
        for path, value in _configured(directory, key):
            if not is_token(value):
                raise wrong(path, key, value, "a token id")
            return int(value)
    raise wrong(directory / "config.json", "decoder_start_token_id", None,
                "missing: the token that an encoder-decoder model's decoder is fed first")


def _configured(directory: Path, key: str) -> Iterator[tuple[Path, Any]]:
    """(file, value) of `key` in each of the model's files, the one that counts first."""
    for path in (directory / "generation_config.json", directory / "config.json"):
        if path.is_file() and (value := load_json(path).get(key)) is not None:
            yield path, value


def is_token(value: object) -> bool:
    """True for a whole number >= 0."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


@lru_cache(maxsize=1)
def _read(copy: Path) -> tuple[Any, dict[str, Any]]:
    """The `tokenizers` object of a copy, cached, and settings that it does not hold."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise MissingExtraError("tokenizers", "run", "tokenising prompts") from None
    said = load_json(copy / SAID)
    try:
        backend = Tokenizer.from_str(read_text(copy / BACKEND))
    except Exception as cause:  # the library raises nothing more specific
        raise wrong_file(copy / BACKEND, f"cannot be read: {cause}. Remove the folder to have it "
                                         "made again") from None
    # a checkpoint may contain the padding and truncation of its training
    backend.no_padding()
    backend.no_truncation()
    backend.encode_special_tokens = said["splits_special_tokens"]
    return backend, said
