"""docs/models.md names the kinds of model that are read, each with the test that covers it."""

import re
from pathlib import Path

import pytest
import toys

from xgpt.core.hf.config import MODEL_TYPES, PLANNED_TYPES

pytest.importorskip("transformers")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"


def test_the_table_has_every_kind_of_model_that_is_read():
    rows = re.findall(r"^\| `(\w+)` \|", PAGE.read_text(encoding="utf-8"), re.M)[1:]
    assert rows == [*MODEL_TYPES, *PLANNED_TYPES]


def test_every_kind_of_model_has_a_toy_whose_tokens_are_compared():
    import transformers

    made = {family.partition("-")[0] for family in (*toys.FAMILIES, *toys.ENCODER_DECODER_FAMILIES)}
    made |= {getattr(transformers, f"{prefix}Config").model_type
             for prefix, _ in toys.MODERN_FAMILIES.values()}
    assert set(MODEL_TYPES) <= made
