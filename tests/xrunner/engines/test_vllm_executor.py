"""Every batching rule's steps as passes of a vLLM engine, here one that stands in for vLLM's.
tests/vllm has the real one."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import count, pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from counting_core import CountingCore, expected
from holding import rule_of
from replays import answers_of
from toy_runs import Collector
from toys import random_queries

from xgpt.core.prefixes import Prefixes
from xrunner.backends.vllm.executor import VllmExecutor
from xrunner.comm.point_to_point import local_comms
from xrunner.engine.head import Head
from xrunner.engine.pipeline import SINGLE_RANK, Neighbours
from xrunner.engine.pool_requests import Vocabulary
from xrunner.query import PreparedQuery
from xrunner.rules.prefixes import set_prefixes
from xrunner.rules.steps import BatchingRule, Step


def run(rule: BatchingRule, queries: Sequence[PreparedQuery],
        core: CountingCore, stages: int = 1) -> tuple[Collector, VllmExecutor]:
    numbers = count()
    settings = SimpleNamespace(load=None, stages=[1] * stages)
    executor = VllmExecutor(core, None, lambda message: settings,
                            clock=lambda: float(next(numbers)))
    sink = Collector()
    head = Head(rule=rule, executor=executor, sink=sink,
                neighbours=Neighbours(local_comms(1)[0], SINGLE_RANK),
                vocabulary=Vocabulary(eos_ids=frozenset(), decode_text=lambda ids: ""))
    for query in queries:
        assert head.submit(query)
    head.start()
    assert head.run()
    return sink, executor


RULES = {
    "rra": lambda: rule_of("rra", encode=5, iterations=4, batch=14, kv_tokens=900),
    "rra, three groups": lambda: rule_of("rra", encode=7, iterations=3, groups=3, batch=15,
                                         kv_tokens=1200),
    "rra in chunks": lambda: rule_of("rra", encode=5, iterations=4, batch=14, kv_tokens=900,
                                     chunk=6),
    "orca": lambda: rule_of("orca", groups=2, batch=9, kv_tokens=900),
    "vllm, short of memory": lambda: rule_of("vllm", batch=9, kv_tokens=160, budget=50),
    "sarathi": lambda: rule_of("sarathi", batch=9, kv_tokens=900, budget=12),
    "sarathi, short of memory": lambda: rule_of("sarathi", groups=2, batch=12, kv_tokens=224,
                                                budget=12),
    "mixed, short of memory": lambda: rule_of("mixed", batch=9, kv_tokens=160, budget=50),
    "lightllm": lambda: rule_of("lightllm", batch=9, kv_tokens=160, budget=50),
    "ft": lambda: rule_of("ft", groups=2, batch=8)}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize(("max_pass", "stages"), [(10_000, 1), (10_000, 2), (16, 1), (16, 3)])
def test_every_rule_gets_every_querys_own_tokens(name, max_pass, stages):
    queries = random_queries(40)
    core, rule, evicted = CountingCore(max_pass), RULES[name](), list[int]()
    decide = rule.decide

    def watched() -> Step | None:
        step = decide()
        evicted.extend(step.evicted if step is not None else ())
        return step

    rule.decide = watched
    sink, executor = run(rule, queries, core, stages)
    assert min(rule.num_groups, stages) <= core.most_underway <= stages
    ends = [(one.start_s, one.end_s) for one in executor.log]
    assert all(end <= start for (_, end), (start, _) in pairwise(ends)), "one stage's"
    assert bool(evicted) == ("short of memory" in name)
    assert answers_of(sink) == {q.index: expected(q) for q in queries}
    assert core.largest <= max_pass
    if max_pass > 1000:  # a step is a pass
        assert core.passes == len(executor.log)
    else:
        assert core.passes > len(executor.log) or "sarathi" in name or name == "orca"


SHARED = [tuple((step * i) % 90 + 6 for i in range(40)) for step in (3, 5, 7)]
SHARES = ("rra", "rra, three groups", "rra in chunks", "orca", "vllm, short of memory", "sarathi",
          "sarathi, short of memory")


@pytest.mark.parametrize("name", SHARES)
@pytest.mark.parametrize("max_pass", [10_000, 16])
def test_prefixes_are_encoded_once_and_every_answer_stays(name, max_pass):
    queries = [replace(query, input_ids=SHARED[query.index % 3][:32] + query.input_ids)
               for query in random_queries(40)]
    nodes = np.array([query.index % 3 for query in queries])
    core, rule = CountingCore(max_pass), RULES[name]()
    set_prefixes(rule, Prefixes(parents=np.full(3, -1), ends=np.full(3, 32), nodes=nodes,
                                block_tokens=16, is_whole=True))
    sink, _ = run(rule, queries, core)
    assert answers_of(sink) == {q.index: expected(q) for q in queries}
    assert core.shared >= 32 * (len(queries) - 3) * (1 if "short" not in name else 0.5)


def test_a_request_that_is_full_costs_nothing_more_in_a_batch_that_goes_on():
    queries = [PreparedQuery(index=0, id="a", input_ids=(7,) * 10, max_new_tokens=2),
               PreparedQuery(index=1, id="b", input_ids=(8, 9), max_new_tokens=18)]
    sink, _ = run(rule_of("ft", batch=2), queries, CountingCore(100, longest=20))
    assert [list(r.output_ids) for r in sink.results] == [expected(q) for q in queries]
