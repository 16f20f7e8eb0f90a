"""Static batches of a Hugging Face model, as DeepSpeed's ranks work them, here without DeepSpeed:
the same answers as transformers' `generate` and as the runner's own engine, by the replay's
steps."""

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from examples import some
from replays import answers_of, estimated, generated, problem_for, replayed, steps_of, whole_steps
from toy_runs import Collector, run_in_process
from toys import EOS, random_queries, spec_of

from xrunner.backends.deepspeed_worker import PaddedModel, padded_left
from xrunner.comm.point_to_point import local_comms
from xrunner.engine.head import Head
from xrunner.engine.pipeline import Neighbours, Route, await_start, serve_stage
from xrunner.engine.roster import Vocabulary
from xrunner.query import PreparedQuery, Sampling
from xrunner.rules.static import StaticRule, static_rule


def rule_of(batch: int, groups: int = 1, encodes: int | None = None) -> StaticRule:
    return StaticRule(encode_batch=batch, num_groups=groups, kv_tokens=10_000,
                      encode_micro_batches=encodes or groups)


def text_of(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids))


def run(made: tuple[Path, Any], queries: Sequence[PreparedQuery], rule: StaticRule,
        sink: Collector | None = None, ranks: int = 1) -> tuple[Collector, list[PaddedModel]]:
    """Every rank holds the whole model: what the others compute is only looked at for its steps."""
    directory, model = made
    comms, sink = local_comms(ranks), sink or Collector()
    executors = [PaddedModel(model, max_positions=spec_of(directory).max_positions,
                             gives_answers=rank == 0) for rank in range(ranks)]

    def follow(rank: int) -> None:
        neighbours = Neighbours(comms[rank], Route(rank=rank, pool="all", stage=0, steps_from=0))
        await_start(neighbours, executors[rank])
        serve_stage(neighbours, executors[rank])

    threads = [threading.Thread(target=follow, args=(rank,), daemon=True)
               for rank in range(1, ranks)]
    for thread in threads:
        thread.start()
    route = Route(rank=0, pool="all", stage=0, steps_from=None, peers=tuple(range(1, ranks)))
    head = Head(rule=rule, executor=executors[0], neighbours=Neighbours(comms[0], route), sink=sink,
                vocabulary=Vocabulary(eos_ids=frozenset([EOS]), decode_text=text_of))
    for query in queries:
        assert head.submit(query)
    head.start()
    is_complete = head.run()
    assert is_complete or sink.should_stop()
    for thread in threads:
        thread.join(timeout=30)
        assert not thread.is_alive()
    return sink, executors


FAMILIES = ("opt", "llama", "qwen2", "gpt2")
SIZES = ((4, 1, 1), (9, 1, 3), (7, 2, 4), (17, 3, 3))  # batch, groups, parts encoded


# each family with one of the sizes
@pytest.mark.parametrize(("family", "batch", "groups", "encodes"), some(
    [(family, *sizes) for family in FAMILIES for sizes in SIZES],
    lambda case: FAMILIES.index(case[0]) == SIZES.index(case[1:])))
def test_padded_batches_answer_as_generate_does(made, answered, family, batch, groups, encodes):
    queries, expected = answered(family)
    sink, _ = run(made(family), queries, rule_of(batch, groups, encodes))
    assert answers_of(sink) == expected
    assert [r.query.index for r in sink.results] == list(range(len(queries)))


def test_a_result_is_there_when_its_batch_is(made):
    queries = random_queries(9)
    sink, _ = run(made("opt"), queries, rule_of(4))
    ends = [r.last_token_s for r in sink.results]
    batches = [ends[:4], ends[4:8], ends[8:]]
    assert all(max(batch) - min(batch) < 1e-6 for batch in batches)
    assert batches[0][0] < batches[1][0] < batches[2][0]


@pytest.mark.parametrize(("name", "batch", "groups", "parts"), [
    ("ft", 4, 1, None), ("ft", 7, 3, None), ("dsi", 8, 1, 3), ("dsi", 8, 2, 2)])
def test_the_steps_are_those_of_the_replay(made, answered, name, batch, groups, parts):
    queries, expected = answered("opt")
    outputs = [len(expected[q.index]) for q in queries]
    problem = problem_for(made("opt")[0], queries, outputs, devices=2)
    estimate = estimated(name, problem, encode_batch=batch, decode_micro_batches=groups,
                         tp_degree=2, tp_gpus=2,
                         encode_micro_batches=None if parts is None else parts * groups)
    _, executors = run(made("opt"), queries, static_rule(estimate), ranks=2)
    pool = replayed(problem, estimate, queries, outputs).pools[0]
    for executor in executors:
        assert [step[:5] for step in steps_of(executor.log)] == [
            step[:5] for step in whole_steps(pool)]


@pytest.mark.parametrize("family", ["opt", "gpt2"])
def test_a_row_that_is_done_may_outlive_the_models_positions(made, family):
    """Of 128: the first row ends at 102, and goes on beside the second up to 220."""
    queries = [PreparedQuery(index=0, id="a", input_ids=tuple([7, 9] * 50), max_new_tokens=2),
               PreparedQuery(index=1, id="b", input_ids=(8, 9), max_new_tokens=120,
                             is_forced=True)]
    sink, _ = run(made(family), queries, rule_of(2))
    assert answers_of(sink) == generated(made(family)[1], queries)


def test_limits_stop_strings_and_seeds_end_and_draw_as_in_the_own_engine(made):
    queries = []
    for q in random_queries(12, seed=5):
        drawn = Sampling(temperature=0.8, top_k=20, top_p=0.9, seed=q.index)
        queries.append(replace(
            q, sampling=drawn if q.index % 2 else Sampling(), is_forced=q.index % 3 == 0,
            stop=("4",) if q.index % 4 == 1 else (), max_new_tokens=25))
    sink, _ = run(made("opt"), queries, rule_of(5))
    own, _ = run_in_process(made("opt")[0], queries, num_stages=2, num_groups=2)
    found, wanted = ({r.query.index: (r.output_ids, r.finish_reason, r.text) for r in s.results}
                     for s in (sink, own))
    assert found == wanted
    assert len({reason for _, reason, _ in found.values()}) == 2
    assert any("4" not in text and reason == "stop" for _, reason, text in found.values())


def test_a_stop_keeps_whole_batches_only(made):
    sink, _ = run(made("opt"), random_queries(17), rule_of(4), Collector(stop_after=5), ranks=2)
    assert [r.query.index for r in sink.results] == list(range(8))


def test_padding_comes_before_the_tokens():
    import torch

    ids, mask = padded_left(torch.tensor([7, 8, 9, 6]), [3, 1])
    assert ids.tolist() == [[7, 8, 9], [0, 0, 6]] and mask.tolist() == [[1, 1, 1], [0, 0, 1]]
