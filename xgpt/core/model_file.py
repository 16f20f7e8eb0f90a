"""A model's folder as wrong input sees it: config.json read, with every mistake by file and key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from xgpt.core.config_values import ConfigError
from xgpt.core.errors import InputError, Mistake
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
    return shape_of(load_json(path), path, name)


def shape_of(config: dict[str, Any], path: Path, name: str) -> ModelSpec:
    """The shape in a config.json that came from `path`. Raises InputError."""
    try:
        return from_hf_config(config, name)
    except ConfigError as error:
        raise InputError([
            Mistake(file=str(path), line=None, key=m.key, value=m.value, allowed=m.allowed)
            for m in error.mistakes]) from None


def wrong_file(path: Path, reason: str) -> InputError:
    """A file of a model that cannot be used."""
    return InputError([Mistake(file=str(path.parent), line=None, key=path.name, value=None,
                               allowed=reason)])
