"""The account of a run's time: a moment belongs to one category, that of the outermost operator."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import account
import pytest
import torch
from account import (
    ATTENTION,
    BETWEEN,
    ELEMENT_WISE,
    HEAD,
    PRODUCTS,
    PYTHON,
    Account,
    TorchCalls,
)


class Clock:
    """Time that goes on when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def spend(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(account, "_CLOCK", clock)
    return clock


def test_an_operator_within_another_counts_as_the_outer(clock: Clock) -> None:
    kept = Account()
    product = kept.within(PRODUCTS, lambda: clock.spend(2.0))

    def head() -> None:
        clock.spend(1.0)
        product()

    def step(_executor: object, _message: object, _inputs: object) -> None:
        clock.spend(0.25)
        product()
        kept.within(HEAD, head)()

    clock.spend(0.5)
    kept.step(step)(None, SimpleNamespace(kind=SimpleNamespace(value="decode")), None)
    kept.switch(PYTHON)
    assert dict(kept.seconds) == {(BETWEEN, PYTHON): 0.5, ("decode", PYTHON): 0.25,
                                  ("decode", PRODUCTS): 2.0, ("decode", HEAD): 3.0}


def test_an_operator_that_fails_gives_its_time_back_to_python(clock: Clock) -> None:
    kept = Account()

    def fail() -> None:
        clock.spend(1.0)
        raise ValueError

    with pytest.raises(ValueError):
        kept.within(ATTENTION, fail)()
    clock.spend(3.0)
    kept.switch(PYTHON)
    assert dict(kept.seconds) == {(BETWEEN, ATTENTION): 1.0, (BETWEEN, PYTHON): 3.0}


def test_torch_s_functions_are_told_apart_by_name(tmp_path: Path) -> None:
    kept = Account()
    rows, weight = torch.ones(64, 64), torch.ones(64, 64)

    def work() -> None:
        for _ in range(20):
            torch.nn.functional.linear(rows, weight)
            torch.nn.functional.silu(rows)
        query = rows.view(1, 1, 64, 64)
        torch.nn.functional.scaled_dot_product_attention(query, query, query)

    kept.run(work, tmp_path / "account-0.json")()
    written = {(kind, category): seconds for kind, category, seconds in json.loads(
        (tmp_path / "account-0.json").read_text())}
    assert {category for _, category in written} == {PRODUCTS, ATTENTION, ELEMENT_WISE, PYTHON}
    assert written == dict(kept.seconds) and min(written.values()) > 0


def test_torch_s_functions_inside_an_operator_are_the_operator_s(clock: Clock) -> None:
    kept = Account()

    def attend() -> None:
        torch.nn.functional.softmax(torch.ones(2), dim=0)
        clock.spend(1.0)

    with TorchCalls(kept):
        kept.within(ATTENTION, attend)()
    kept.switch(PYTHON)
    assert {key: s for key, s in kept.seconds.items() if s} == {(BETWEEN, ATTENTION): 1.0}
