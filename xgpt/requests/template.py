"""Templates of prompts: text with names of columns in braces, "Summarise: {text}". A doubled brace
stands for one."""

import json
import re
from collections.abc import Mapping
from typing import Any

TEXT_COLUMN = "text"  # name of the lines of a text file in a template
_PARTS = re.compile(r"\{\{|\}\}|\{([^{}]+)\}")


def columns_in(template: str) -> tuple[str, ...]:
    """The columns that a template names, each once."""
    return tuple(dict.fromkeys(name for name in _PARTS.findall(template) if name))


def filled(template: str, values: Mapping[str, Any]) -> str | None:
    """The template with a row's values in place of its columns; None if all of them are empty. A
    value that is no text is written as JSON."""
    texts = {name: _text(values.get(name)) for name in columns_in(template)}
    if not any(text.strip() for text in texts.values()):
        return None
    return _PARTS.sub(lambda part: texts[part[1]] if part[1] else part[0][0], template)


def _text(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value, ensure_ascii=False, default=str)
