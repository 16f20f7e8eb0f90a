"""A model's chat template: what text it makes of messages, as transformers' `apply_chat_template`
has it. What of a line it does not read is refused by name: an answer would look like one with it.

Jinja's environment is like theirs, by test: to import theirs takes most of a second."""

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

_REASONING = ("reasoning_content", "thinking", "reasoning")  # names of one thing, as transformers
_OF_CALLS = ("id", "type", "index")  # what the order of calls and of their results tells, too
_OURS = {"messages", "tools", "add_generation_prompt"}


class ChatTemplate:
    """The chat templates of one model: its default, and others by name, of which transformers takes
    `tool_use` for a chat with tools."""

    def __init__(self, sources: str | Mapping[str, str], special_tokens: Mapping[str, str],
                 now: datetime) -> None:
        """`now`: what templates are told, of all lines of a job."""
        self._sources = {"default": sources} if isinstance(sources, str) else sources
        self._special_tokens, self._environment = special_tokens, _environment(now)
        self._compiled = dict[str, Any]()

    def render(self, messages: Sequence[Mapping[str, Any]],
               tools: Sequence[Mapping[str, Any]] | None = None,
               options: Mapping[str, Any] | None = None) -> str:
        """The messages up to where the assistant begins to speak, with the `tools` that it may call
        and the template's own `options`. Raises ValueError where the template refuses them, or
        would leave out what they hold."""
        name = "tool_use" if tools and "tool_use" in self._sources else "default"
        watched = [_Watched(_as_transformers(message)) for message in messages]
        try:
            if name not in self._sources:
                raise ValueError(f"none is the default; there are {', '.join(self._sources)}")
            template = self._compiled.get(name)
            if template is None:
                template = self._environment.from_string(self._sources[name])
                self._compiled[name] = template
            left_out = [f"chat_template_kwargs.{key}" for key in (options or {})
                        if key not in self.options]
            text: str = template.render(**{
                **self._special_tokens, "documents": None, **(options or {}),
                "messages": watched, "tools": tools, "add_generation_prompt": True})
        except Exception as cause:  # a template's, which raises as it likes
            raise ValueError(f"chat template: {cause}") from None
        if tools and "tools" not in self._variables:
            left_out.append("tools")
        if left_out := [*left_out, *_unread(messages, watched)]:
            raise ValueError(f"{', '.join(left_out[:9])}: the model's chat template does not read "
                             "this, and would leave it out; leave it out to have the line answered")
        return text

    @cached_property
    def options(self) -> set[str]:
        """What the model's templates read besides the messages and the tools."""
        return self._variables - self._environment.globals.keys() - _OURS

    @cached_property
    def _variables(self) -> set[str]:
        from jinja2 import TemplateError
        from jinja2.meta import find_undeclared_variables

        try:
            return {name for source in self._sources.values()
                    for name in find_undeclared_variables(self._environment.parse(source))}
        except TemplateError:  # which is said where it is rendered
            return set()


class _Watched(dict[str, Any]):
    """A mapping that keeps which of its keys were looked at, and does all else as a dict."""

    __slots__ = ("_read",)

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__({key: _watched(value) for key, value in values.items()})
        self._read = set[object]()

    def __getitem__(self, key: str) -> Any:
        self._read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._read.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self._read.add(key)
        return super().__contains__(key)

    def _of_all(name: str) -> Any:  # type: ignore[misc]  # noqa: N805 (makes the methods below)
        def method(self: "_Watched", *args: object) -> Any:
            self._read.update(dict.keys(self))
            return getattr(dict, name)(self, *args)
        return method

    __iter__, __repr__, keys, values, items, copy = map(
        _of_all, ("__iter__", "__repr__", "keys", "values", "items", "copy"))


def _watched(value: Any) -> Any:
    if isinstance(value, Mapping):
        return _Watched(value)
    return [_watched(one) for one in value] if isinstance(value, list) else value


def _as_transformers(message: Mapping[str, Any]) -> dict[str, Any]:
    """With what the model thought under the names that templates know."""
    thought = next((message[key] for key in _REASONING if message.get(key) is not None), None)
    return dict(message) if thought is None else {
        "thinking": thought, **message, "reasoning_content": thought}


def _unread(messages: Sequence[Mapping[str, Any]], watched: Sequence[_Watched]) -> Iterator[str]:
    """What of the messages was not looked at as they were rendered, by its place. The result of a
    tool need not say whose it is where results come in the order of the calls."""
    calls: list[Mapping[str, Any]] = []
    for place, (message, seen) in enumerate(zip(messages, watched, strict=True)):
        read = {"role", *seen._read}
        if message.get("tool_calls"):
            calls = list(message["tool_calls"])
        elif message["role"] == "tool" and calls:
            call = calls.pop(0)
            if message.get("tool_call_id") in (None, call.get("id")):
                read |= {"tool_call_id"}
                read |= {"name"} if message.get("name") == call["function"]["name"] else set()
        if read & {*_REASONING}:
            read |= {*_REASONING}
        for key in message:
            yield from _unread_under(seen, key, f"messages[{place}]", read)


def _unread_under(values: _Watched, key: str, place: str, read: set[Any]) -> Iterator[str]:
    value, place = dict.get(values, key), f"{place}.{key}"
    if value in (None, False, "", [], {}):
        return
    if key not in read:
        yield place
        return
    inner = value if isinstance(value, list) else [value]
    for number, one in enumerate(inner):
        if isinstance(one, _Watched):
            own = f"{place}[{number}]" if inner is value else place
            for name in dict.keys(one):
                yield from _unread_under(one, name, own, {*_OF_CALLS, *one._read})


def _environment(now: datetime) -> Any:
    """What a chat template may use."""
    from jinja2 import TemplateError, nodes
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class Generation(Extension):
        """Marks what the assistant wrote, which trainers want to know."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_text"), [], [], body).set_lineno(line)

        def _text(self, caller: Any) -> Any:
            return caller()

    class Dict:
        def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
            return dict(*args, **values)

        def fromkeys(self, *args: Any) -> dict[Any, Any]:
            return dict.fromkeys(*args)

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

    def to_json(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None,
                sort_keys: bool = False) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                          sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.filters["tojson"] = to_json
    environment.globals |= {"raise_exception": refuse, "strftime_now": now.strftime, "dict": Dict(),
                            "namespace": Names}
    return environment
