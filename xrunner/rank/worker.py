"""One rank: `mpiexec -n N python -m mpi4py -m xrunner.rank.worker OUT/run.json`. All ranks run
this; they differ in their replica, stage, and place in it. With `-m mpi4py` an uncaught error on
one rank ends all."""

if __name__ == "__main__":  # before what takes seconds to import
    from xgpt.core.system.lifeline import begin_rank

    begin_rank()

import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from xgpt.core.controls import RraControls
from xgpt.core.deployment import Pool
from xgpt.core.engines import OWN_ENGINE
from xgpt.core.prefixes import Prefixes, in_blocks
from xgpt.core.schedule import Schedule
from xgpt.core.schedule_file import load_schedule
from xgpt.requests.spool import Spool
from xrunner.comm.point_to_point import Comm
from xrunner.engine.arrival_supplies import IDLE_NOTE, ArrivalsToReplicas, FromArrivals
from xrunner.engine.arrivals import Arriving, RoutedArrivals
from xrunner.engine.head import FromSpool, Head, PoolLink, Sink, Supply, run_to_end
from xrunner.engine.pipeline import Neighbours, RankReport, await_start, serve_stage
from xrunner.engine.pool_links import FromEncodePool, ToDecodePool
from xrunner.engine.pool_requests import Extent, Vocabulary, lengths_so_far
from xrunner.engine.replicas import FromRankZero, ToReplicas
from xrunner.engine.running_rules import RunningRules
from xrunner.files.deaths import Deaths
from xrunner.files.forecasts import load_forecasts
from xrunner.files.launcher_link import LauncherLink
from xrunner.files.results import Answered
from xrunner.files.sink import RunSink
from xrunner.files.spooled_requests import SpooledQueries
from xrunner.files.tokenizer import TextTokenizer, eos_ids, start_token
from xrunner.plan import RunPlan, load_plan
from xrunner.query import PreparedQuery
from xrunner.rank.lifecycle import (
    Stopwatch,
    end_process,
    open_requests,
    run_head,
    run_order,
    run_rank,
)
from xrunner.rank.loading import KeptWeights, Loaded, load
from xrunner.rank.world import Replica, World, connect
from xrunner.rules.arrival_routing import router_of
from xrunner.rules.changes import Changeable
from xrunner.rules.prefixes import set_prefixes
from xrunner.rules.routing import Router, expected_tokens, window_of
from xrunner.rules.rra import RraRule
from xrunner.rules.steps import BatchingRule, rules_for, set_deadlines, set_forecaster


def main(arguments: list[str]) -> int:
    """Runs one rank; returns its exit code."""
    plan = load_plan(Path(arguments[0]))
    return run_rank(plan, lambda: connect(plan.device_kind),
                    partial(work, load=partial(load, kept_weights=KeptWeights())))


Load = Callable[[RunPlan, Schedule, World, Stopwatch], Loaded]


def work(plan: RunPlan, world: World, load: Load) -> None:
    """Does this rank's part of one run. `load`: loads its part of the model."""
    torch.set_num_threads(plan.threads_per_rank)
    schedule = load_schedule(plan.output / "schedule.json")
    clock = Stopwatch(plan.clock_s)
    if world.comm.rank == 0:
        _lead(plan, schedule, world, clock, load)
        return
    loaded = load(plan, schedule, world, clock)
    encoded_tokens = 0
    if loaded.route.steps_from is not None:
        _follow(world, loaded, clock)
    else:
        head = (_decode_head if loaded.pool.role == "decode" else _replica_head)(
            plan, schedule, world, loaded, clock)
        world.barrier()
        clock.restart()
        run_to_end(head)
        world.comm.flush()
        encoded_tokens = head.encoded_tokens
    loaded.executor.close()
    world.barrier()  # a replica may end long before others: a gather would spin
    world.gather(replace(loaded.report(), encoded_tokens=encoded_tokens))


def _follow(world: World, loaded: Loaded, clock: Stopwatch) -> None:
    """Serves the stage of a rank that is no pool's head until told to stop."""
    neighbours = Neighbours(world.comm, loaded.route)
    await_start(neighbours, loaded.executor)
    world.barrier()
    clock.restart()
    serve_stage(neighbours, loaded.executor)


