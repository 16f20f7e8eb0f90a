"""vLLM shares prefixes as the batching rule does: tokens are those without, steps are the replay's,
and a prefix stays as long as the rule says."""

from typing import Any

import pytest
import toys
from vllm_answers import added

from xgpt.core.errors import XgptError
from xrunner.backends.vllm.protocol import SharedStart, Step

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
SHARED = [(5 * i) % 90 + 6 for i in range(64)]
WRITES, READS, NEITHER = SharedStart(0, -1, ((0, 64),)), SharedStart(64, 0), SharedStart(0, -1)


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
    answers = asked.shared(folder, [
        Step([("a", 70), ("b", 7)], [added("a", inputs["a"], WRITES),
                                     added("b", inputs["b"], READS)]),
        *(Step([(name, 110) for name in names], [added(name, inputs[name], NEITHER)
                                                 for name in names], ended=[*gone])
          for gone, names in (("ab", "cf"), ("cf", "gh"))),
        Step([("d", 5)], [added("d", inputs["d"], READS)], ended=["g", "h"]),
        Step([("e", 65)], [added("e", inputs["e"], WRITES)], ended=["d"], released=[0])])
    assert answers == [
        {name: next_token(model, inputs[name]) for name in names}
        for names in ("ab", "cf", "gh", "d", "e")]


def test_blocks_of_other_tokens_are_refused(asked, toy):
    with pytest.raises(XgptError, match="do not have the 64 tokens"):
        asked.shared(toy[0], [Step([("a", 65), ("b", 6)], [
            added("a", SHARED + [7], WRITES), added("b", [5] * 70, READS)])])
