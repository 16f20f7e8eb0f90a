"""The pages that promise something name tests that are there, and one for each promise."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("reliability", "security")
_TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def text_of(page: str) -> str:
    return (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES)
def test_every_test_that_is_named_is_there(page):
    named = _TEST.findall(text_of(page))
    assert len(named) > 15
    for file, test in named:
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, (
            f"{file} has no {test}")


def test_each_sentence_of_the_promise_has_its_tests():
    promise, _, rest = text_of("reliability").partition("## Which test holds what")
    sentences = re.findall(r"^(\d+)\. ", promise, re.M)
    held = re.findall(r"^\| (\d+) \| `tests/", rest, re.M)
    assert sentences == [str(number) for number in range(1, 11)] == [*held, "10"]


def test_each_input_that_is_not_trusted_has_its_tests():
    inputs, _, rest = text_of("security").partition("## Which test holds what")
    table = inputs.partition("## Not trusted")[2].partition("\n## ")[0]
    names = re.findall(r"^\| ([^|]+) \| (?!what is done)", table, re.M)
    held = re.findall(r"^\| ([^|]+) \| `tests/", rest, re.M)
    assert len(names) > 5 and set(names) <= set(held)