def _decode_head(plan: RunPlan, schedule: Schedule, world: World, loaded: Loaded,
                 clock: Stopwatch) -> Head:
    """Started head of a decode pool; its results go to the encode pool's head."""
    assert loaded.receiver is not None
    link = FromEncodePool(world.comm, loaded.receiver, encode_head=loaded.replica.head)
    head = _head_of(plan, world, loaded, clock, link, link)
    head.start()
    return head


def _replica_head(plan: RunPlan, schedule: Schedule, world: World, loaded: Loaded,
                  clock: Stopwatch) -> Head:
    """Started head of another replica than the first; rank 0 sends its requests."""
    spool = Spool(plan.output)
    tells = plan.is_watched and _reports_lengths(schedule)
    supply = FromRankZero(world.comm, loaded.replica.number,
                          SpooledQueries(spool, plan).__getitem__, reports_lengths=tells,
                          note=IDLE_NOTE if plan.arrives else "")
    head = _head_of(plan, world, loaded, clock, supply, _link(world.comm, loaded, supply))
    head.requests.extent = _extent(spool, Answered(0, frozenset()))
    head.start()
    return head


def _head_of(plan: RunPlan, world: World, loaded: Loaded, clock: Stopwatch, sink: Sink,
             link: PoolLink) -> Head:
    """The head of this rank's pool, its rule and KV layout set."""
    replica = loaded.replica

    def make_rule() -> BatchingRule:
        rule, spool = _rule_of(loaded.pool, replica), Spool(plan.output)
        if (kept := load_forecasts(plan.output)) is not None:
            set_forecaster(rule, kept.forecaster(plan.output / "results.jsonl"))
        set_deadlines(rule, spool.deadlines_s)
        set_prefixes(rule, _shared_prefixes(plan, spool))
        if isinstance(rule, RraRule):
            rooms = ((plan.slots, plan.kv_tokens), *plan.other_rooms)
            slots, tokens = rooms[replica.shape] if replica.shape < len(rooms) else (0, 0)
            rule.make_room(slots, tokens if plan.engine == OWN_ENGINE else 0)
        return rule

    start = start_token(plan.model_dir) if loaded.spec.is_encoder_decoder else None
    head = Head(rule=make_rule(), executor=loaded.executor, sink=sink, clock=clock, link=link,
                neighbours=Neighbours(world.comm, loaded.route), vocabulary=Vocabulary(
                    eos_ids=eos_ids(plan.model_dir), start_token=start,
                    decode_text=TextTokenizer(plan.model_dir).decode))
    head.make_rule = make_rule if loaded.may_die else None
    head.requests.in_blocks = plan.kv_in_blocks
    return head


def _lead(plan: RunPlan, schedule: Schedule, world: World, clock: Stopwatch,
          load: Load) -> None:
    """Runs rank 0: reads the requests, is the first pool's head, and writes everything."""
    queries, num_errors, before = open_requests(plan)
    loaded = load(plan, schedule, world, clock)
    sink = RunSink(plan, num_queries=len(queries), before=before, parsed=loaded.parsed)
    order = run_order(len(queries), plan, before)
    num_left = len(queries) - before.total - len(plan.aside)
    others = _other_replicas(plan, loaded, world.comm, sink, queries, order, clock)
    supply = others or (FromArrivals(
        queries, _arriving(plan, order, clock, sink)) if plan.arrives else FromSpool(
        queries, order, num_left, least=2 * window_of(schedule.estimate).waiting,
        begin=lambda given: sink.launcher.begin(given) if sink.launcher is not None else None))
    head = _head_of(plan, world, loaded, clock, others or sink, _link(world.comm, loaded, supply))
    sink.sharing.prefixes = _shared_prefixes(plan, Spool(plan.output))
    if plan.is_watched:
        rule = head.rule if isinstance(head.rule, Changeable) else None
        rules = RunningRules(world.comm, others, loaded.replicas) if others else rule
        at_work = others.lengths_so_far if others else partial(lengths_so_far, head.requests)
        sink.launcher = LauncherLink(plan.output, first_query=before.total,
                                     at_work=at_work if _reports_lengths(schedule) else None,
                                     rule=rules if rule else None,
                                     limit_s=schedule.bound.limit_s)
    head.requests.extent = _extent(Spool(plan.output), before)
    if others is None:
        head.requests.on_begin = sink.underway.begin
        if not plan.arrives:  # its clock begins with the ranks' common start
            supply.look(head)
    else:
        others.start(head)
    head.start()

    def report() -> RankReport:
        loaded.executor.close()
        return loaded.report()

    run_head(head, sink, world, clock, report=report, queries_before=before.total,
            num_errors=num_errors)


