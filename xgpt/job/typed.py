"""Reads a mapping of a file as a dataclass: pydantic checks it against the annotations, and each of
its errors becomes a Mistake with file, line, key, value and what is allowed.

The allowed values are the field's description, or follow from its type. A wrong value counts as not
given from then on, so that the rest is checked all the same; the caller discards the result if
there are mistakes."""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import core_schema

from xgpt.core.errors import Mistake, nearest
from xgpt.core.units import parse_bytes, parse_count, parse_seconds, parse_share
from xgpt.job.yaml_tree import Field as Node
from xgpt.job.yaml_tree import data_of

Json = dict[str, Any]
CONFIG = ConfigDict(extra="forbid", arbitrary_types_allowed=True)  # of each dataclass of a file
# mappings whose keys xgpt does not know
_OF_OTHERS = ("engine_args", "chat_template_kwargs", "json_schema")
# Limits of quantities in a job file: larger ones are slips of the hand, or overflow.
LARGEST_NUMBER = 1e18  # FLOP/s of an exascale machine
LARGEST: dict[Callable[[Any], float], float] = {
    parse_bytes: 1e18, parse_seconds: 1e9, parse_share: 1.0}  # 1e9 s are 32 years


class Reading:
    """A file's tree and its mistakes, for checks that concern several keys."""

    def __init__(self, tree: Node, mistakes: list[Mistake]) -> None:
        self.tree, self.mistakes = tree, mistakes

    def at(self, key: str) -> Node | None:
        """The node of a dotted key; None if it is absent or null ("not given")."""
        node = self._nearest(key, is_there=True)
        return None if node is None or node.value is None else node

    def has(self, key: str) -> bool:
        """Whether the dotted key is given."""
        return self.at(key) is not None

    def reject(self, key: str, allowed: str) -> None:
        """Records that the value of `key`, or its absence, is a mistake, unless one is known of
        it."""
        place, node = self._nearest(key), self.at(key)
        value = None if node is None or isinstance(node.value, (dict, list)) else node.value
        if place is not None and not any(
                f"{key}.".startswith(f"{one.key}.") or one.key.startswith(f"{key}.")
                for one in self.mistakes):
            self.mistakes.append(Mistake(file=place.file, line=place.line, key=key, value=value,
                                         allowed=allowed))

    def _nearest(self, key: str, is_there: bool = False) -> Node | None:
        node = self.tree
        for part in key.split("."):
            if not isinstance(node.value, dict) or part not in node.value:
                return None if is_there else node
            node = node.value[part]
        return node


class Of:
    """A check of a field's value. `value_of` converts the file's value, or raises ValueError (with
    no words if `allowed` says all). `schema`: its JSON schema."""

    def __init__(self, value_of: Callable[..., Any], allowed: str = "", **schema: Any) -> None:
        self.value_of, self.schema = value_of, schema
        if allowed:
            self.schema["description"] = allowed

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(self.value_of)

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> Json:
        return {key: value() if callable(value) else value for key, value in self.schema.items()}


