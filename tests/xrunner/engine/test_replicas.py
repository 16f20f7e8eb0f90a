"""Replicas on threads: one job, several heads, and rank 0 that routes between its own steps."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from replayed import run_steps
from replicated import ANSWERS, CONFIGS, Job, Told
from toys import spec_of

from xgpt.core.controls import FIXED, Batches
from xrunner.comm.point_to_point import local_comms
from xrunner.engine.head import Head
from xrunner.engine.replicas import ToReplicas
from xrunner.engine.running_rules import RunningRules
from xrunner.files.launcher_link import ChangeOrder, LauncherLink, load_change_order, read_observed
from xrunner.rules.changes import ChangesByShape
from xrunner.rules.rra import PhaseControls


@pytest.mark.parametrize(("policy", "config", "slow"), [
    *((*config, None) for config in CONFIGS), (*CONFIGS[0], 0), (*CONFIGS[2], 1)])
def test_each_replica_takes_the_steps_of_its_queries_replay(made, policy, config, slow):
    """However late it is, or who supplies it."""
    job, sink = Job(made, policy, config), Told()
    executors = job.run(sink, routing=FIXED, slow=slow)
    assert sink.is_complete
    job.check_answers(sink.results)
    for replica in (0, 1):
        assert sum(r.replica == replica for r in sink.results) == 13
        steps = run_steps(executors[replica])
        assert len(steps) > 10 and steps == job.replayed(sink.results, replica)


def test_replicas_of_two_shapes_each_by_a_schedule_of_its_own(made):
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


def test_three_replicas_of_two_stages_each(made):
    job, sink = Job(made, *CONFIGS[0], replicas=3, stages=2), Told()
    assert spec_of(job.directory).num_layers > 2
    executors = job.run(sink)
    job.check_answers(sink.results)
    assert {r.replica for r in sink.results} == {0, 1, 2}
    for replica in range(3):
        assert run_steps(executors[2 * replica]) == run_steps(executors[2 * replica + 1])


@pytest.mark.parametrize(("policy", "config", "slow"), [(*CONFIGS[0], 0), (*CONFIGS[2], 1)])
def test_a_replica_that_is_behind_leaves_its_queries_to_the_other(made, slow, policy, config):
    job, sink = Job(made, policy, config, count=40), Told()
    executors = job.run(sink, slow=slow)
    job.check_answers(sink.results)
    shares = [sum(r.replica == replica for r in sink.results) for replica in (0, 1)]
    assert shares[slow] < 20 < shares[1 - slow]
    back = {replica: sum(told.wanted for told in job.news[replica]) for replica in (0, 1)}
    assert back[1 - slow] == 0, "nothing is taken back from who is ahead"
    for replica in (0, 1):
        assert run_steps(executors[replica]) == job.replayed_as_told(replica)


@pytest.mark.parametrize("slow", [0, 1])
def test_a_replica_gives_back_requests_that_its_batches_left_for_later(made, slow):
    """Batches by length begin in another order than requests were given."""
    job, sink = Job(made, *CONFIGS[1], count=40), Told()
    job.estimate = job.one.changed(batches=Batches(most=3)).in_copies(2)
    job.run(sink, slow=slow)
    assert sink.is_complete
    job.check_answers(sink.results)
    shares = [sum(r.replica == replica for r in sink.results) for replica in (0, 1)]
    assert shares[slow] < 20 < shares[1 - slow]


def test_all_stop_when_rank_zero_is_asked_to_and_the_same_ranks_take_another_job(made):
    job, sink, comms = Job(made, *CONFIGS[0], count=60), Told(stop_after=8), local_comms(2)
    job.run(sink, comms=comms)
    assert sink.is_complete is False
    indices = [r.query.index for r in sink.results]
    assert 8 <= len(indices) == len(set(indices)) < 60
    assert all(list(r.output_ids) == ANSWERS[r.query.index] for r in sink.results)
    again = Told()
    job.run(again, comms=comms)
    assert again.is_complete
    job.check_answers(again.results)


@pytest.fixture
def at_once(monkeypatch):
    """What the launcher writes is looked at in every step."""
    monkeypatch.setattr("xrunner.files.launcher_link._INTERVAL_S", 0.0)
    monkeypatch.setattr("xrunner.engine.replicas._REPORT_S", 0.0)


def linked(job: Job, sink: Told, folder: Path, order: ChangeOrder,
           seen: Callable[[Head, ToReplicas], Any] = lambda head, others: None) -> Any:
    """The executors of a job that is told of a change. `seen`: rank 0's head before it starts."""
    order.save(folder)
    assert load_change_order(folder) == order

    def prepare(head: Head, others: ToReplicas, rules: RunningRules) -> None:
        sink.launcher = LauncherLink(
            folder, first_query=0, rule=rules,
            at_work=others.lengths_so_far)
        seen(head, others)

    executors = job.run(sink, prepare=prepare)
    job.check_answers(sink.results)
    return executors