def _arriving(plan: RunPlan, order: Iterator[int], clock: Stopwatch, sink: RunSink) -> Arriving:
    """The requests to come, in the order of their arrival."""
    arriving = Arriving(order, clock, concurrency=plan.concurrency, begins_s=plan.clock_s,
                        arrival_s=Spool(plan.output).arrival_s)
    sink.on_end = arriving.answered
    return arriving


def _other_replicas(plan: RunPlan, loaded: Loaded, comm: Comm, sink: RunSink,
                    queries: Sequence[PreparedQuery], order: Iterator[int],
                    clock: Stopwatch) -> ToReplicas | None:
    """Rank 0's link to the other replicas; None if there is one only."""
    replicas = loaded.replicas
    if len(replicas) == 1:
        return None
    spool, places = Spool(plan.output), array("q", order)
    is_forced = np.fromiter((plan.ignore_eos or record.is_forced for record in spool.records()),
                            bool, len(spool))
    rows = np.array(places, np.int64)
    tokens = expected_tokens(spool.input_tokens[rows], spool.most_outputs[rows],
                             plan.mean_output_tokens, is_forced[rows])
    prefixes, windows = _shared_prefixes(plan, spool), [
        window_of(replica.estimate) for replica in replicas]
    deaths = Deaths(plan) if loaded.may_die else None
    if plan.arrives:
        rule = router_of(plan.routing, tokens=tokens, windows=windows, seed=plan.seed)
        arriving = _arriving(plan, iter(places), clock, sink)
        return ArrivalsToReplicas(comm, sink, RoutedArrivals(rule, arriving, places, windows),
                                  queries, places, replicas, deaths)
    router = Router(tokens, windows=windows,
                    speeds=[replica.estimate.figures.throughput_qps for replica in replicas],
                    routing=plan.routing, prefixes=None if prefixes is None else prefixes[rows])
    return ToReplicas(comm, sink, router, queries, places, replicas, deaths)


def _reports_lengths(schedule: Schedule) -> bool:
    """Whether heads report lengths of active requests: only if all know them. Otherwise long
    requests would be missing."""
    return all(isinstance(shape.controls, RraControls) for shape in schedule.estimate.shapes)


def _extent(spool: Spool, before: Answered) -> Extent:
    """Sizes of all requests left, since any of them may go to any replica."""
    is_left = np.arange(len(spool)) >= before.written
    is_left[list(before.held)] = False
    inputs, outputs = spool.input_tokens[is_left], spool.most_outputs[is_left]
    return Extent(queries=len(inputs), longest_input=int(inputs.max(initial=1)),
                  longest_output=int(outputs.max(initial=1)),
                  longest=int((inputs + outputs).max(initial=1)))


def _shared_prefixes(plan: RunPlan, spool: Spool) -> Prefixes | None:
    """The prefixes that requests share in this run; None if they share none."""
    found = spool.prefixes if plan.shares_prefixes else None
    return found and in_blocks(found, plan.kv_block_tokens, is_whole=plan.engine != OWN_ENGINE)


def _rule_of(pool: Pool, replica: Replica) -> BatchingRule:
    names = [other.name for other in replica.pools]
    return rules_for(replica.estimate)[names.index(pool.name)]


def _link(comm: Comm, loaded: Loaded, supply: Supply) -> PoolLink:
    """Link of the rank's pool, which encodes, to the decode pool of its replica."""
    replica = loaded.replica
    if len(replica.pools) == 1:
        return PoolLink(supply)
    decode = replica.own.decoding
    return ToDecodePool(comm, _rule_of(decode, replica), decode.stages[0].ranks[0], supply)


if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