class InFolder(Of):
    """A check whose `value_of` also takes the file's folder, for paths."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.with_info_plain_validator_function(
            lambda value, info: self.value_of(value, info.context))


class OrMapping:
    """A check for a mapping, read as the dataclass `kind`, or a value that `one` accepts."""

    def __init__(self, kind: Any, one: Of, allowed: str | Callable[[], str]) -> None:
        self._kind, self._one, self._allowed = kind, one, allowed

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.tagged_union_schema(
            {"mapping": handler.generate_schema(self._kind),
             "one": self._one.__get_pydantic_core_schema__(source, handler)},
            lambda value: "mapping" if isinstance(value, dict) else "one")

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> Json:
        return {"description": self._allowed() if callable(self._allowed) else self._allowed,
                "anyOf": [self._one.__get_pydantic_json_schema__(schema, handler),
                          handler(schema["choices"]["mapping"])]}


def text_of(value: Any) -> str:
    """`value`, a printable text, without spaces around it. Raises ValueError."""
    if isinstance(value, str) and value.strip() and value.isprintable():
        return value.strip()
    raise ValueError


def texts_of(value: Any) -> tuple[str, ...]:
    """The texts of a list, or of a single text. Raises ValueError."""
    return tuple(map(text_of, value if isinstance(value, list) else [value]))


def text(allowed: str) -> Of:
    return Of(text_of, allowed, type="string", minLength=1)


def that(is_allowed: Callable[[Any], object], allowed: str = "",
         made: Callable[[Any], Any] = lambda value: value, **schema: Any) -> Of:
    """A check for values that `is_allowed` accepts, which `made` converts."""
    def value_of(value: Any) -> Any:
        if is_allowed(value):
            return made(value)
        raise ValueError

    return Of(value_of, allowed, **schema)


def matching(pattern: str, allowed: str, flags: int = 0, **schema: Any) -> Of:
    """A check for a text or a whole number that the pattern matches whole."""
    return that(lambda value: is_one_of(value, str, int) and str(value).isascii() and re.fullmatch(
        pattern, str(value), flags), allowed, str, **schema)


def choice(names: Sequence[str] | Callable[[], Sequence[str]],
           also: Mapping[str, str] = MappingProxyType({})) -> Of:
    """A check for one of these names, exactly. `also`: other words for some of them."""
    def value_of(value: Any) -> str:
        known = names() if callable(names) else names
        if isinstance(value, str) and also.get(value, value) in known:
            return also.get(value, value)
        raise ValueError(nearest(value if isinstance(value, str) else "", known).replace(
            "known:", "allowed:"))

    return Of(value_of, enum=lambda: [*(names() if callable(names) else names), *also])


def amount(parse: Callable[[Any], float], is_allowed: Callable[[float], bool],
           allowed: str) -> Of:
    """A check for a number or a text with a unit, read by `parse` of xgpt.core.units, that
    `is_allowed` accepts; at most as large as LARGEST says, or infinite."""
    largest = LARGEST.get(parse, LARGEST_NUMBER)

    def value_of(value: Any) -> float:
        if not is_one_of(value, str, int, float):
            raise ValueError
        try:
            number = parse(value)
        except (OverflowError, ValueError):
            raise ValueError from None
        if largest < number < math.inf:
            raise ValueError(f"{allowed}; at most {largest:g}")
        if not is_allowed(number):  # nor nan
            raise ValueError
        return number

    return Of(value_of, allowed, type=["number", "string"], maximum=largest)


def is_one_of(value: object, *types: type) -> bool:
    # NOTE: bool is an int in Python; `ranks: true` is a mistake all the same
    return isinstance(value, types) and not isinstance(value, bool)


class Number:
    """A check for a number of the annotated type, given as one or as text that
    xgpt.core.units.parse_count reads. `bounds`: named as in pydantic (ge, gt, le, lt)."""

    def __init__(self, allowed: str, **bounds: float) -> None:
        self._allowed, self._bounds = allowed, bounds

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        own: Any = self._bounds
        return core_schema.no_info_before_validator_function(
            parse_count, core_schema.int_schema(strict=True, **own) if source is int else
            core_schema.float_schema(strict=True, allow_inf_nan=False, **own))

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> Json:
        found: Json = handler(schema)
        words = {"description": self._allowed} if self._allowed else {}
        return {**words, **found, "type": [found["type"], "string"]}


def whole(least: int, most: int) -> Number:
    return Number("", ge=least, le=most)


def number(allowed: str, **bounds: float) -> Number:
    """A check for a finite number within `bounds`."""
    return Number(allowed, **{"le": LARGEST_NUMBER, **bounds})


Flag = Annotated[bool, Field(strict=True)]
Text = Annotated[str, text("text")]


def any_keys(allowed: str) -> Of:
    """A check for a mapping whose keys xgpt does not know."""
    return that(lambda value: isinstance(value, dict), allowed, type="object")


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


class _Schema(GenerateJsonSchema):
    """JSON schema without titles, in which every optional key may be null."""

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> Json:
        own = self.generate_inner(schema["schema"])
        said = [form.pop("description") for form in (own, *own.get("anyOf", ())[:1])
                if "description" in form]
        words = {"description": said[0]} if said else {}
        return {**words, "anyOf": [*_forms(own), {"type": "null"}]}

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


@cache
def schema_of(kind: Any) -> Json:
    """The JSON schema of a dataclass, without references and docstrings."""
    found = _adapter(kind).json_schema(schema_generator=_Schema)
    defs = found.pop("$defs", {})

    def inlined(node: Any) -> Any:
        if isinstance(node, list):
            return [inlined(each) for each in node]
        if not isinstance(node, dict):
            return node
        own = {key: inlined(value) for key, value in node.items() if key != "$ref"}
        if "$ref" not in node:
            return own
        target = inlined(defs[node["$ref"].rpartition("/")[2]])
        return {key: value for key, value in {**target, "description": None, **own}.items()
                if value is not None and key != "title"}

    for key in ("description", "title"):
        found.pop(key, None)
    schema: Json = inlined(found)
    return schema


def _forms(node: Json) -> Iterator[Json]:
    """Yields the schemas of a value that is given (not null)."""
    for form in node.get("anyOf", [node]):
        if form is not node and "anyOf" in form:
            yield from _forms(form)
        elif form.get("type") != "null":
            yield form


def read(kind: Any, node: Node, prefix: str, mistakes: list[Mistake],
         elsewhere: Callable[[], Mapping[str, str]] = dict, context: Any = None) -> Any:
    """The mapping `node` under the dotted key `prefix`, as a dataclass `kind`; None if a required
    key is missing. `elsewhere`: dotted keys of the whole file by their last names, for hints."""
    data, told = plain(node), list[tuple[str, ...]]()
    while True:
        try:
            return _adapter(kind).validate_python(data, context=context)
        except ValidationError as cause:
            is_whole, errors = True, cause.errors(include_url=False)
            # all of them before anything is left out
            for path, error in [(_path(data, error), error) for error in errors]:
                if not any(one[:len(path)] == path for one in told):  # nor within it
                    told.append(path)
                    mistakes.append(_mistake(kind, node, prefix, path, error, elsewhere))
                is_whole &= _left_out(data, path, error["type"])
            if not is_whole:
                return None


def _path(data: Any, error: Any) -> tuple[str, ...]:
    """Keys on the path to a wrong value, up to a whole list, without names of types."""
    path: list[str] = []
    for key in error["loc"]:
        if not isinstance(data, dict) or not isinstance(key, str):
            break
        if key in data:
            path.append(key)
            data = data[key]
        elif key == error["loc"][-1]:  # missing
            path.append(key)
    return tuple(path)


def _left_out(data: Any, path: tuple[str, ...], why: str) -> bool:
    """Removes the value at `path` from `data`, or the mapping that lacks a key; False if that is
    all of `data`."""
    if why in ("missing", "missing_keyword_only_argument"):
        path = path[:-1]
    if not path:
        return False
    for key in path[:-1]:
        data = data.get(key, {})
    data.pop(path[-1], None)
    return True


def _mistake(kind: Any, node: Node, prefix: str, path: tuple[str, ...], error: Any,
             elsewhere: Callable[[], Mapping[str, str]]) -> Mistake:
    place, value, form = node, None, schema_of(kind)
    within = form
    for key in path:
        within = next((one for one in _forms(form) if "properties" in one), {})
        form = within.get("properties", {}).get(key, {})
        children = place.value if isinstance(place.value, dict) else {}
        place = children.get(key, place)
        value = children[key].value if key in children else None
    dotted, why = prefix + ".".join(path), error["type"]
    if why == "unexpected_keyword_argument":
        meant = elsewhere().get(path[-1])
        allowed = "unknown key; " + nearest(path[-1], [*within.get("properties", {})],
                                            elsewhere=meant if meant != dotted else None)
        value = None
    elif why in ("missing", "missing_keyword_only_argument"):
        allowed = f"required: {_allowed(form)}"
    else:
        own = str(error["ctx"]["error"]) if why == "value_error" else ""
        kinds: dict[type, str] = {dict: ", not a mapping", list: ", not a list"}
        allowed = own or _allowed(form)
        if not own and "list" not in allowed:
            allowed += kinds.get(type(value), "")
    return Mistake(file=place.file, line=place.line, key=dotted,
                   value=None if isinstance(value, (dict, list)) else value, allowed=allowed)


def _allowed(form: Json) -> str:
    """Words for the values that a schema allows."""
    if "description" in form:
        return str(form["description"])
    form = next(_forms(form), {})
    if "enum" in form:
        return ", ".join(map(str, form["enum"]))
    match form.get("type"):
        case ["integer", "string"]:
            return f"a whole number >= {form['minimum']} and <= {form['maximum']}"
        case "boolean":
            return "true or false"
        case "object":
            return "a mapping"
        case "string":
            return "text"
    return str(form.get("description", "text"))


def plain(node: Node) -> Any:
    """The value of `node` without lines, and without keys that are null (not given), except in
    mappings whose keys xgpt does not know."""
    if isinstance(node.value, list):
        return [plain(one) for one in node.value]
    if not isinstance(node.value, dict):
        return node.value
    return {key: data_of(child) if key in _OF_OTHERS else plain(child)
            for key, child in node.value.items() if child.value is not None}
