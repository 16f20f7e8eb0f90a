"""Toy jobs by several replicas on threads, and the replays of what each was given."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from faults import wait
from replayed import problem_of
from toy_runs import Collector, executor_of, head_of, serve
from toys import generate, random_queries

from xgpt.core.controls import ROUND_ROBIN, FixedSchedule
from xgpt.core.lengths import FloatArray
from xgpt.core.problem import QueryLengths
from xgpt.core.schedule import Estimate
from xprofiler.roofline import Roofline
from xrunner.comm.point_to_point import LocalComm, local_comms
from xrunner.engine.arrival_supplies import IDLE_NOTE, ArrivalsToReplicas
from xrunner.engine.arrivals import Arriving, RoutedArrivals
from xrunner.engine.head import Head, PoolLink
from xrunner.engine.pipeline import Neighbours, routes
from xrunner.engine.pool_requests import Extent
from xrunner.engine.replicas import FromRankZero, ToReplicas
from xrunner.engine.running_rules import RunningRules
from xrunner.engine.stage import StageExecutor
from xrunner.files.launcher_link import LauncherLink
from xrunner.query import FinishedQuery, PreparedQuery
from xrunner.rank.world import replicas_of
from xrunner.rules.arrival_routing import router_of
from xrunner.rules.routing import Router, window_of
from xrunner.rules.rra import PhaseControls, RraRule
from xrunner.rules.steps import Step, rules_for, withdraw_waiting
from xsimulator.replay.job import Replayer, replay_job
from xsimulator.replay.pipeline import Pipeline
from xsimulator.replay.pool import PoolHead
from xsimulator.replay.queries import Queries
from xsimulator.replay.routing import submit
from xsimulator.rough.formulas import fixed_estimate

Made = Callable[[str], tuple[Path, Any]]
CONFIGS = [("rra", FixedSchedule(encode_batch=2, decode_iterations=4)),
           ("ft", FixedSchedule(encode_batch=3, decode_micro_batches=2)),
           ("sarathi", FixedSchedule(max_active=3, token_budget=12))]


ANSWERS: dict[int, list[int]] = {}  # of the one model, by query


class Job:
    """A toy job by so many replicas of an estimate, each of `stages` single ranks."""

    def __init__(self, made: Made, policy: str, config: object, *, replicas: int = 2,
                 stages: int = 1, count: int = 26) -> None:
        self.directory, self.model = made("llama")
        self.queries = random_queries(count, seed=5)
        for query in self.queries[len(ANSWERS):]:
            ANSWERS[query.index] = generate(self.model, query)
        self.outputs = np.array([len(ANSWERS[q.index]) for q in self.queries])
        inputs = np.array([len(q.input_ids) for q in self.queries])
        self.news: dict[int, list[News]] = {}  # by replica
        self.slow: int | None = None
        self.note = ""  # what an idle head waits for
        self.at_work: dict[int, tuple[Head, StageExecutor]] = {}  # by replica
        self.problem = problem_of(self.directory, np.stack([inputs, self.outputs], axis=1), stages)
        self.timing = Roofline(self.problem.model, self.problem.cluster.device, "float32")
        one: Estimate = fixed_estimate(policy, self.problem, self.timing, config)
        self.one = one.changed(kv_tokens=20_000)
        self.estimate = self.one.in_copies(replicas)

    def run(self, sink: Collector, *, comms: Sequence[LocalComm] = (), slow: int | None = None,
            routing: str = ROUND_ROBIN, arrival_s: FloatArray | None = None,
            prepare: Callable[[Head, ToReplicas, RunningRules], None] = (
                lambda head, others, rules: None),
            ) -> dict[int, StageExecutor]:
        """Every rank's executor. `comms`: of ranks that ran before. `slow`: one of two replicas,
        each step of which takes as long as all that the other has to do. `arrival_s`: [queries] by
        the performance counter; None: all are there. `prepare`: rank 0's head, before it starts."""
        ranks = self.estimate.num_devices
        comms = comms or local_comms(ranks)
        executors = {
            rank: executor_of(self.directory, stage) for replica in replicas_of(self.estimate)
            for pool in replica.pools for stage in pool.stages for rank in stage.ranks}
        self.slow, self.at_work = slow, {}
        threads = [threading.Thread(target=self._work, daemon=True, args=(
            comms[rank], executors[rank])) for rank in range(1, ranks)]
        for thread in threads:
            thread.start()
        order = list(range(len(self.queries)))
        replicas = replicas_of(self.estimate)
        tokens, windows = [1.0] * len(order), [window_of(one.estimate) for one in replicas]
        told: Any = (sink, self.queries, order, replicas)
        if arrival_s is None:
            router = Router(tokens, routing=routing, windows=windows, speeds=[
                one.estimate.figures.throughput_qps for one in replicas])
            supply = ToReplicas(comms[0], told[0], router, *told[1:])
        else:
            self.note = IDLE_NOTE
            arriving = Arriving(iter(order), time.perf_counter, arrival_s=arrival_s)
            supply = ArrivalsToReplicas(comms[0], told[0], RoutedArrivals(router_of(
                routing, tokens=tokens, windows=windows, seed=0), arriving, order, windows),
                *told[1:])
        head = self._head(comms[0], executors[0], supply)
        prepare(head, supply, RunningRules(comms[0], supply, replicas))
        supply.start(head)
        head.start()
        sink.is_complete = head.run()
        for thread in threads:
            thread.join(timeout=60)
            assert not thread.is_alive()
        return executors

    def replayed(self, results: list[FinishedQuery], replica: int) -> list[tuple[object, ...]]:
        """The steps of a replay of the queries that went to a replica, in the order in which it
        took them up."""
        own = sorted((r for r in results if r.replica == replica),
                     key=lambda r: (r.encode_start_s, r.query.index))
        result = replay_job(self.problem, self.timing, self._one_of(replica), QueryLengths(
            inputs=np.array([len(r.query.input_ids) for r in own]),
            outputs=np.array([len(r.output_ids) for r in own]),
            most_outputs=np.array([r.query.max_new_tokens for r in own])))
        pool = result.pools[0]
        return [(step.kind.value, step.group, step.phase, step.iteration, int(encoded + decoded))
                for step, encoded, decoded in zip(pool.steps, pool.encoded, pool.decoded,
                                                  strict=True)]

    def _one_of(self, replica: int) -> Estimate:
        """What the replica executes."""
        return [shape.one_copy for shape in self.estimate.shapes
                for _ in range(shape.deployment.replicas)][replica]

    def replayed_as_told(self, replica: int,
                         changes: Sequence[dict[str, Any]] = ()) -> list[tuple[object, ...]]:
        """The steps of the replica's rule, which queries come to, and are taken back from, at the
        same turns; `changes`: of RRA's, from which phase on."""
        lengths = QueryLengths(
            inputs=np.array([len(q.input_ids) for q in self.queries]), outputs=self.outputs,
            most_outputs=np.array([q.max_new_tokens for q in self.queries]))
        one = self._one_of(replica)
        replayer = Replayer(self.problem, self.timing, one)
        clock, rule = replayer.clocks(lengths)[0], rules_for(one)[0]
        for change in changes:
            assert isinstance(rule, RraRule)
            rule.make_room(change["group_max_active"])
            rule.change(PhaseControls(**{key: value for key, value in change.items() if key not in (
                "revision", "replica", "elapsed_s", "phase")}), phase=change["phase"])
        (plan,), _ = replayer.plans([rule], [clock])
        queries, line = Queries(lengths, encode_gives_token=True), Pipeline(
            clock, len(one.deployment.stages))
        head, news, turn = PoolHead(plan, queries, line), deque(self.news[replica]), 0
        while True:
            while news and news[0].turn == turn:
                told = news.popleft()
                if told.wanted:
                    assert tuple(withdraw_waiting(rule, told.wanted)) == told.queries
                for index in () if told.wanted else told.queries:
                    submit(queries, index, rule)
            group = head.next_group()
            if group is None:
                break
            head.turn(group, turn)
            turn += 1
        assert not news
        times = line.times()
        return [(step.kind.value, step.group, step.phase, step.iteration, int(size[1] + size[2]))
                for step, size in zip(times.steps, times.sizes, strict=True)]

    def check_answers(self, results: list[FinishedQuery]) -> None:
        assert sorted(r.query.index for r in results) == list(range(len(self.queries)))
        assert all(list(r.output_ids) == ANSWERS[r.query.index]
                   for r in results)
        assert all(r.query.input_ids for r in results), "as rank 0 knows them"

    def _work(self, comm: LocalComm, executor: StageExecutor) -> None:
        replica = next(one for one in replicas_of(self.estimate) if comm.rank in one.ranks)
        if comm.rank != replica.head:
            serve(comm, routes(replica.pools)[comm.rank], executor)
            return
        supply = FromRankZero(comm, replica.number, lambda index: self.queries[index],
                              reports_lengths=True, note=self.note)
        head = self._head(comm, executor, supply)
        head.start()
        head.run()

    def _head(self, comm: LocalComm, executor: StageExecutor, supply: Any) -> Any:
        replica = next(one for one in replicas_of(self.estimate) if comm.rank in one.ranks)
        head = head_of(self.directory, Neighbours(comm, routes(replica.pools)[comm.rank]),
                       executor, rules_for(replica.estimate)[0], supply, PoolLink(supply))
        head.requests.extent = Extent(queries=len(self.queries), longest_input=20,
                                    longest_output=30, longest=50)
        self.news[replica.number] = record_news(head)
        self.at_work[replica.number] = head, executor
        if self.slow == replica.number:
            head.report = self._lag  # type: ignore[method-assign]
        return head

    def _lag(self) -> None:
        """Until the other has nothing to do."""
        other = 1 - (self.slow or 0)
        wait(lambda: other in self.at_work and self.at_work[other][1].log, "the other has begun")
        head, _ = self.at_work[other]
        wait(lambda: not head.requests.has_work, "the other has done what it has")


