"""Rows that every format's reader yields, and the roles of their parts: a request's content, id and
options, and other columns, which are copied into the results."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from xgpt.core.errors import nearest, shorten, wrong
from xgpt.requests.chat import BadRecord
from xgpt.requests.keys import CONTENTS, KEYS, OWN_KEYS
from xgpt.requests.request import is_openai, misspelt_option, refuse_misspelt
from xgpt.requests.request_files import RequestFiles
from xgpt.requests.template import TEXT_COLUMN, columns_in, filled

_SURROGATE = re.compile("[\ud800-\udfff]")  # lone ones, which no file can hold
NO_OTHERS: Mapping[str, Any] = {}
# Limit of a cell: a quote that is never closed takes up the rest of the file.
MAX_CELL_CHARS = 2**24  # chosen
MAX_DEPTH = 100  # chosen: of nesting in a request's JSON


class RepeatedKeyError(BadRecord):
    """A JSON object has a key twice, with different values."""

    def __init__(self, key: str) -> None:
        super().__init__(f"the key {shorten(key)} is given twice, with different values",
                         "invalid_json_line")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs) and (key := _differing(pairs, found)) is not None:
        raise RepeatedKeyError(key)
    return found


def _differing(pairs: list[tuple[str, Any]], last: Mapping[str, Any]) -> str | None:
    # compared as JSON: 1 and true are equal to Python
    return next((key for key, value in pairs if json.dumps(value) != json.dumps(last[key])), None)


_DECODER, _PLAIN = json.JSONDecoder(object_pairs_hook=_once), json.JSONDecoder()
_BETWEEN = re.compile(r"[\s,]*")  # items of an array


def parsed_items(text: str) -> Any:
    """The JSON value of `text`, as by `parsed`. In an array, an item with a repeated key is
    replaced by its RepeatedKeyError."""
    try:
        return parsed(text)
    except RepeatedKeyError:
        if not isinstance(parsed(text, _PLAIN), list):
            raise
    items, at = list[Any](), text.index("[") + 1
    while (gap := _BETWEEN.match(text, at)) and text[at := gap.end()] != "]":
        _, end = _PLAIN.raw_decode(text, at)
        try:
            items.append(parsed(text[at:end]))
        except RepeatedKeyError as cause:
            items.append(cause)
        at = end
    return items


def parsed(text: str, decoder: json.JSONDecoder = _DECODER) -> Any:
    """The JSON value of `text`. Raises ValueError for other text, RepeatedKeyError, and BadRecord
    for a value nested too deeply, which would exceed Python's recursion limit later."""
    try:
        value = decoder.decode(text)
    except RecursionError:
        raise BadRecord("not usable: JSON nested too deeply") from None
    if text.count("[") + text.count("{") > MAX_DEPTH and _depth(value) > MAX_DEPTH:
        raise BadRecord(f"not usable: JSON nested more than {MAX_DEPTH} deep")
    return value


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level := [one for one in level if isinstance(one, (dict, list))]:
        depth += 1
        level = [child for one in level for child in (
            one.values() if isinstance(one, dict) else one)]
    return depth


def without_surrogates(text: str) -> str:
    return _SURROGATE.sub("\ufffd", text)


class Row(NamedTuple):
    """One entry of a file. `record`: a request's keys (xgpt.requests.request), or the reason why
    the entry cannot be used; `name`: its id then. `others`: values to copy into the results; None
    if the reader has kept them."""

    line: int
    record: Mapping[str, Any] | str
    others: Mapping[str, Any] | None = NO_OTHERS
    number: int | None = None  # of a table's row, without the header; the default id
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Roles:
    """Roles of a table's columns. A column of the prompt's `template` has its name in braces as its
    role."""

    used: tuple[tuple[str, int], ...]  # (role, index in the header)
    carried: tuple[tuple[str, int], ...]  # (name in the results, index in the header)
    template: str = ""

    def record(self, values: Sequence[Any] | Mapping[int, Any]) -> dict[str, Any]:
        """A request's keys from a row, given by index of the columns. Raises BadRecord."""
        cells = {role: _cell(role, values[place]) for role, place in self.used}
        if not self.template:
            return cells
        own = {role[1:-1]: cells.pop(role) for role in [*cells] if role.startswith("{")}
        return {"prompt": prompt_of(self.template, own), **cells}

    def name(self, values: Sequence[Any] | Mapping[int, Any]) -> str | None:
        """The id of a row; None if it has none."""
        cells = [values[place] for role, place in self.used if role == "id"]
        cell = None if not cells or isinstance(cells[0], BadRecord) else _cell("id", cells[0])
        return None if cell is None else without_surrogates(str(cell))

    def others(self, values: Sequence[Any]) -> dict[str, Any]:
        return {name: values[place] for name, place in self.carried}


