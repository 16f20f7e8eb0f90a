"""vLLM shares prefixes as the batching rule does: tokens are those without, steps are the replay's,
and a prefix stays as long as the rule says."""

from typing import Any

import pytest
import toys

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
SHARED = [(5 * i) % 90 + 6 for i in range(64)]
WRITES = (-1, 0, -1, ((0, 64),))  # of a request's Start: index, shared, prefix, what it writes
READS = (-1, 64, 0, ())


def next_token(model: Any, tokens: list[int]) -> int:
    query = toys.PreparedQuery(index=0, id="", input_ids=tuple(tokens), max_new_tokens=1)
    return toys.generate(model, query)[0]


def test_a_prefix_stays_until_it_is_released(asked, toy):
    """Requests that fill the cache come between its users; in the pass that encodes it, it is read
    already."""
    folder, model = toy
    inputs = {name: SHARED + tail for name, tail in (("a", [7] * 6), ("b", [8] * 7), ("d", [9] * 5),
                                                     ("e", [10]))}
    inputs |= {name: [(step * i) % 90 + 6 for i in range(110)]
               for name, step in (("c", 3), ("f", 7), ("g", 11), ("h", 13))}
    answers = asked(model=str(folder), passes=[
        {"add": [["a", inputs["a"], WRITES], ["b", inputs["b"], READS]], "want": {"a": 70, "b": 7}},
        *({"end": [*gone], "add": [[name, inputs[name], (-1, 0, -1, ())] for name in names],
           "want": dict.fromkeys(names, 110)} for gone, names in (("ab", "cf"), ("cf", "gh"))),
        {"end": ["g", "h"], "add": [["d", inputs["d"], READS]], "want": {"d": 5}},
        {"end": ["d"], "release": [0], "add": [["e", inputs["e"], WRITES]], "want": {"e": 65}}])
    assert answers["tokens"] == [
        {name: next_token(model, inputs[name]) for name in names}
        for names in ("ab", "cf", "gh", "d", "e")]


def test_blocks_of_other_tokens_are_refused(asked, toy):
    answers = asked(model=str(toy[0]), passes=[
        {"add": [["a", SHARED + [7], WRITES], ["b", [5] * 70, READS]], "want": {"a": 65, "b": 6}}])
    assert "do not have the 64 tokens" in answers["error"]
