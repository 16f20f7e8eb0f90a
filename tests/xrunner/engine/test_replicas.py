"""Replicas on threads: one job, several heads, and rank 0 that routes between its own steps."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from replayed import problem_of, run_steps
from toy_runs import Collector, executor_of, head_of, serve
from toys import generate, random_queries, spec_of

from xgpt.core.controls import EvenBatches
from xgpt.core.job import FIXED, ROUND_ROBIN
from xgpt.core.queries import QueryLengths
from xgpt.core.schedule import Estimate
from xprofiler.roofline import Roofline
from xrunner.engine.head import Alone, Head
from xrunner.engine.pipeline import Neighbours, routes
from xrunner.engine.replicas import FromRankZero, OfEveryReplica, ToReplicas
from xrunner.engine.roster import Extent
from xrunner.engine.stage import StageExecutor
from xrunner.io.launcher_link import ChangeOrder, LauncherLink, read_observed
from xrunner.query import FinishedQuery, PreparedQuery
from xrunner.replica import replica_of, replicas_of
from xrunner.rules.routing import Router
from xrunner.rules.rra import PhaseControls, RraRule
from xrunner.rules.steps import Step, YieldingRule, rules_for
from xrunner.rules.windows import window_of
from xrunner.transport.comm import LocalComm, local_comms
from xrunner.transport.messages import StopMessage
from xsimulator.policies import make_policy
from xsimulator.policies.continuous.config import ContinuousConfig
from xsimulator.policies.rra.config import RraConfig
from xsimulator.policies.static.config import StaticConfig
from xsimulator.replay.flow import submit
from xsimulator.replay.job import Replayer, replay_job
from xsimulator.replay.pool import PoolHead
from xsimulator.replay.queries import Queries
from xsimulator.replay.stage_line import StageLine

Made = Callable[[str], tuple[Path, Any]]
CONFIGS = [("rra", RraConfig(encode_batch=2, decode_iterations=4)),
           ("ft", StaticConfig(encode_batch=3, decode_micro_batches=2)),
           ("sarathi", ContinuousConfig(max_active=3, token_budget=12))]


_ANSWERS: dict[int, list[int]] = {}  # of the one model, by query


class Job:
    """A toy job by so many replicas of an estimate, each of `stages` single ranks."""

    def __init__(self, made: Made, policy: str, config: object, *, replicas: int = 2,
                 stages: int = 1, count: int = 26) -> None:
        self.directory, self.model = made("llama")
        self.queries = random_queries(count, seed=5)
        for query in self.queries[len(_ANSWERS):]:
            _ANSWERS[query.index] = generate(self.model, query)
        self.outputs = np.array([len(_ANSWERS[q.index]) for q in self.queries])
        inputs = np.array([len(q.input_ids) for q in self.queries])
        self.news: dict[int, list[News]] = {}  # by replica
        self.problem = problem_of(self.directory, np.stack([inputs, self.outputs], axis=1), stages)
        self.timing = Roofline(self.problem.model, self.problem.cluster.device, "float32")
        one: Estimate = make_policy(policy, self.problem, self.timing).estimate(config)
        self.one = one.changed(kv_tokens=20_000)
        self.estimate = self.one.in_copies(replicas)

    def run(self, sink: Collector, *, comms: Sequence[LocalComm] = (), slow: int | None = None,
            routing: str = ROUND_ROBIN,
            prepare: Callable[[Head, ToReplicas], None] = lambda head, others: None,
            ) -> dict[int, StageExecutor]:
        """Every rank's executor. `comms`: of ranks that ran before. `slow`: a replica that takes
        its time. `prepare`: rank 0's head, before it starts."""
        ranks = self.estimate.num_devices
        comms = comms or local_comms(ranks)
        executors = {
            rank: executor_of(self.directory, stage) for replica in replicas_of(self.estimate)
            for pool in replica.pools for stage in pool.stages for rank in stage.ranks}
        threads = [threading.Thread(target=self._work, daemon=True, args=(
            comms[rank], executors[rank], slow)) for rank in range(1, ranks)]
        for thread in threads:
            thread.start()
        order = list(range(len(self.queries)))
        replicas = [replica.estimate for replica in replicas_of(self.estimate)]
        router = Router([1.0] * len(order), routing=routing, windows=[*map(window_of, replicas)],
                        speeds=[one.figures.throughput_qps for one in replicas])
        supply = ToReplicas(comms[0], sink, router, self.queries, order,  # type: ignore[arg-type]
                            [replica.head for replica in replicas_of(self.estimate)[1:]])
        head = self._head(comms[0], executors[0], supply)
        prepare(head, supply)
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
        one = [shape.one_copy for shape in self.estimate.shapes
               for _ in range(shape.deployment.replicas)][replica]
        result = replay_job(self.problem, self.timing, one, QueryLengths(
            inputs=np.array([len(r.query.input_ids) for r in own]),
            outputs=np.array([len(r.output_ids) for r in own]),
            most_outputs=np.array([r.query.max_new_tokens for r in own])))
        pool = result.pools[0]
        return [(step.kind.value, step.group, step.phase, step.iteration, int(encoded + decoded))
                for step, encoded, decoded in zip(pool.steps, pool.encoded, pool.decoded,
                                                  strict=True)]

    def replayed_as_told(self, replica: int) -> list[tuple[object, ...]]:
        """The steps of the replica's rule, which queries come to, and are taken back from, at the
        same turns."""
        lengths = QueryLengths(
            inputs=np.array([len(q.input_ids) for q in self.queries]), outputs=self.outputs,
            most_outputs=np.array([q.max_new_tokens for q in self.queries]))
        replayer = Replayer(self.problem, self.timing, self.one)
        clock, rule = replayer.clocks(lengths)[0], rules_for(self.one)[0]
        (plan,), _ = replayer.plans([rule], [clock])
        queries, line = Queries(lengths, encode_gives_token=True), StageLine(clock, 1)
        head, news, turn = PoolHead(plan, queries, line), deque(self.news[replica]), 0
        while True:
            while news and news[0].turn == turn:
                told = news.popleft()
                if told.wanted:
                    assert isinstance(rule, YieldingRule)
                    assert tuple(rule.take_back(told.wanted)) == told.queries
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
        assert all(list(r.output_ids) == _ANSWERS[r.query.index]
                   for r in results)
        assert all(r.query.input_ids for r in results), "as rank 0 knows them"

    def _work(self, comm: LocalComm, executor: StageExecutor, slow: int | None) -> None:
        replica = replica_of(self.estimate, comm.rank)
        if comm.rank != replica.head:
            serve(comm, routes(replica.pools)[comm.rank], executor)
            return
        supply = FromRankZero(comm, replica.number, lambda index: self.queries[index],
                              tells_lengths=True)
        head = self._head(comm, executor, supply)
        if slow == replica.number:
            head.report = lambda: time.sleep(0.03)  # type: ignore[method-assign]
        head.start()
        head.run()

    def _head(self, comm: LocalComm, executor: StageExecutor, supply: Any) -> Any:
        replica = replica_of(self.estimate, comm.rank)
        head = head_of(self.directory, Neighbours(comm, routes(replica.pools)[comm.rank]),
                       executor, rules_for(replica.estimate)[0], supply, Alone(supply))
        head.roster.extent = Extent(queries=len(self.queries), longest_input=20,
                                    longest_output=30, longest=50)
        self.news[replica.number] = record_news(head)
        return head


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

    def submitted(query: PreparedQuery) -> bool:
        news.append(News(turns[0], 0, (query.index,)))
        return submit_(query)

    def taken_back(count: int) -> list[int]:
        indices = take_back(count)
        if indices:
            news.append(News(turns[0], len(indices), tuple(indices)))
        return indices

    head.rule.decide, head.submit = counted, submitted  # type: ignore[method-assign]
    head.take_back = taken_back  # type: ignore[method-assign]
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


