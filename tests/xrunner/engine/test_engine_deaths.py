"""Replicas whose engines die: each request is answered once, and nobody waits for ever."""

import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from replicated import Job, Told
from toys import VOCAB

from xgpt.core.controls import FIXED, LEAST_TOKENS, FixedSchedule
from xgpt.core.errors import XgptError
from xrunner.backends.vllm.executor import VllmExecutor
from xrunner.backends.vllm.protocol import Step, Token
from xrunner.comm.messages import PortionMessage, ReplicaMessage
from xrunner.comm.point_to_point import local_comms
from xrunner.engine.head import Head, PoolLink, Supply, run_to_end
from xrunner.engine.pipeline import SINGLE_RANK, DiedAlone, ExecutorDied, Neighbours
from xrunner.engine.pool_requests import Extent, Vocabulary
from xrunner.engine.replicas import FromRankZero, ToReplicas
from xrunner.files.deaths import Deaths
from xrunner.files.heartbeat import Heartbeat, read_heartbeats
from xrunner.rank.world import replicas_of
from xrunner.rules.routing import Load, Router, Window, window_of
from xrunner.rules.steps import rules_for


def next_token(tokens: Sequence[int]) -> int:
    return (7 * sum(tokens) + len(tokens)) % VOCAB


class Engine:
    """Stands in for an engine's process: dies where `fate` says so, and is ready after some
    looks."""

    def __init__(self, fate: Callable[[str], bool], looks: int = 2) -> None:
        self._fate, self._looks, self._left = fate, looks, 0
        self._requests: dict[str, tuple[list[int], int]] = {}
        self.is_there = False

    def load(self, load: Any) -> None:
        self._requests, self._left, self.is_there = {}, self._looks, True

    def await_ready(self, wait_s: float = 10.0) -> bool:
        if self.is_there and self._left and not wait_s:
            self._left -= 1
            self._meet("load")
            return False
        self._left = 0
        return self.is_there

    def _meet(self, what: str) -> None:
        if self._fate(what):
            self.is_there = False
            raise ExecutorDied(f"killed in {what}")

    def send(self, step: Step) -> None:
        self._meet("step")
        self._step = step

    def finish(self) -> dict[str, Token]:
        step = self._step
        self._meet("answer")
        for name in step.ended:
            del self._requests[name]
        for new in step.added:
            self._requests[new.name] = list(new.tokens), 0
        given = {}
        for name, count in step.wanted:
            tokens, computed = self._requests[name]
            if computed + count == len(tokens):
                tokens.append(next_token(tokens))
                given[name] = Token(tokens[-1])
            self._requests[name] = tokens, computed + count
        return given


class Ranks:
    """Ranks on threads, each with a replica of a stand-in engine."""

    def __init__(self, job: Job, folder: Path, *, restarts: int, replicas: int = 3) -> None:
        self.job, self.comms = job, local_comms(replicas)
        plan = SimpleNamespace(output=folder, fingerprint="one", restarts=restarts)
        self.deaths = Deaths(plan)  # type: ignore[arg-type]
        self.replicas = replicas_of(job.one.in_copies(replicas), rank_each=True)

    def supply(self, sink: Any, order: Sequence[int], routing: str = LEAST_TOKENS) -> ToReplicas:
        router = Router([1.0] * len(order), routing=routing,
                        windows=[window_of(one.estimate) for one in self.replicas])
        return ToReplicas(self.comms[0], sink, router, self.job.queries, order, self.replicas,
                          self.deaths)

    def head(self, number: int, supply: Supply, engine: Engine,
             heartbeat: Heartbeat | None = None) -> Head:
        executor = VllmExecutor(engine, None, lambda message: SimpleNamespace(  # type: ignore
            load=None, stages=[1]), heartbeat=heartbeat)
        estimate = self.replicas[number].estimate
        head = Head(rule=rules_for(estimate)[0], executor=executor, sink=supply,  # type: ignore
                    neighbours=Neighbours(self.comms[number], SINGLE_RANK), link=PoolLink(supply),
                    vocabulary=Vocabulary(eos_ids=frozenset(), decode_text=str))
        head.make_rule = lambda: rules_for(estimate)[0]
        head.requests.extent = Extent(queries=30, longest_input=20, longest_output=30, longest=50)
        return head

    def follow(self, number: int, engine: Engine) -> None:
        head = self.head(number, FromRankZero(
            self.comms[number], number, lambda index: self.job.queries[index]), engine)
        head.start()
        run_to_end(head)


def expected(job: Job, index: int) -> list[int]:
    tokens = list(job.queries[index].input_ids)
    for _ in range(job.queries[index].max_new_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(job.queries[index].input_ids):]


POLICIES = [("rra", FixedSchedule(encode_batch=2, decode_iterations=4)),
            ("sarathi", FixedSchedule(max_active=3, token_budget=12)),
            ("ft", FixedSchedule(encode_batch=3, decode_micro_batches=2))]


