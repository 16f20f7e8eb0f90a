"""On how many random cases a property is tried: on an eighth of what it names, which differ from
run to run, and on all with `pytest --hypothesis-profile thorough`."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import hypothesis
import pytest

PROFILES = {"brief": 12, "thorough": 100}  # examples where a property names none


def register() -> None:
    """Before tests are collected: what a property names is read then."""
    for name, count in PROFILES.items():
        # how long an example takes says how busy the machine is
        hypothesis.settings.register_profile(name, deadline=None, max_examples=count)
    hypothesis.settings.load_profile("brief")


def examples(count: int, **more: Any) -> hypothesis.settings:
    """`count` of the thorough profile, and its share of any other. `more`: other settings."""
    share = hypothesis.settings().max_examples / PROFILES["thorough"]
    return hypothesis.settings(max_examples=max(round(count * share), 5), **more)


def some(cases: Iterable[Any], is_always: Callable[[Any], bool]) -> list[Any]:
    """The cases, as parameters; those that do not run always are slow."""
    def own(case: Any) -> Any:
        return case if isinstance(case, tuple) else (case,)

    return [pytest.param(*own(case), marks=() if is_always(case) else pytest.mark.slow)
            for case in cases]


def one_in(count: int, items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Of each test's cases the first and every `count`-th after it: always the same."""
    seen, kept = Counter[str](), []
    for item in items:
        test = item.nodeid.partition("[")[0]
        if seen[test] % count == 0:
            kept.append(item)
        seen[test] += 1
    return kept


_NUMBER = re.compile(r"\d+(?:\.\d+)?")


def nearly(text: str, other: str) -> bool:
    """Whether the texts have the same words, and numbers within 1 % of each other."""
    own, others = ([float(number) for number in _NUMBER.findall(each)] for each in (text, other))
    return _NUMBER.sub("#", text) == _NUMBER.sub("#", other) and (
        own == pytest.approx(others, rel=0.01))