@pytest.mark.parametrize(("policy", "config"), CONFIGS)
def test_each_replica_takes_the_steps_of_its_queries_replay(made: Made, policy: str,
                                                            config: object) -> None:
    job, sink = Job(made, policy, config), Told()
    executors = job.run(sink, routing=FIXED)
    assert sink.is_complete
    job.check_answers(sink.results)
    for replica in (0, 1):
        assert sum(r.replica == replica for r in sink.results) == 13
        steps = run_steps(executors[replica])
        assert len(steps) > 10 and steps == job.replayed(sink.results, replica)


def test_replicas_of_two_shapes_each_by_a_schedule_of_its_own(made: Made) -> None:
    """Two ranks in a pipeline by RRA, and one by Sarathi; who is quicker is given more."""
    job, sink = Job(made, *CONFIGS[0], replicas=1, stages=2), Told()
    alone = Job(made, *CONFIGS[2], stages=1).one
    slow = alone.changed(throughput_qps=job.one.figures.throughput_qps / 3)
    job.estimate = job.one.beside((slow,))
    assert job.estimate.figures.throughput_qps == pytest.approx(
        4 / 3 * job.one.figures.throughput_qps)
    executors = job.run(sink, routing=FIXED)
    job.check_answers(sink.results)
    shares = [sum(r.replica == replica for r in sink.results) for replica in (0, 1)]
    assert shares == [19, 7]
    assert run_steps(executors[0]) == run_steps(executors[1]) == job.replayed(sink.results, 0)
    assert run_steps(executors[2]) == job.replayed(sink.results, 1)
    assert {kind for kind, *_ in run_steps(executors[2])} >= {"mixed"}


def test_three_replicas_of_two_stages_each(made: Made) -> None:
    job, sink = Job(made, *CONFIGS[0], replicas=3, stages=2), Told()
    assert spec_of(job.directory).num_layers > 2
    executors = job.run(sink)
    job.check_answers(sink.results)
    assert {r.replica for r in sink.results} == {0, 1, 2}
    for replica in range(3):
        assert run_steps(executors[2 * replica]) == run_steps(executors[2 * replica + 1])