@pytest.mark.parametrize("routing", [LEAST_TOKENS, FIXED])
@pytest.mark.parametrize("policy, config", POLICIES)
@pytest.mark.parametrize("seed", range(3))
def test_whatever_dies_every_request_is_answered_once(made, tmp_path, policy, config, seed,
                                                      routing):
    job, chance = Job(made, policy, config, count=40), random.Random(seed)
    ranks = Ranks(job, tmp_path, restarts=4)
    lock, left = threading.Lock(), [7]

    def fate(what: str) -> bool:
        with lock:  # some are used up: one or two replicas stay away
            dies = left[0] > 0 and chance.random() < 0.08
            left[0] -= dies
            return dies

    threads = [threading.Thread(target=ranks.follow, args=(number, Engine(fate)), daemon=True)
               for number in (1, 2)]
    sink = Told()
    supply = ranks.supply(sink, range(40), routing)
    head = ranks.head(0, supply, Engine(fate))
    for thread in threads:
        thread.start()
    outcome: list[Any] = []

    def lead() -> None:
        supply.start(head)
        head.start()
        try:
            outcome.append(run_to_end(head))
        except XgptError as error:
            outcome.append(str(error))

    threads.append(threading.Thread(target=lead, daemon=True))
    threads[-1].start()
    threads[-1].join(timeout=60)
    assert outcome, "it waits for ever"
    done = [one.query.index for one in sink.results]
    assert len(done) == len(set(done))
    assert all(list(one.output_ids) == expected(job, one.query.index) for one in sink.results)
    if not isinstance(outcome[0], str):
        for thread in threads:
            thread.join(timeout=60)
            assert not thread.is_alive()
        assert {*done} | ranks.deaths.suspects == {*range(40)}
        assert outcome[0] is ({*done} == {*range(40)})
    else:
        assert "no replica is left" in outcome[0]


def told(ranks: Ranks, rank: int) -> list[PortionMessage]:
    """Messages that rank 0 has sent to a rank."""
    messages = list[PortionMessage]()
    while (got := ranks.comms[rank].poll(0)) is not None:
        assert isinstance(got[0], PortionMessage)
        messages.append(got[0])
    return messages


def led(made, folder: Path, *, restarts: int, heartbeat: Heartbeat | None = None,
        ) -> tuple[Ranks, ToReplicas, Head]:
    """Rank 0's end of two replicas, which have their first requests."""
    ranks = Ranks(Job(made, *POLICIES[1], count=30), folder, restarts=restarts, replicas=2)
    supply = ranks.supply(Told(), range(30))
    head = ranks.head(0, supply, Engine(lambda what: False), heartbeat)
    supply.start(head)
    head.start()
    return ranks, supply, head


def test_a_replica_whose_restarts_are_used_up_gets_no_more_although_it_is_ready(made, tmp_path):
    ranks, supply, head = led(made, tmp_path, restarts=0)
    given = [index for one in told(ranks, 1) for index in one.queries]
    # its last request was on its way when it died
    ranks.comms[1].send(0, ReplicaMessage(replica=1, begun=0, output_tokens=0, died="killed",
                                          is_ready=False, lost=((), tuple(given[:-1]))))
    supply.look(head)
    assert [one.is_last for one in told(ranks, 1)] == [True]
    ranks.comms[1].send(0, ReplicaMessage(replica=1, begun=1, output_tokens=0))
    supply.look(head)
    assert not told(ranks, 1)


def test_what_comes_back_for_a_replica_that_is_away_goes_to_another():
    router = Router([1.0] * 20, windows=[Window(waiting=12, batch=4)] * 2)
    for replica in (0, 1):
        router.top_up(replica, Load(0, 0))
        router.note_begun(replica, 1)
    recall, = router.recalls([Load(0, 0), Load(9, 1)])
    assert recall.replica == 1
    router.give_back(0, [3, 4], [1])
    router.take_back(1, [18, 19])
    assert router.num_left(0) == 0 and router.top_up(1, Load(0, 1)) == [3, 4, 18, 19]


def test_a_death_of_the_request_that_runs_alone_is_left_to_the_launcher(made, tmp_path):
    ranks, supply, head = led(made, tmp_path, restarts=3)
    given = [index for one in told(ranks, 1) for index in one.queries]
    ranks.deaths.counts[given[0]] = 2  # others in the order have expired
    ranks.comms[1].send(0, ReplicaMessage(replica=1, begun=0, output_tokens=0, died="killed",
                                          is_ready=False, lost=((given[0],), tuple(given[1:]))))
    with pytest.raises(DiedAlone, match="killed"):
        supply.look(head)


def test_an_engine_that_dies_in_a_step_is_in_none_afterwards(made, tmp_path):
    heartbeat = Heartbeat(tmp_path, rank=0, stage=0, pool="all")
    ranks, supply, head = led(made, tmp_path, restarts=3, heartbeat=heartbeat)
    engine = head.executor.child  # type: ignore[attr-defined]
    engine._fate = lambda what: what == "step"
    with pytest.raises(ExecutorDied):
        head.run()
    heartbeat._write()
    assert read_heartbeats(tmp_path)[0].step_since_s is not None
    supply.died(head, ExecutorDied("killed"))
    heartbeat._write()
    assert read_heartbeats(tmp_path)[0].step_since_s is None
