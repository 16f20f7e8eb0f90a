"""Prefixes in blocks: whoever joins, shares, copies, grows, is evicted or released, no block is
lost or had twice, and every request reads its own entries."""

from typing import Any

import pytest
import torch
from examples import examples, some
from hypothesis import given
from hypothesis import strategies as st
from implementations import IMPLEMENTATIONS, SOURCES, TORCH
from prefix_blocks import SharingMachine
from toy_runs import stages_of
from toys import spec_of

from xrunner.checkpoint.reader import open_weights
from xrunner.engine.kv import KvCache, Room, kv_shape
from xrunner.models import stage_model
from xrunner.ops.contexts import encode_context, whole_inputs
from xrunner.rules.slots import Span
from xrunner.rules.steps import Start


@examples(60)
@given(st.integers(0, 2**31), st.sampled_from([1, 16, 32, 128]), st.sampled_from(IMPLEMENTATIONS))
def test_each_request_finds_its_own_entries_behind_shared_prefixes(seed, size, implementation):
    machine = SharingMachine(seed, size, implementation.device)
    with implementation.using():
        for _ in range(25):
            machine.step()
            machine.check()


def test_the_machine_shares_copies_and_fills_the_blocks():
    machines = [SharingMachine(seed, size) for seed in range(6) for size in (1, 16)]
    with TORCH.using():
        for machine in machines:
            for _ in range(40):
                machine.step()
    assert sum(machine.shared for machine in machines) > 1000
    assert sum(machine.copied for machine in machines) > 20
    assert any(machine.pool.most_taken > 0.9 * machine.pool.count for machine in machines)


PREFIX, SIZE = 35, 16


# those whose attention goes another way: windows, capped scores
@pytest.mark.parametrize(("family", "implementation", "most"), some(
    [(family, implementation, most) for family in ("llama", "gemma2", "mistral-window")
     for implementation in IMPLEMENTATIONS for most in (20, 2080)],
    lambda case: case[0] == "llama" and case[2] == (20 if case[1] in (TORCH, SOURCES) else 2080)
    or case[0] != "llama" and case[1] is IMPLEMENTATIONS[1]), ids=str)
def test_tokens_see_the_prefix_that_another_of_their_step_writes(
        made, monkeypatch, family, implementation, most):
    """Whole blocks of it; a later step's see it to its end. `most`: tokens computed at a time."""
    monkeypatch.setattr(stage_model, "PIECE_TOKENS", most)
    directory, spec = made(family)[0], spec_of(made(family)[0])
    model = stage_model.StageModel(spec, open_weights(directory, torch.float32),
                                   stages_of(directory, [1])[0], torch.float32,
                                   device=implementation.device)
    prefix = list(range(6, 6 + PREFIX))
    texts = [[*prefix, *range(50 + 9 * i, 55 + 10 * i)] for i in range(4)]
    cache = KvCache(kv_shape(spec, torch.float32, slots=20, capacity=SIZE), model.device,
                    room=Room(4, 64, 320, 1))

    def states(starts: list[Start]) -> list[torch.Tensor]:
        """Hidden states of all that these requests encode, in one step."""
        cache.seat(len(starts), [])
        spans = []
        for start in starts:
            cache.share(start.query, start)
            spans.append(Span(start.query, start.first,
                              len(texts[start.query]) - start.first, True))
        table = cache.room_for([span.first + span.tokens for span in spans],
                               [span.slot for span in spans])
        tokens = [token for span in spans for token in texts[span.slot][span.first:]]
        hidden = model.encode(torch.tensor(tokens, device=model.device), cache.layers,
                              encode_context(spans, model.device, table))
        for span in spans:
            cache.grow(span.slot, span.tokens)
        return [*hidden.split([span.tokens for span in spans])]

    def alone(text: list[int]) -> Any:
        rows = KvCache(kv_shape(spec, torch.float32, slots=1, capacity=64), model.device)
        return model.encode(torch.tensor(text, device=model.device), rows.layers,
                            encode_context(whole_inputs([len(text)]), model.device))

    with implementation.using(), torch.inference_mode():
        found = states([Start(0, 0, -1, ((7, PREFIX),)), Start(1, 32, 7)])
        found += states([Start(2, PREFIX, 7), Start(3, 16, 7)])
        for text, hidden in zip(texts, found, strict=True):
            torch.testing.assert_close(hidden, alone(text)[-len(hidden):], rtol=1e-4, atol=1e-4)
