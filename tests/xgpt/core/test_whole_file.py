"""Files of unknown origin that are read as a whole: plain ones, and not without end."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from xgpt.core import whole_file
from xgpt.core.errors import InputError
from xgpt.core.model_file import load_json
from xgpt.core.schedule_file import load_schedule
from xprofiler.profile_file import load_profile

READERS = pytest.mark.parametrize("read", [load_json, load_schedule, load_profile])


@READERS
def test_a_pipe_is_no_file_and_is_not_waited_for(read: Callable[[Path], object],
                                                 tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    os.mkfifo(path)
    with pytest.raises(InputError, match="no plain file"):
        read(path)


@READERS
def test_what_is_larger_than_such_a_file_is_refused(
        read: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert whole_file.MOST_BYTES == 128 * 2**20
    monkeypatch.setattr(whole_file, "MOST_BYTES", 2**20)
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(2**20 + 1)
    with pytest.raises(InputError, match="larger than 1 MiB"):
        read(path)