class News(NamedTuple):
    """Queries that came to a head, or (`wanted` of them) were taken back, before its turn."""

    turn: int
    wanted: int
    queries: tuple[int, ...]


def record_news(head: Head) -> list[News]:
    """What the head is told from now on."""
    news, turns = list[News](), [0]
    decide, submit_, take_back = head.rule.decide, head.submit, head.take_back

    def counted() -> Step | None:
        turns[0] += 1
        return decide()

    def submitted(query: PreparedQuery, *, is_known: bool = False) -> bool:
        news.append(News(turns[0], 0, (query.index,)))
        return submit_(query, is_known=is_known)

    def withdraw_waiting(count: int) -> list[int]:
        indices = take_back(count)
        if indices:
            news.append(News(turns[0], len(indices), tuple(indices)))
        return indices

    head.rule.decide, head.submit = counted, submitted  # type: ignore[method-assign]
    head.take_back = withdraw_waiting  # type: ignore[method-assign]
    return news


class Begun:
    """What is kept of the queries under way."""

    def __init__(self) -> None:
        self.queries: list[int] = []

    def begin(self, queries: Iterable[int]) -> None:
        self.queries += queries


class Told(Collector):
    """What a RunSink is to rank 0's end of the replicas; `launcher`: who follows the run."""

    launcher: LauncherLink | None = None

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.underway = Begun()

    def finished(self, result: FinishedQuery) -> None:
        super().finished(result)
        if self.launcher is not None:
            self.launcher.finished(result)

    def progress(self, elapsed_s: float, output_tokens: int) -> None:
        if self.launcher is not None:
            self.launcher.look(elapsed_s)
