"""What a person reads fits into a terminal of 80 columns."""

from __future__ import annotations

import json

from click.testing import CliRunner, Result

from xgpt.cli.main import cli


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(a) for a in arguments], catch_exceptions=False)


def check_width(text: str) -> None:
    assert text and max(map(len, text.splitlines())) <= 80, text


def test_the_catalog_fits_and_nothing_of_it_is_cut_off() -> None:
    shown = invoke("models").stdout
    check_width(shown)
    assert "..." not in shown
    known = json.loads(invoke("models", "--json").stdout)
    words = shown.replace(",", " ").split()
    assert not [name for rows in known.values() for name in rows if name not in words]
