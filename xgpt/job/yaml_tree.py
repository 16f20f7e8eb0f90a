"""Reads a YAML file as a tree of values with their lines, for messages that name the place.

Scalars follow the YAML 1.2 core schema: `02:00:00` and `no` are text (YAML 1.1 would make them 7200
and false), `1e-3` is a number. Nothing is ever constructed from a tag."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from xgpt.core.errors import InputError, Mistake, wrong

Scalar: TypeAlias = "str | int | float | bool | None"
Value: TypeAlias = "Scalar | list[Field] | dict[str, Field]"
MAX_FILE_BYTES = 2**20  # chosen: a job file has a few hundred bytes
OVERRIDE_FILE = "--set"


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """A value of a file with its line; `line` is None for a value of the command line."""

    value: Value
    file: str
    line: int | None


class _CoreLoader(yaml.SafeLoader):
    """SafeLoader with the implicit types of YAML 1.2's core schema."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}


_NULL, _BOOL, _INT, _FLOAT, _STR = (
    f"tag:yaml.org,2002:{kind}" for kind in ("null", "bool", "int", "float", "str"))
_PATTERNS = (
    (_NULL, r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    (_BOOL, r"^(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    # a leading zero (an account number, a clock) stays text
    (_INT, r"^[-+]?(?:0|[1-9][0-9]*(?:_[0-9]+)*)$", list("-+0123456789")),
    (_FLOAT, r"^(?:[-+]?(?:[0-9]+\.[0-9]*(?:[eE][-+]?[0-9]+)?|\.[0-9]+(?:[eE][-+]?[0-9]+)?"
             r"|[0-9]+[eE][-+]?[0-9]+|\.(?:inf|Inf|INF))|\.(?:nan|NaN|NAN))$",
     list("-+.0123456789")),
)
for _tag, _pattern, _first in _PATTERNS:
    _CoreLoader.add_implicit_resolver(_tag, re.compile(_pattern), _first)


def read_tree(path: Path, mistakes: list[Mistake]) -> Field:
    """The tree of the file `path`. Appends duplicate keys and tags to `mistakes`. Raises InputError
    for a file that is no YAML."""
    try:
        if path.stat().st_size <= MAX_FILE_BYTES:
            return parse_tree(path.read_text(encoding="utf-8"), str(path), mistakes)
        why = f"larger than {MAX_FILE_BYTES} bytes: is it a job file?"
    except UnicodeDecodeError as cause:
        why = f"not UTF-8 text: {cause}"
    except (OSError, ValueError) as cause:  # ValueError: a null byte in the name
        why = f"cannot be read: {getattr(cause, 'strerror', None) or cause}"
        if isinstance(cause, FileNotFoundError):
            why += "; `xgpt init` writes a job file"
    raise wrong(path, "job file", None, why)


def parse_tree(text: str, file: str, mistakes: list[Mistake]) -> Field:
    """The tree of `text`; see `read_tree`."""
    try:
        node = yaml.compose(text, Loader=_CoreLoader)
        if node is None:
            return Field(value=None, file=file, line=1)
        return _TreeBuilder(file, mistakes).build(node)
    except yaml.MarkedYAMLError as cause:
        mark = cause.problem_mark or cause.context_mark
        line = mark.line + 1 if mark else None
        why = ", ".join(part for part in (cause.context, cause.problem) if part)
        if "alias" in why or "sequence entries are not allowed" in why:
            why += "; what begins with * or - needs quotes: '*.csv', '-'"
    except yaml.YAMLError as cause:
        line, why = None, " ".join(str(cause).split())
    except RecursionError:
        line, why = None, "nested too deeply"
    except (ValueError, OverflowError) as cause:
        # PyYAML lets these through for escapes beyond Unicode and for endless digits
        line, why = None, str(cause)
    raise wrong(file, "job file", None, f"not valid YAML: {why}", line)


def apply_override(tree: Field, text: str, mistakes: list[Mistake]) -> Field:
    """`tree` with one `key.path=value` of the command line applied; the value is read as YAML.

    An empty value (`key=`) is null, which means "not given". The reader of the tree checks whether
    the key exists."""
    path, equals, value = text.partition("=")
    keys = [key.strip() for key in path.split(".")]
    if not equals or not all(keys):
        mistakes.append(Mistake(file=OVERRIDE_FILE, line=None, key=path.strip() or "''",
                                value=None, allowed=f"{text!r} is not of the form key.path=value"))
        return tree
    try:
        field = without_lines(parse_tree(value, OVERRIDE_FILE, mistakes))
    except InputError as cause:
        mistakes.extend(replace(m, key=".".join(keys), line=None) for m in cause.mistakes)
        return tree
    return with_value(tree, keys, field)


def with_value(tree: Field, keys: Sequence[str], new: Field) -> Field:
    """`tree` with the value under a path of keys set to `new`."""
    if not keys:
        return new
    place, children = (tree, tree.value) if isinstance(tree.value, dict) else (new, {})
    below = children.get(keys[0], Field(value={}, file=new.file, line=None))
    return replace(place, value={**children, keys[0]: with_value(below, keys[1:], new)})


def data_of(field: Field) -> Any:
    """The value of a Field as plain dicts, lists and scalars, without lines."""
    if isinstance(field.value, dict):
        return {key: data_of(child) for key, child in field.value.items()}
    return [data_of(one) for one in field.value] if isinstance(field.value, list) else field.value


def without_lines(field: Field) -> Field:
    """`field` without lines, as a value of the command line."""
    value = field.value
    if isinstance(value, dict):
        value = {key: without_lines(child) for key, child in value.items()}
    elif isinstance(value, list):
        value = [without_lines(child) for child in value]
    return replace(field, value=value, line=None)


class _TreeBuilder:
    """Turns PyYAML's nodes into Fields; each node once, so aliases cannot multiply the work."""

    def __init__(self, file: str, mistakes: list[Mistake]) -> None:
        self._file, self._mistakes = file, mistakes
        self._done: dict[int, Field | None] = {}  # None: under way

    def build(self, node: yaml.Node) -> Field:
        if id(node) not in self._done:
            self._done[id(node)] = None
            self._done[id(node)] = self._field(node, self._value(node))
        elif self._done[id(node)] is None:
            self._note(node, "anchor", "an alias (*) must not stand inside its own anchor (&)")
        return self._done[id(node)] or self._field(node, None)

    def _field(self, node: yaml.Node, value: Value) -> Field:
        return Field(value=value, file=self._file, line=node.start_mark.line + 1)

    def _value(self, node: yaml.Node) -> Value:
        if isinstance(node, yaml.MappingNode) and node.tag == "tag:yaml.org,2002:map":
            return self._mapping(node)
        if isinstance(node, yaml.SequenceNode) and node.tag == "tag:yaml.org,2002:seq":
            return [self.build(child) for child in node.value]
        if isinstance(node, yaml.ScalarNode) and node.tag in (_NULL, _BOOL, _INT, _FLOAT, _STR):
            return self._scalar(node)
        self._note(node, "tag", f"{node.tag} is not used in a job file")
        return None

    def _mapping(self, node: yaml.MappingNode) -> dict[str, Field]:
        children: dict[str, Field] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self._note(key_node, "key", "a key must be a word")
            elif key_node.value in children:
                first = children[key_node.value].line
                self._note(key_node, key_node.value, f"given twice (first in line {first})")
            else:
                field = self.build(value_node)
                # the key's line: a nested value begins one line below
                children[key_node.value] = replace(field, line=key_node.start_mark.line + 1)
        return children

    def _scalar(self, node: yaml.ScalarNode) -> Scalar:
        text = str(node.value)
        try:
            text.encode("utf-8")
            if node.tag == _NULL:
                return None
            if node.tag == _BOOL:
                return {"true": True, "false": False}[text.lower()]
            if node.tag == _INT:
                return int(text)
            if node.tag == _FLOAT:
                return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
        except (ValueError, KeyError):  # a tag on other text, a lone surrogate, 5,000 digits
            self._note(node, "value", f"{text[:40]!r} cannot be read as its type, {node.tag}")
            return None
        return text

    def _note(self, node: yaml.Node, key: str, what: str) -> None:
        self._mistakes.append(Mistake(file=self._file, line=node.start_mark.line + 1, key=key,
                                      value=None, allowed=what))
