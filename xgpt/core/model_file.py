"""A model's folder as wrong input sees it: config.json read, with every mistake by file and key."""

import json
from pathlib import Path
from typing import Any

from xgpt.core.errors import InputError, wrong
from xgpt.core.model import ModelSpec, from_hf_config


def load_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises InputError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as cause:
        raise wrong_file(path, f"cannot be read: {cause.strerror}") from None
    except (ValueError, RecursionError) as cause:
        raise wrong_file(path, f"cannot be read, it is no JSON: {cause}") from None
    if not isinstance(value, dict):
        raise wrong_file(path, "not a JSON object")
    return value


def read_shape(folder: Path, name: str) -> ModelSpec:
    """The shape in `folder`/config.json. Raises InputError."""
    path = folder / "config.json"
    return from_hf_config(load_json(path), name, path)


def wrong_file(path: Path, reason: str) -> InputError:
    """A file of a model that cannot be used."""
    return wrong(path.parent, path.name, None, reason)
