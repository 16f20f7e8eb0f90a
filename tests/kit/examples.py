"""On how many random cases a property is tried: on an eighth of what it names, which differ from
run to run, and on all with `pytest --hypothesis-profile thorough`."""

from __future__ import annotations

from typing import Any

import hypothesis

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
