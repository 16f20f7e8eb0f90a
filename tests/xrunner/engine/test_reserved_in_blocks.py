"""RRA and WAA with their KV entries in blocks: the tokens are those of `generate`, nothing is
copied when queries end, and a device that holds what is planned holds what is run."""

from typing import Any

import pytest
from examples import some
from holding import rule_of
from implementations import TORCH
from replays import answers_of, generated
from toy_runs import run_in_process, run_waa_in_process, toy_waa_rules, waa_pools
from toys import random_queries

from xgpt.core.errors import XgptError
from xrunner.engine import group
from xrunner.engine import kv as blocks
from xrunner.engine.kv import KvCache
from xrunner.engine.stage import StageExecutor
from xrunner.rules.rra import PhaseControls, RraRule

SIZE = 16
QUERIES = random_queries(12)
LONGEST = max(query.reserve_tokens for query in QUERIES)


pytestmark = pytest.mark.usefixtures("small_blocks")


def rra(*, groups: int = 1, chunk: int = 0, kv_tokens: int = 200) -> RraRule:
    return RraRule(encode_batch=4, decode_iterations=5, num_groups=groups, max_active=12,
                   kv_tokens=kv_tokens * groups, encode_chunk=chunk)


def expected(model: Any) -> dict[int, list[int]]:
    return generated(model, QUERIES)


def caches(executor: StageExecutor) -> list[KvCache]:
    found = [own.cache for own in executor.groups]
    assert all(cache.room_for([]) is not None for cache in found), "a table names blocks"
    return found


@pytest.mark.parametrize(("degrees", "groups", "chunk"), some(
    [((1,), 1, 0), ((1, 1), 2, 0), ((2, 1), 3, 0), ((1, 1), 2, 7)],
    lambda case: case[1] == 3 or case[2]))
def test_rra_answers_as_generate_does(made, degrees, groups, chunk):
    directory, model = made("llama")
    sink, executors = run_in_process(directory, QUERIES, degrees=degrees, in_blocks=True,
                                     rule=rra(groups=groups, chunk=chunk))
    assert answers_of(sink) == expected(model)
    for executor in executors:
        assert executor.rows_compacted == 0
        # no group had more than its rule reserves
        assert all(0 < cache.pool.most_taken * SIZE <= 200 + 12 * (SIZE - 1)
                   for cache in caches(executor))


@pytest.mark.parametrize(("encode", "decode", "groups"), some(
    [((1,), (1,), 1), ((2,), (1, 1), 2), ((1,), (2,), 3)], lambda case: case[2] == 2))
def test_what_waa_hands_over_is_put_into_blocks(made, encode, decode, groups):
    directory, model = made("llama")
    rules = toy_waa_rules(len(encode), num_groups=groups, kv_tokens=150)
    sink, executors = run_waa_in_process(directory, QUERIES, waa_pools(directory, encode, decode),
                                         rules, in_blocks=True)
    assert answers_of(sink) == expected(model)
    for rank in range(sum(encode), sum(encode) + sum(decode)):
        own = caches(executors[rank])
        assert len({id(cache.pool) for cache in own}) == 1, "one budget, one pool for all groups"
        assert own[0].pool.count <= -(-(150 + 8 * SIZE) // SIZE)
        assert own[0].pool.most_taken > 0
        assert sum(cache.num_bytes for cache in own) <= own[0].store.nbytes


@pytest.mark.parametrize("rule", [rra, lambda: rule_of("vllm", batch=5, kv_tokens=6 * SIZE)])
def test_the_memory_is_what_is_reserved_not_rows_of_the_longest(made, monkeypatch, rule):
    """A device that holds the blocks of a plan, and not as many rows of the longest query; what is
    missing is said before any memory is taken."""
    directory, _ = made("llama")

    def run(own: Any, *, in_blocks: bool = True) -> Any:
        sink, (executor,) = run_in_process(directory, QUERIES, num_stages=1, rule=own,
                                           in_blocks=in_blocks)
        return answers_of(sink), executor

    answers, executor = run(rule())
    (cache,), rows = caches(executor), rule().group_max_active
    assert cache.pool.count * SIZE < rows * LONGEST
    monkeypatch.setattr(group, "free_bytes", lambda device: cache.num_bytes)
    assert run(rule())[0] == answers
    with pytest.raises(XgptError, match=f"12 queries of up to {LONGEST} tokens .* are missing"):
        run(rra(), in_blocks=False)
    monkeypatch.setattr(group, "free_bytes", lambda device: cache.num_bytes - 1)
    with pytest.raises(XgptError, match=f"{cache.pool.count} blocks of 16 tokens.* are missing"):
        run(rule())


def test_a_change_finds_the_blocks_that_room_was_made_for(made):
    directory, model = made("llama")
    rule = rra(kv_tokens=LONGEST)
    rule.make_room(12, 12 * LONGEST)
    assert rule.kv_reserve.tokens == 12 * LONGEST
    rule.change(PhaseControls(encode_batch=6, decode_iterations=3, group_max_active=12,
                              group_kv_tokens=12 * LONGEST), phase=2)
    sink, (executor,) = run_in_process(directory, QUERIES, num_stages=1, rule=rule, in_blocks=True)
    assert answers_of(sink) == expected(model)
    (cache,) = caches(executor)
    assert cache.pool.most_taken * SIZE > LONGEST + SIZE, "more than the first phases could have"


def test_blocks_of_a_query_that_is_done_are_there_for_other_groups_at_once(made, monkeypatch):
    """Blocks of one token, so that no last block has room that nobody counts, and no more of them
    than the encode pool keeps under way: a group whose step is still to come would hold the blocks
    of its last query while another group needs them."""
    monkeypatch.setitem(blocks.BLOCK_TOKENS, "cpu", 1)
    directory, model = made("llama")
    rules = toy_waa_rules(1, encode_batch=1, num_groups=4, max_in_system=8, kv_tokens=LONGEST + 5)
    with TORCH.using():  # the native kernels take blocks of 16 or more
        sink, executors = run_waa_in_process(
            directory, QUERIES, waa_pools(directory, (1,), (1,)), rules, in_blocks=True)
    assert answers_of(sink) == expected(model)
    (pool,) = {cache.pool for cache in caches(executors[1])}
    assert pool.count == LONGEST + 5
