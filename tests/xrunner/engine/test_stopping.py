"""A run that is asked to stop says whether it is done: one that is done and called stopped would
be started again, and begin with its first query."""

import errno
import os
from dataclasses import replace

import pytest
from holding import rule_of
from plans import plan_of
from toy_runs import Collector, run_in_process, run_waa_in_process, toy_waa_rules
from toy_runs import waa_pools as two_pools
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


@pytest.mark.parametrize(("stop_after", "is_complete"), [(1, False), (COUNT, True)])
@pytest.mark.parametrize("rule", RULES)
def test_a_stop_that_comes_with_the_last_token_finds_the_run_complete(
        llama, rule, stop_after, is_complete):
    sink, _ = run_in_process(llama[0], random_queries(COUNT), num_stages=1,
                             rule=rule_of(rule, **RULES[rule]), sink=Collector(stop_after))
    assert sink.is_complete is is_complete
    assert (len(sink.results) == COUNT) is is_complete


@pytest.mark.parametrize(("stop_after", "is_complete"), [(1, False), (COUNT, True)])
def test_so_it_is_with_two_pools(llama, stop_after, is_complete):
    rules = toy_waa_rules(1, max_in_system=3)
    sink, _ = run_waa_in_process(llama[0], random_queries(COUNT),
                                 two_pools(llama[0], [1], [1]), rules,
                                 sink=Collector(stop_after))
    assert sink.is_complete is is_complete
    assert (len(sink.results) == COUNT) is is_complete


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
