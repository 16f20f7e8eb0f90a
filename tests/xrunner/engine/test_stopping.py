"""A run that is asked to stop says whether it is done: one that is done and called stopped would
be started again, and begin with its first query."""

import errno
import os
from dataclasses import replace

import pytest
from holding import rule_of
from plans import plan_of
from replays import answers_of, generated
from toy_runs import Collector, run_in_process, run_waa_in_process, toy_waa_rules, waa_pools
from toys import random_queries

from xrunner.backends import deepspeed_worker
from xrunner.comm.point_to_point import local_comms
from xrunner.files.lock import STOP_FILE
from xrunner.files.results import Answered
from xrunner.files.sink import RunSink
from xrunner.plan import RunPlan
from xrunner.rank import worker
from xrunner.rank.world import World

COUNT = 7
RULES = {"rra": {"encode": 2, "iterations": 3, "groups": 2}, "ft": {"groups": 2},
         "vllm": {"batch": 3, "kv_tokens": 1600}}


# family, degrees of the stages or of each pool's
@pytest.mark.parametrize(("stop_after", "is_complete"), [(1, False), (COUNT, True)])
@pytest.mark.parametrize(("policy", "family", "degrees", "own"), [
    ("rra", "llama", (1,), RULES["rra"]), ("rra", "llama", (2, 2), RULES["rra"]),
    ("rra", "t5", (1, 1, 1), RULES["rra"]), ("ft", "llama", (1,), RULES["ft"]),
    ("dsi", "llama", (1, 1, 1), RULES["ft"]), ("orca", "llama", (1, 1), {"batch": 2}),
    ("vllm", "llama", (1,), RULES["vllm"]), ("sarathi", "llama", (1, 1), {"batch": 2}),
    ("waa", "llama", ((1,), (1,)), {"max_in_system": 3}),
    ("waa", "t5", ((1, 1), (2, 1)), {"max_in_system": 3, "num_groups": 2})])
def test_a_stop_ends_every_rank_and_with_the_last_token_finds_the_run_complete(
        made, policy, family, degrees, own, stop_after, is_complete):
    (directory, model), queries, sink = made(family), random_queries(COUNT), Collector(stop_after)
    if policy == "waa":
        run_waa_in_process(directory, queries, waa_pools(directory, *degrees),
                           toy_waa_rules(len(degrees[0]), **own), sink=sink)
    else:
        run_in_process(directory, queries, degrees=degrees, rule=rule_of(policy, **own), sink=sink)
    assert sink.is_complete is is_complete
    assert stop_after <= len(sink.results) and (len(sink.results) == COUNT) is is_complete
    assert answers_of(sink).items() <= generated(model, queries).items()


@pytest.mark.parametrize("rule", ["rra", "vllm"])
def test_a_last_token_under_way_at_a_stop_still_ends_its_query(llama, rule):
    queries = [replace(query, max_new_tokens=1) for query in random_queries(COUNT)]
    sink, executors = run_in_process(llama[0], queries, num_stages=2,
                                     rule=rule_of(rule, **RULES[rule]), sink=Collector(1))
    encoded = sum(step.queries for step in executors[-1].log if step.kind == "encode")
    assert len(sink.results) == encoded < COUNT and sink.is_complete is False


def test_a_wish_to_stop_is_seen_and_not_forgotten(tmp_path, monkeypatch):
    now = 100.0
    monkeypatch.setattr("xrunner.files.sink.time.monotonic", lambda: now)
    sink = RunSink(plan_of(tmp_path, tmp_path), num_queries=1, before=Answered(0, frozenset()))
    assert not sink.should_stop()
    (tmp_path / STOP_FILE).touch()
    now += 1.0
    assert sink.should_stop()
    (tmp_path / STOP_FILE).unlink()
    now += 1.0
    assert sink.should_stop()
    sink.close(1.0, "stopped")


@pytest.mark.parametrize(("module", "work"), [(worker, "work"), (deepspeed_worker, "run")])
@pytest.mark.parametrize(("number", "is_users"), [(errno.ENOSPC, True), (errno.EDQUOT, True),
                                                  (errno.EBADF, False)])
def test_a_full_disk_ends_a_rank_in_words(tmp_path, monkeypatch, capsys, number, is_users, module,
                                          work):
    ended: list[int] = []
    alone = World(local_comms(1)[0], barrier=lambda: None, gather=lambda report: [report],
                  abort=ended.append, split=lambda group, place: pytest.fail("in no group"),
                  duplicate=lambda: local_comms(1)[0])

    def fail(plan: RunPlan, world: World, **shelf: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(module, "connect", lambda kind="cpu": alone)
    monkeypatch.setattr(module, work, fail)
    path = str(plan_of(tmp_path, tmp_path).save())
    if not is_users:
        with pytest.raises(OSError, match=os.strerror(number)):
            module.main([path])
        return
    assert module.main([path]) == 1 and ended == [1]
    said = capsys.readouterr().err
    assert os.strerror(number) in said and str(tmp_path) in said and "goes on" in said