@pytest.mark.parametrize(("policy", "config"), [CONFIGS[0], CONFIGS[2]])
@pytest.mark.parametrize("slow", [0, 1])
def test_a_replica_that_is_behind_leaves_its_queries_to_the_other(
        made: Made, slow: int, policy: str, config: object) -> None:
    job, sink = Job(made, policy, config, count=40), Told()
    if slow == 0:
        sink.progress = lambda *_: time.sleep(0.03)  # type: ignore[method-assign]
    executors = job.run(sink, slow=slow)
    job.check_answers(sink.results)
    shares = [sum(r.replica == replica for r in sink.results) for replica in (0, 1)]
    assert shares[slow] < 20 < shares[1 - slow]
    back = {replica: sum(told.wanted for told in job.news[replica]) for replica in (0, 1)}
    assert back[slow] > 0 and back[1 - slow] == 0, "some were given out, and not begun"
    for replica in (0, 1):
        assert run_steps(executors[replica]) == job.replayed_as_told(replica)


def test_all_stop_when_rank_zero_is_asked_to_and_what_is_done_is_kept(made: Made) -> None:
    job, sink = Job(made, *CONFIGS[0], count=60), Told(stop_after=8)
    job.run(sink)
    assert sink.is_complete is False
    indices = [r.query.index for r in sink.results]
    assert 8 <= len(indices) == len(set(indices)) < 60
    assert all(list(r.output_ids) == _ANSWERS[r.query.index] for r in sink.results)


def test_the_same_ranks_take_another_job_after_one_that_was_stopped(made: Made) -> None:
    job, comms = Job(made, *CONFIGS[0], count=60), local_comms(2)
    job.run(Told(stop_after=8), comms=comms)
    sink = Told()
    job.run(sink, comms=comms)
    assert sink.is_complete
    job.check_answers(sink.results)


def test_a_change_of_the_control_variables_reaches_every_replica(
        made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xrunner.io.launcher_link._INTERVAL_S", 0.0)
    monkeypatch.setattr("xrunner.engine.replicas._TELL_S", 0.0)
    job, sink = Job(made, *CONFIGS[0], count=60), Told()
    controls = PhaseControls(encode_batch=4, decode_iterations=9, group_max_active=12,
                             group_kv_tokens=9000)
    ChangeOrder(revision=1, controls=controls).save(tmp_path)

    def prepare(head: Head, others: ToReplicas) -> None:
        assert isinstance(head.rule, RraRule)
        sink.launcher = LauncherLink(
            tmp_path, first_query=0, rule=OfEveryReplica(head.rule, others, EvenBatches()),
            at_work=lambda: head.lengths_so_far() | others.lengths_so_far())

    executors = job.run(sink, prepare=prepare)
    job.check_answers(sink.results)
    assert sink.launcher is not None
    first, second = sink.launcher.taken
    assert (first["revision"], first.get("replica"), first["encode_batch"]) == (1, None, 4)
    assert (second["revision"], second["replica"]) == (1, 1)
    for replica, change in enumerate((first, second)):
        after = [step for step in executors[replica].log if step.phase >= change["phase"]]
        before = [step for step in executors[replica].log if step.phase < change["phase"]]
        assert max(step.iteration for step in after) == 9 > max(step.iteration for step in before)
    # every query has one place, in the order in which they were taken up
    seen = read_observed(tmp_path)
    assert seen is not None and not seen.finished.keys() & seen.active.keys()
    assert max({**seen.finished, **seen.active}) == len(seen.finished) + len(seen.active) - 1


def test_fewer_queries_than_replicas(made: Made) -> None:
    job, sink = Job(made, *CONFIGS[0], replicas=3, count=2), Told()
    executors = job.run(sink)
    assert sink.is_complete
    job.check_answers(sink.results)
    assert run_steps(executors[2]) == []


def test_a_query_is_as_it_was_read() -> None:
    """What goes from rank to rank is told apart from what rank 0 keeps."""
    query = PreparedQuery(index=3, id="q", input_ids=(1, 2, 3), max_new_tokens=2)
    comms = local_comms(2)
    supply = FromRankZero(comms[1], 1, lambda index: query)
    supply.finished(FinishedQuery(query=query, output_ids=(4,), finish_reason="stop", text="",
                                  encode_start_s=0.0, first_token_s=1.0, last_token_s=1.0))

    class HeadAtRest:
        roster, output_tokens = type("Waiting", (), {"num_waiting": 0})(), 1

        def clock(self) -> float:
            return 0.0

    comms[0].send(1, StopMessage())
    supply.close(HeadAtRest())  # type: ignore[arg-type]
    message, _ = comms[0].receive(1)
    assert message.results[0].query.input_ids == () and message.has_ended  # type: ignore[union-attr]
