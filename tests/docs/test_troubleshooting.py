"""Every message that docs/troubleshooting.md explains is one that the code still says."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("xgpt", "xprofiler", "xsimulator", "xscheduler", "xrunner")
TEXT = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
MESSAGES = [(a or b) for a, b in re.findall(r"^### (?:`` (.+) ``|`([^`]+)`)$", TEXT, re.M)]
OF_OTHERS = {"value not properly terminated"}  # MPI's words
GAP = "\0"  # what is filled in


@cache
def said() -> tuple[str, ...]:
    """Every text of the code that may be part of a message, with gaps for what is filled in."""
    texts = []
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            texts += [text_of(node) for node in ast.walk(ast.parse(path.read_text("utf-8")))
                      if isinstance(node, (ast.Constant, ast.JoinedStr))]
    return tuple(texts)


def text_of(node: ast.expr) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else GAP


def is_said(message: str) -> bool:
    """Whether each part of a message between its gaps stands in a text of the code."""
    parts = [part.strip() for part in message.split("...")]
    return all(any(part in text for text in said()) for part in parts if len(part) > 2)


def test_there_are_messages():
    assert len(MESSAGES) > 30


@pytest.mark.parametrize("message", sorted({*MESSAGES} - OF_OTHERS))
def test_a_message_that_is_explained_is_still_said(message):
    assert is_said(message), message


def test_a_message_that_nobody_says_is_found():
    assert not is_said("the flux capacitor of ... is cold")
