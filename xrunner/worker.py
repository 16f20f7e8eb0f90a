"""One rank: `mpiexec -n N python -m mpi4py -m xrunner.worker OUT/run.json`.

All ranks run this; what differs is the stage they belong to, and their place in it. `-m mpi4py`
makes an uncaught error on one rank end them all.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from xgpt.core.errors import XgptError
from xgpt.core.schedule import Schedule, load_schedule
from xrunner.engine.head import Head, Link
from xrunner.engine.links import FromEncodePool, ToDecodePool
from xrunner.engine.pipeline import Neighbours, RankReport, await_start, serve_stage
from xrunner.engine.query import Vocabulary
from xrunner.io.sink import RunSink
from xrunner.io.tokenizer import TextTokenizer, eos_ids, start_token
from xrunner.io.watched import WatchedRun
from xrunner.lead import conduct, order_of, read_work
from xrunner.loading import Loaded, load, report_of
from xrunner.plan import RunPlan, load_plan
from xrunner.rank import Stopwatch, to_the_end
from xrunner.rules.registry import EXECUTED, TWO_POOLS, rules_for
from xrunner.rules.rra import RraRule
from xrunner.rules.steps import BatchingRule
from xrunner.rules.waa import WaaEncodeRule
from xrunner.transport.comm import Comm
from xrunner.transport.route import pools
from xrunner.world import World, connect


def main(arguments: list[str]) -> int:
    plan = load_plan(Path(arguments[0]))
    return to_the_end(plan, lambda: connect(plan.device_kind), _run)


def _run(plan: RunPlan, world: World) -> None:
    torch.set_num_threads(plan.threads_per_rank)
    schedule = load_schedule(plan.output / "schedule.json")
    _check_fits(schedule, world.comm)
    if world.comm.rank == 0:
        _lead(plan, schedule, world)
    elif world.comm.rank == _decode_head(schedule):
        _lead_decoding(plan, schedule, world)
    else:
        _follow(plan, schedule, world)


def _follow(plan: RunPlan, schedule: Schedule, world: World) -> None:
    """Every rank that is no pool's head: load, then serve its stage until told to stop."""
    clock = Stopwatch()
    loaded = load(plan, schedule, world, clock)
    neighbours = Neighbours(world.comm, loaded.route)
    await_start(neighbours, loaded.executor)
    world.barrier()
    clock.restart()
    serve_stage(neighbours, loaded.executor)
    loaded.executor.close()
    world.gather(report_of(loaded))


def _lead_decoding(plan: RunPlan, schedule: Schedule, world: World) -> None:
    """The first rank of WAA's decode pool; what is done goes to rank 0."""
    clock = Stopwatch()
    loaded = load(plan, schedule, world, clock)
    receiver = loaded.executor.receiver
    assert receiver is not None
    link = FromEncodePool(world.comm, receiver, encode_head=0)
    head = Head(rule=rules_for(schedule.estimate)[1], executor=loaded.executor, sink=link.reports,
                neighbours=Neighbours(world.comm, loaded.route), link=link, clock=clock,
                vocabulary=_vocabulary(plan, loaded))
    head.start()
    world.barrier()
    clock.restart()
    head.run()
    world.comm.flush()
    loaded.executor.close()
    world.gather(report_of(loaded))


def _lead(plan: RunPlan, schedule: Schedule, world: World) -> None:
    """Rank 0: reads the requests, runs the (encode pool's) head, writes everything."""
    queries, num_errors, before = read_work(plan)
    clock, estimate = Stopwatch(), schedule.estimate
    loaded = load(plan, schedule, world, clock)
    sink = RunSink(plan, num_queries=len(queries), before=before)
    rules = rules_for(estimate)
    changeable = rules[0] if isinstance(rules[0], RraRule) else None
    if changeable is not None:
        changeable.make_room(plan.slots)
    head = Head(rule=rules[0], executor=loaded.executor, sink=sink, clock=clock,
                neighbours=Neighbours(world.comm, loaded.route),
                vocabulary=_vocabulary(plan, loaded), link=_link(schedule, rules, world.comm))
    order = order_of(len(queries), plan, before)
    if plan.is_watched:
        sink.watched = WatchedRun(plan.output, rule=changeable, first_query=before.total,
                                 at_work=None if changeable is None else head.lengths_so_far,
                                 order=order if plan.shuffle_window > 1 or before.held else None)
    for place in order:
        query = queries[place]
        assert head.submit(query), f"{query.id = } {query.reserve_tokens = }"
    head.start(spare_bytes=max(estimate.memory_capacity_bytes - max(estimate.memory_bytes), 0))

    def report() -> RankReport:
        loaded.executor.close()
        return report_of(loaded)

    conduct(head, sink, world, clock, report=report, queries_before=before.total,
            num_errors=num_errors)


def _link(schedule: Schedule, rules: Sequence[BatchingRule], comm: Comm) -> Link | None:
    """What ties rank 0's pool to the others."""
    decode_head = _decode_head(schedule)
    if decode_head is None:
        return None
    encode_rule, decode_rule = rules
    assert isinstance(encode_rule, WaaEncodeRule)
    return ToDecodePool(comm, encode_rule, decode_rule, decode_head)


def _vocabulary(plan: RunPlan, loaded: Loaded) -> Vocabulary:
    is_encoder_decoder = loaded.executor.model.spec.is_encoder_decoder
    return Vocabulary(eos_ids=eos_ids(plan.model_dir),
                      decode_text=TextTokenizer(plan.model_dir).decode,
                      start_token=start_token(plan.model_dir) if is_encoder_decoder else None)


def _decode_head(schedule: Schedule) -> int | None:
    """First rank of WAA's decode pool."""
    both = pools(schedule.estimate.stages)
    return None if len(both) == 1 else both[1][0].ranks[0]


def _check_fits(schedule: Schedule, comm: Comm) -> None:
    estimate = schedule.estimate
    if estimate.policy not in EXECUTED:
        raise XgptError(f"policy {estimate.policy!r} cannot be executed; can be: "
                        f"{', '.join(EXECUTED)}")
    roles = [pool[0].role for pool in pools(estimate.stages)]
    expected = ["encode", "decode"] if estimate.policy in TWO_POOLS else ["both"]
    if roles != expected:
        raise XgptError(f"the schedule's stages have the roles {roles}; {estimate.policy} has "
                        f"{expected}")
    ranks = sorted(rank for stage in estimate.stages for rank in stage.ranks)
    if ranks != list(range(comm.size)):
        raise XgptError(f"the schedule's stages have the ranks {ranks}, the launcher started "
                        f"{comm.size}")
    if estimate.stages[0].ranks[0] != 0:
        raise XgptError(f"the schedule's first stage has the ranks {estimate.stages[0].ranks}: "
                        "rank 0 must be its first, since it decides")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
