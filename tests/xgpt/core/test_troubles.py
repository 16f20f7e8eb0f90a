"""What a machine does to a job, in the words of what to do about it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from xgpt.core.errors import in_words, of_a_file


@pytest.mark.parametrize(("number", "said"), [
    (errno.ENOSPC, "/out: No space left on device; what is done is kept, and with room made"),
    (errno.EFBIG, "/out/results.jsonl: File too large for a limit on the size of files "
                  "(`ulimit -f`); what is done is kept, and with a higher one")])
def test_a_disk_without_room_and_a_limit_on_files_have_their_own_remedies(number: int,
                                                                          said: str) -> None:
    error = OSError(number, os.strerror(number), "/out/results.jsonl")
    assert in_words(error, Path("/out")) == f"{said} the same command goes on from there"


def test_a_folder_that_is_gone_while_one_is_in_it_is_no_fault_of_ours(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    error = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    assert of_a_file(error) is None
    monkeypatch.chdir(gone)
    gone.rmdir()
    said = of_a_file(error)
    assert said == "the folder that this was called in is gone: go to one that is there"
