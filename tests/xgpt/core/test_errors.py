"""Errors meant for the user: what they say and the exit code they carry."""

from __future__ import annotations

import pytest

from xgpt.core.errors import (
    InfeasibleError,
    InputError,
    MissingExtraError,
    Mistake,
    StoppedEarly,
    UnknownNameError,
    XgptError,
    nearest,
)


def test_a_mistake_names_file_line_key_value_and_what_is_allowed() -> None:
    mistake = Mistake(file="job.yaml", line=3, key="run.ranks", value="four", allowed="a number")
    assert str(mistake) == "job.yaml:3: run.ranks = 'four': a number"


def test_a_mistake_without_line_or_value_leaves_them_out() -> None:
    mistake = Mistake(file="--set", line=None, key="x", value=None, allowed="unknown key")
    assert str(mistake) == "--set: x: unknown key"


def test_a_long_value_is_cut() -> None:
    mistake = Mistake(file="f", line=1, key="k", value="v" * 1000, allowed="short")
    assert len(str(mistake)) < 90 and "..." in str(mistake)


def test_an_input_error_prints_every_mistake() -> None:
    mistakes = [Mistake(file="f", line=n, key="k", value=n, allowed="a") for n in (1, 2, 3)]
    error = InputError(mistakes)
    assert error.mistakes == tuple(mistakes) and len(str(error).splitlines()) == 3


def test_of_very_many_mistakes_a_terminals_worth_is_printed() -> None:
    """A profile of 6 KB with one wrong key had made 218,000 characters."""
    mistakes = [Mistake(file="f", line=n, key="k", value=n, allowed="a") for n in range(1_234)]
    told = str(InputError(mistakes)).splitlines()
    assert len(told) == 101 and told[-1] == "and 1,134 more of this kind or another"


def test_an_input_error_without_mistakes_is_our_own_error() -> None:
    with pytest.raises(AssertionError):
        InputError([])


@pytest.mark.parametrize(("error", "code"), [
    (XgptError("x"), 1), (MissingExtraError("torch", "run", "running"), 1),
    (InputError([Mistake(file="f", line=1, key="k", value=1, allowed="a")]), 2),
    (UnknownNameError("model", "x", ["y"]), 2), (InfeasibleError("x"), 3), (StoppedEarly("x"), 75)])
def test_exit_codes_are_those_of_the_command_line_contract(error: XgptError, code: int) -> None:
    assert error.exit_code == code


def test_the_nearest_name_is_suggested_only_if_it_is_near() -> None:
    assert nearest("opt13b", ["opt-13b", "t5-11b"]) == (
        "did you mean 'opt-13b'? known: opt-13b, t5-11b")
    assert nearest("zzz", ["opt-13b"]) == "known: opt-13b"


def test_a_missing_package_names_the_extra_to_install() -> None:
    assert ".[run]" in str(MissingExtraError("torch", "run", "xgpt run"))
