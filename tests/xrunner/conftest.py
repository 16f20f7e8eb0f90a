from functools import cache

import pytest

pytest.importorskip("torch", reason="the runner's tests need the extra `run`")

import toys  # noqa: E402

from xrunner.engine import kv  # noqa: E402
from xrunner.query import PreparedQuery  # noqa: E402


@pytest.fixture(scope="session")
def answered(made):
    """17 queries and what transformers answers to each, by family."""

    @cache
    def answer(family: str) -> tuple[list[PreparedQuery], dict[int, list[int]]]:
        queries = toys.random_queries(17)
        return queries, {q.index: toys.generate(made(family)[1], q) for q in queries}

    return answer


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of a GPU's 16 tokens: a toy's query has several of these, of a CPU's it has one."""
    monkeypatch.setitem(kv.BLOCK_TOKENS, "cpu", 16)