def controls(batch: int, iterations: int) -> PhaseControls:
    return PhaseControls(encode_batch=batch, decode_iterations=iterations, group_max_active=12,
                         group_kv_tokens=9000)


def test_a_change_of_the_control_variables_reaches_every_replica(made, tmp_path, at_once):
    job, sink = Job(made, *CONFIGS[0], count=60), Told()
    executors = linked(job, sink, tmp_path, ChangeOrder(revision=1, controls=controls(4, 9)))
    first, second = sink.launcher.changes
    assert (first["revision"], first.get("replica"), first["encode_batch"]) == (1, None, 4)
    assert (second["revision"], second["replica"]) == (1, 1)
    for replica, change in enumerate((first, second)):
        after = [step for step in executors[replica].log if step.phase >= change["phase"]]
        before = [step for step in executors[replica].log if step.phase < change["phase"]]
        assert max(step.iteration for step in after) == 9 > max(step.iteration for step in before)
    # every query has one place, in the order in which they were taken up
    seen = read_observed(tmp_path)
    assert not seen.finished.keys() & seen.active.keys()
    assert max({**seen.finished, **seen.active}) == len(seen.finished) + len(seen.active) - 1


@pytest.mark.parametrize("is_both", [True, False])
def test_each_shape_takes_up_changes_of_its_own(made, tmp_path, at_once, is_both):
    """Two ranks in a pipeline beside one; a replay that is told of it takes the same steps."""
    job, sink = Job(made, *CONFIGS[0], replicas=1, stages=2, count=60), Told()
    job.estimate = job.one.beside((Job(made, *CONFIGS[0], stages=1).one,))
    windows: list[Any] = []

    def seen(head: Head, others: ToReplicas) -> None:
        head.rule.make_room(12)
        windows.extend([list(others.router.windows), others])

    executors = linked(job, sink, tmp_path, ChangeOrder(revision=1, controls=ChangesByShape(
        (controls(4, 9) if is_both else None, controls(3, 7)))), seen)
    taken = [[change for change in sink.launcher.changes if change.get("replica", 0) == replica]
             for replica in (0, 1)]
    assert [len(own) for own in taken] == [int(is_both), 1]
    assert taken[1][0]["decode_iterations"] == 7 and taken[1][0]["revision"] == 1
    for replica, rank in enumerate((0, 2)):
        assert run_steps(executors[rank]) == job.replayed_as_told(replica, taken[replica])
        most = max(step.iteration for step in executors[rank].log)
        assert most == ((9 if is_both else 4), 7)[replica]
    before, others = windows
    now = others.router.windows
    assert (now[0] == before[0]) is not is_both and now[1].batch == 3


def test_fewer_queries_than_replicas(made):
    job, sink = Job(made, *CONFIGS[0], replicas=3, count=2), Told()
    executors = job.run(sink)
    assert sink.is_complete
    job.check_answers(sink.results)
    assert run_steps(executors[2]) == []
