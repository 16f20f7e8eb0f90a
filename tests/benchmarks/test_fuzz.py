"""A small share of the fuzzer's cases (benchmarks/fuzz.py), and those that failed once."""

import random
from pathlib import Path

import fuzz
import pytest


@pytest.mark.parametrize(("kind", "cases"), [("job file", 40), ("file of requests", 60)])
def test_spoiled_input_is_taken_or_refused(kind, cases):
    tried = [fuzz.try_case(kind, seed=7, case=case) for case in range(cases)]
    assert not [what for _, what in tried if what]
    assert {"taken", "refused"} == {outcome for outcome, _ in tried}, "both, or it tries nothing"


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "cases"), [
    ("schedule or profile", 100), ("model's folder", 20), ("model's folder, by the command", 5)])
def test_spoiled_files_of_other_kinds_are_too(kind, cases, tmp_path, monkeypatch):
    pytest.importorskip("torch", reason="models need the extra `run`")
    monkeypatch.setenv("XGPT_FUZZ_TOYS", str(tmp_path))
    assert not [what for case in range(cases)
                if (what := fuzz.try_case(kind, seed=7, case=case)[1])]


def test_a_case_that_fails_is_told(monkeypatch):
    def falls(rng: random.Random, folder: Path) -> None:
        raise KeyError("ours")

    def hangs(rng: random.Random, folder: Path) -> None:
        while True:
            pass

    def asks(rng: random.Random, folder: Path) -> None:
        bytearray(3 * 2**30)

    for run, what in ((falls, "KeyError: 'ours'"), (hangs, "longer than 1 s"),
                      (asks, "MemoryError")):
        monkeypatch.setitem(fuzz.KINDS, "toy", fuzz.Kind(1, 1, run))
        assert what in fuzz.try_case("toy", 1, 0)[1]
