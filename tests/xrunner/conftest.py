from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the runner's tests need the extra `run`")

import toys  # noqa: E402


@pytest.fixture(scope="session", params=toys.FAMILIES)
def toy(request: pytest.FixtureRequest,
        tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """(directory, transformers' model) of each family in turn."""
    directory = tmp_path_factory.mktemp(request.param)
    return directory, toys.make_model(request.param, directory)


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp("llama-alone")
    return directory, toys.make_model("llama", directory)
