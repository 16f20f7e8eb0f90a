import pytest

pytest.importorskip("torch", reason="ranks need the extra `run`")
