"""Errors meant for the user: what they say and the exit code they carry."""

import errno
import os
from pathlib import Path

import pytest

from xgpt.core.errors import (
    InfeasibleError,
    InputError,
    MissingExtraError,
    Mistake,
    StoppedEarly,
    UnknownNameError,
    XgptError,
    file_error_words,
    run_error_words,
)


@pytest.mark.parametrize(("mistake", "said"), [
    (Mistake(file="job.yaml", line=3, key="run.ranks", value="four", allowed="a number"),
     "job.yaml:3: run.ranks = 'four': a number"),
    (Mistake(file="--set", line=None, key="x", value=None, allowed="unknown key"),
     "--set: x: unknown key"),
    (Mistake(file="p.json", line=None, key="", value=None, allowed="no profile"),
     "p.json: no profile")])
def test_a_mistake_names_file_line_key_value_and_what_is_allowed(mistake, said):
    assert str(mistake) == said


def test_an_input_error_prints_every_mistake_and_of_very_many_a_terminals_worth():
    """A profile of 6 KB with one wrong key had made 218,000 characters."""
    mistakes = [Mistake(file="f", line=n, key="k", value="v" * 1000, allowed="a")
                for n in range(1_234)]
    assert len(str(mistakes[0])) < 90 and "..." in str(mistakes[0])
    few = InputError(mistakes[:3])
    assert few.mistakes == tuple(mistakes[:3]) and len(str(few).splitlines()) == 3
    told = str(InputError(mistakes)).splitlines()
    assert len(told) == 101 and told[-1] == "and 1,134 more of this kind or another"
    with pytest.raises(AssertionError):
        InputError([])


@pytest.mark.parametrize(("error", "code"), [
    (XgptError("x"), 1), (MissingExtraError("torch", "run", "running"), 1),
    (InputError([Mistake(file="f", line=1, key="k", value=1, allowed="a")]), 2),
    (UnknownNameError("model", "x", ["y"]), 2), (InfeasibleError("x"), 3), (StoppedEarly("x"), 75)])
def test_exit_codes_are_those_of_the_command_line_contract(error, code):
    assert error.exit_code == code


@pytest.mark.parametrize(("number", "said"), [
    (errno.ENOSPC, "/out: No space left on device; what is done is kept, and with room made"),
    (errno.EFBIG, "/out/results.jsonl: File too large for a limit on the size of files "
                  "(`ulimit -f`); what is done is kept, and with a higher one"),
    (errno.EMFILE, "`ulimit -n`"), (errno.ENFILE, "`ulimit -n`")])
def test_a_disk_without_room_and_a_limit_on_files_have_their_own_remedies(number, said):
    error = OSError(number, os.strerror(number), "/out/results.jsonl")
    found = run_error_words(error, Path("/out"))
    assert said in found and found.endswith("the same command goes on from there")


def test_a_folder_that_is_gone_while_one_is_in_it_is_no_fault_of_ours(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    error = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    assert file_error_words(error) is None
    monkeypatch.chdir(gone)
    gone.rmdir()
    said = file_error_words(error)
    assert said == "the folder that this was called in is gone: go to one that is there"
