"""The table of what each promise's test sees names places and tests that are there."""

import ast
from pathlib import Path

import pytest
from broken_places import PLACES

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.name)
def test_a_place_is_there_once_and_so_is_its_test(place):
    assert (ROOT / place.file).read_text(encoding="utf-8").count(place.sound) == 1
    assert place.broken != place.sound
    path, _, name = place.test.partition("::")
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    tests = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert not name or name.partition("[")[0] in tests


def test_names_tell_places_apart():
    assert len({place.name for place in PLACES}) == len(PLACES)