def roles_of(header: Sequence[str], files: RequestFiles, path: Path) -> Roles:
    """The Roles of a table's columns by its header. Raises InputError, naming the columns present,
    if a required one is missing."""
    names = [name or f"column_{place}" for place, name in enumerate(header, start=1)]
    if twice := [name for place, name in enumerate(names) if name in names[:place]]:
        raise wrong(path, "requests", None, f"two columns are called {twice[0]!r}: rename one", 1)
    given = {role: getattr(files, role) for role in ("prompt", "messages", "id")}
    roles = {role: name for role, name in given.items() if name is not None}
    for role, name in roles.items():
        if name not in names:
            raise wrong(path, f"workload.requests.{role}", name, _missing(name, names), 1)
    template = files.terms.template
    for name in columns_in(template):
        if name not in names:
            raise wrong(path, "workload.prompt", f"{{{name}}}", _missing(name, names) + _BRACES, 1)
        roles[f"{{{name}}}"] = name
    if not template and not roles.keys() & set(CONTENTS):
        content = next((name for name in CONTENTS if name in names), None)
        if content is None:
            raise wrong(path, "workload.requests.prompt", None, _missing("prompt", names)
                        + (". Say which one has the prompts: `requests: {file: ..., prompt: "
                           "COLUMN}`" if len(names) > 1 else ""), 1)
        roles[content] = content
    if "id" in names:
        roles.setdefault("id", "id")
    if files.has_options:
        roles |= {name: name for name in (*files.options, *OWN_KEYS)
                  if name in names and name not in roles.values()}
        for name in names:
            if name not in roles.values() and (meant := misspelt_option(name)) is not None:
                raise wrong(path, "requests", name, f"did you mean the column {meant!r}? rename "
                            "it or, if it is none of xgpt's options, say `options: false`", 1)
    # options that xgpt does not support are both read (to be refused if set) and carried; so are
    # prompts, beside which answers are read
    carried = [name for name in names if name not in roles.values() or f"{{{name}}}" in roles
               or roles.get("prompt") == name or (
        roles.get(name) == name and name not in (*files.options, *CONTENTS, "id"))]
    if files.carry is not None:
        if absent := [name for name in files.carry if name not in names]:
            raise wrong(path, "workload.requests.carry", absent[0], _missing(absent[0], names), 1)
        carried = list(files.carry)
    place_of = {name: place for place, name in enumerate(names)}
    return Roles(used=tuple((role, place_of[name]) for role, name in roles.items()),
                 carried=tuple((name, place_of[name]) for name in carried), template=template)


_BRACES = ". A brace of the prompt's own is written twice: {{"


def prompt_of(template: str, values: Mapping[str, Any]) -> str:
    """The prompt: a template filled with a row's columns. Raises BadRecord."""
    if missing := [name for name in columns_in(template) if name not in values]:
        raise BadRecord("workload.prompt: " + _missing(missing[0], [*values]) + _BRACES)
    if (prompt := filled(template, values)) is None:
        raise BadRecord("the columns of the prompt are empty: " + ", ".join(columns_in(template)))
    return prompt


def text_record(line: str, files: RequestFiles) -> dict[str, Any]:
    """A request's keys from a line of text: the prompt, or the text for the job's template."""
    template = files.terms.template
    return {"prompt": prompt_of(template, {TEXT_COLUMN: line}) if template else line}


def _missing(name: str, there: Sequence[str]) -> str:
    hint = nearest(name, there).replace("known:", "columns there:")
    if len(there) == 1 and (found := next((c for c in ";\t|" if c in there[0]), None)):
        hint += f". It looks as if {found!r} divides them: give `delimiter: {json.dumps(found)}`"
    return f"no column {name!r}; {hint}"


def _cell(role: str, value: Any) -> Any:
    """A cell's value as JSON would have it: CSV files hold texts, and whole numbers in a column
    with gaps arrive as floats. Raises BadRecord."""
    if isinstance(value, BadRecord):
        raise BadRecord(f"{value} in the column of {role}s")
    if isinstance(value, str) and len(value) > MAX_CELL_CHARS:
        raise BadRecord(f"{role} is longer than {MAX_CELL_CHARS // 2**20} MiB, the most that a "
                        "cell may have")
    if isinstance(value, float):
        if math.isnan(value):
            value = None
        elif value.is_integer():
            value = int(value)
    if role == "prompt":
        if value is None:
            raise BadRecord("the prompt is null: the cell is empty")
        return value
    if value is None or (isinstance(value, str) and not value.strip()):
        if role in CONTENTS:
            raise BadRecord(f"{role} is null: the cell is empty")
        return None
    if role == "id":
        return value if isinstance(value, (str, int)) else str(value)
    return _of_text(role, value) if isinstance(value, str) else value


def _of_text(role: str, text: str) -> Any:
    is_json = role in ("messages", "tokens", "continuation_tokens") or (
        role == "stop" and text.lstrip().startswith("["))
    of_text = KEYS[role].values.of_text or parsed if role in KEYS else str
    try:
        return parsed(text) if is_json else of_text(text)
    except ValueError as cause:
        if is_json:
            raise BadRecord(f"{role} is not JSON: {cause}") from None
        return text  # refused later, with the allowed values


def of_object(record: Mapping[str, Any], files: RequestFiles) -> tuple[
        Mapping[str, Any], Mapping[str, Any]]:
    """(a request's keys, other keys to copy into the results) of an object in a JSON file. Raises
    BadRecord."""
    template = files.terms.template
    if is_openai(record):
        if template:
            raise BadRecord("workload.prompt is filled with columns; a line in OpenAI's format "
                            "has its own prompt")
        return record, NO_OTHERS
    given = {role: name for role in ("prompt", "messages", "id")
             if (name := getattr(files, role)) is not None}
    names_content = bool(template or given.keys() & set(CONTENTS))
    taken = {role: record[name] for role, name in given.items() if name in record}
    if template:
        taken["prompt"] = prompt_of(template, record)
    own = [*(CONTENTS if not names_content else ()), *(("id",) if "id" not in given else ()),
           *(files.options if files.has_options else ())]
    used = {*given.values(), *own}
    others = {key: value for key, value in record.items() if key not in used} if (
        files.carry is None) else {key: record[key] for key in files.carry if key in record}
    if not given and not template and files.has_options:
        return record, others
    if files.has_options:
        refuse_misspelt(record.keys() - used)
    looked_at = {*own, *(OWN_KEYS if files.has_options else ())} - set(given.values())
    kept = {key: value for key, value in record.items() if key in looked_at}
    return {**kept, **taken}, others
