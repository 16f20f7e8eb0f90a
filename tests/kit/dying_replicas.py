"""Jobs by replicas on threads whose engines stand in for vLLM's, die, and start again."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from counting_core import CountingCore, expected
from holding import rule_of
from replicated import Told
from toys import random_queries

from xgpt.core.controls import FIXED, LEAST_TOKENS, EvenBatches
from xgpt.core.errors import XgptError
from xgpt.core.prefixes import Prefixes
from xrunner.backends.vllm.executor import VllmExecutor
from xrunner.backends.vllm.protocol import Load, Step, Token
from xrunner.comm.messages import PortionMessage, StopMessage
from xrunner.comm.point_to_point import local_comms
from xrunner.engine.head import Head, PoolLink, run_to_end
from xrunner.engine.pipeline import SINGLE_RANK, ExecutorDied, Neighbours
from xrunner.engine.pool_requests import Extent, Vocabulary
from xrunner.engine.replicas import FromRankZero, ToReplicas
from xrunner.files.deaths import SUSPECT, Deaths
from xrunner.files.launcher_link import LauncherLink
from xrunner.query import EXPIRED, PreparedQuery
from xrunner.rules.prefixes import set_prefixes
from xrunner.rules.routing import Router, Window, rra_window
from xrunner.rules.steps import BatchingRule

RULES = {
    "rra": lambda: rule_of("rra", encode=5, iterations=4, batch=14, kv_tokens=900),
    "rra in groups": lambda: rule_of("rra", encode=7, iterations=3, groups=3, batch=15,
                                     kv_tokens=1200),
    "rra in chunks": lambda: rule_of("rra", encode=5, iterations=4, batch=14, kv_tokens=900,
                                     chunk=6),
    "vllm": lambda: rule_of("vllm", batch=9, kv_tokens=160, budget=50),  # it evicts
    "sarathi": lambda: rule_of("sarathi", batch=9, kv_tokens=900, budget=12),
    "orca": lambda: rule_of("orca", groups=2, batch=9, kv_tokens=900),
    "ft": lambda: rule_of("ft", groups=2, batch=8)}
BLOCK, SHARED = 16, [tuple((step * i) % 90 + 6 for i in range(40)) for step in (3, 5, 7)]
REFUSED = '{"refused": true}'
LIMIT_S = 250.0  # chosen: a case takes a tenth of a second, and a loaded machine its time


class MortalCore(CountingCore):
    """One that dies by chance, in a step, while it loads, or when it is asked. It is loaded after a
    few looks. `deaths`: its own so far."""

    def __init__(self, chance: random.Random, per_step: float, limit: int) -> None:
        super().__init__(10_000)
        self._lag_s = chance.choice([0.0, 0.0, 0.002])  # of each step
        self._chance, self._per_step, self._limit = chance, per_step, limit
        self.deaths = 0
        self.is_there, self._looks = False, 0
        self.start_s = 0.0

    def load(self, load: Load) -> None:
        super().__init__(10_000)
        self.is_there, self._looks = True, self._chance.randrange(6)

    def await_ready(self, wait_s: float = 0.0) -> bool:
        if not self.is_there:
            return False
        if self.deaths:  # the first start succeeds, or the run ends
            self._may_die(self._per_step / 4)
        self._looks -= 1
        return self._looks < 0 or wait_s > 0 or not self.deaths

    def send(self, step: Step) -> None:
        assert self.is_there, "a step of one that is gone"
        time.sleep(self._lag_s)
        self._may_die(self._per_step)
        super().send(step)

    def finish(self) -> dict[str, Token]:
        self._may_die(self._per_step)
        return super().finish()

    def ask(self, question: Any) -> str | None:
        if self.is_there:
            self._may_die(self._per_step)
        return "as it was told" if question.sampling.passed == REFUSED else None

    def _may_die(self, chance: float) -> None:
        if self._limit > self.deaths and self._chance.random() < chance:
            self.is_there = False
            self.deaths += 1
            raise ExecutorDied("killed by the test")


@dataclass(kw_only=True)
class MortalJob:
    """A job whose variables follow from a seed, in a folder that is its own."""

    folder: Path
    seed: int

    def __post_init__(self) -> None:
        chance = self.chance = random.Random(self.seed)
        self.policy = chance.choice([*RULES])
        self.replicas, count = chance.choice([2, 2, 3, 4]), chance.choice([2, 9, 26, 60])
        self.per_step = chance.choice([0.0, 0.01, 0.03, 0.1])
        self.restarts = chance.choice([0, 1, 3, 20, 10_000])
        self.most_deaths = chance.choice([1, 2, 10_000])  # of each
        self.is_fixed = chance.random() < 0.2
        self.stop_after = chance.choice([None] * 5 + [count // 2])
        self.has_prefixes = self.policy != "ft" and chance.random() < 0.4
        self.is_linked = chance.random() < 0.3
        self.queries = [self._query(one) for one in random_queries(count, seed=self.seed)]

    def _query(self, query: PreparedQuery) -> PreparedQuery:
        kind = self.chance.random()
        if self.has_prefixes:
            query = replace(query, input_ids=SHARED[query.index % 3][:32] + query.input_ids)
        if kind < 0.08:
            return replace(query, expires_at=time.time() + self.chance.choice([-1.0, 0.02, 0.1]))
        if kind < 0.2:
            return replace(query, sampling=replace(
                query.sampling, passed=REFUSED if kind < 0.14 else '{"frequency_penalty": 1}'))
        return query

    @property
    def prefixes(self) -> Prefixes | None:
        return Prefixes(
            parents=np.full(3, -1), ends=np.full(3, 32), block_tokens=BLOCK, is_whole=True,
            nodes=np.array([one.index % 3 for one in self.queries])) if self.has_prefixes else None

    def run(self) -> None:
        """Runs the job, and asserts what holds for each."""
        self.plan = SimpleNamespace(output=self.folder, fingerprint="f", restarts=self.restarts,
                                    model_dir=self.folder, dtype="float32", engine_args={})
        self.comms, self.heads = local_comms(self.replicas), dict[int, Head]()
        self.sink, self.raised = Told(stop_after=self.stop_after), dict[int, BaseException]()
        threads = [threading.Thread(target=self._guarded, args=(rank,), daemon=True)
                   for rank in range(self.replicas)]
        for thread in threads:
            thread.start()
        until = time.monotonic() + LIMIT_S
        for thread in threads:
            thread.join(until - time.monotonic())
        assert not any(thread.is_alive() for thread in threads), f"it hangs: {self.words}"
        self._check()

    @property
    def words(self) -> str:
        left = sorted({*range(len(self.queries))} - {r.query.index for r in self.sink.results})
        return (f"{self.seed = } {self.policy = } {self.replicas = } {self.per_step = } "
                f"{self.restarts = } {self.is_fixed = } {self.stop_after = } {self.raised = } "
                f"{left = } {self.deaths.counts = } {self.supply.router.away = } "
                f"{[len(own) for own in self.supply.router._shares] = } "
                f"{[(a.load, a.done, a.is_gone, a.has_ended) for a in self.supply._accounts] = }")

    def _check(self) -> None:
        given = Counter(r.query.index for r in self.sink.results)
        assert not given or max(given.values()) == 1, self.words
        for result in self.sink.results:
            if result.finish_reason == EXPIRED:
                assert result.query.expires_at < time.time() and not result.output_ids
            elif result.finish_reason == "error":
                assert result.query.sampling.passed == REFUSED and result.error == "as it was told"
            else:
                assert result.query.sampling.passed != REFUSED
                assert list(result.output_ids) == expected(result.query), self.words
        is_over = isinstance(self.raised.get(0), XgptError)
        assert set(self.raised) <= {0} and (not self.raised or is_over), self.words
        deaths = sum(head.executor.child.deaths for head in self.heads.values())
        suspects = {one for one, times in self.deaths.counts.items() if times >= SUSPECT}
        if is_over:
            assert deaths > self.restarts
            assert self.restarts == 0 or "restarts are used up" in str(self.raised[0])
        elif self.stop_after is None:
            left = {*range(len(self.queries))} - given.keys()
            assert left <= suspects, self.words
            assert self.sink.is_complete is not bool(left), self.words
            if self.is_linked and not left and all(r.error is None and r.output_ids
                                                   for r in self.sink.results):
                link = self.sink.launcher
                assert link is not None and not link._place and not link._waiting, self.words

    def _guarded(self, rank: int) -> None:
        try:
            (self._follow if rank else self._lead)(rank)
        except BaseException as error:
            self.raised[rank] = error
        if rank == 0 and self.raised:
            self._end_others()

    def _end_others(self) -> None:
        """As the launcher does when a rank has failed."""
        for rank in range(1, self.replicas):
            if not self.supply._accounts[rank].has_ended:
                self.comms[0].send(rank, PortionMessage(is_last=True, stops=True))
                while not self.comms[0].receive(rank)[0].has_ended:
                    pass
                self.comms[0].send(rank, StopMessage())

    def _lead(self, rank: int) -> None:
        order = list(range(len(self.queries)))
        window = rra_window(5, 1, EvenBatches()) if self.policy.startswith("rra") else Window(
            waiting=self.chance.choice([2, 9]), present=self.chance.choice([9, 18]))
        router = Router([1.0] * len(order), windows=[window] * self.replicas,
                        routing=FIXED if self.is_fixed else LEAST_TOKENS, prefixes=self.prefixes)
        self.deaths = Deaths(self.plan)  # type: ignore[arg-type]
        self.supply = supply = ToReplicas(
            self.comms[0], self.sink, router, self.queries, order,  # type: ignore[arg-type]
            [SimpleNamespace(head=one) for one in range(self.replicas)], self.deaths)
        head = self._head(rank, supply)
        if self.is_linked:
            self.sink.launcher = LauncherLink(self.folder, first_query=0)
        supply.start(head)
        head.start()
        self.sink.is_complete = run_to_end(head)

    def _follow(self, rank: int) -> None:
        head = self._head(rank, FromRankZero(self.comms[rank], rank, self.queries.__getitem__))
        head.start()
        run_to_end(head)

    def _head(self, rank: int, supply: Any) -> Head:
        core = MortalCore(random.Random(f"{self.seed} {rank}"), self.per_step, self.most_deaths)
        settings = SimpleNamespace(load=None, stages=[1] * (1 + self.seed % 3))
        executor = VllmExecutor(core, self.plan,  # type: ignore[arg-type]
                                lambda message: settings)  # type: ignore[arg-type]

        def make_rule() -> BatchingRule:
            rule = RULES[self.policy]()
            set_prefixes(rule, self.prefixes)
            return rule

        head = Head(rule=make_rule(), executor=executor, sink=supply,
                    neighbours=Neighbours(self.comms[rank], replace(SINGLE_RANK, rank=rank)),
                    vocabulary=Vocabulary(eos_ids=frozenset(), decode_text=lambda ids: ""),
                    link=PoolLink(supply))
        head.make_rule = make_rule
        head.requests.extent = Extent(queries=len(self.queries), longest_input=60,
                                      longest_output=30, longest=90)
        self.heads[rank] = head
        return head
