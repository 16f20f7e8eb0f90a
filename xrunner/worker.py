"""One rank: `mpiexec -n N python -m mpi4py -m xrunner.worker OUT/run.json`.

All ranks run this; what differs is the stage they belong to, and their place in it. `-m mpi4py`
makes an uncaught error on one rank end them all."""

import sys
from functools import partial
from pathlib import Path

import torch

from xgpt.core.errors import XgptError
from xgpt.core.policies import policy
from xgpt.core.schedule import Pool, Schedule
from xgpt.core.schedule_file import load_schedule
from xrunner.engine.head import Head, PoolLink
from xrunner.engine.links import FromEncodePool, ToDecodePool
from xrunner.engine.pipeline import Neighbours, RankReport, await_start, serve_stage
from xrunner.engine.roster import Vocabulary
from xrunner.io.launcher_link import LauncherLink
from xrunner.io.sink import RunSink
from xrunner.io.tokenizer import TextTokenizer, eos_ids, start_token
from xrunner.loading import Loaded, Shelf, load, report_of
from xrunner.plan import RunPlan, load_plan
from xrunner.rank import Stopwatch, conduct, leave, order_of, read_work, to_the_end
from xrunner.rules.rra import RraRule
from xrunner.rules.steps import BatchingRule, EncodingRule, rules_for
from xrunner.transport.comm import Comm
from xrunner.world import World, connect


def main(arguments: list[str]) -> int:
    plan = load_plan(Path(arguments[0]))
    return to_the_end(plan, lambda: connect(plan.device_kind), partial(work, shelf=Shelf()))


def work(plan: RunPlan, world: World, shelf: Shelf) -> None:
    """This rank's part of one run. `shelf`: where its weights are, or will be."""
    torch.set_num_threads(plan.threads_per_rank)
    schedule = load_schedule(plan.output / "schedule.json")
    _check_fits(schedule, world.comm)
    clock = Stopwatch()
    if world.comm.rank == 0:
        _lead(plan, schedule, world, clock, shelf)
        return
    loaded = load(plan, schedule, world, clock, shelf)
    if loaded.route.steps_from is None:
        _lead_decoding(plan, schedule, world, loaded, clock)
    else:
        _follow(world, loaded, clock)
    loaded.executor.close()
    world.gather(report_of(loaded))


def _follow(world: World, loaded: Loaded, clock: Stopwatch) -> None:
    """Every rank that is no pool's head serves its stage until told to stop."""
    neighbours = Neighbours(world.comm, loaded.route)
    await_start(neighbours, loaded.executor)
    world.barrier()
    clock.restart()
    serve_stage(neighbours, loaded.executor)


def _lead_decoding(plan: RunPlan, schedule: Schedule, world: World, loaded: Loaded,
                   clock: Stopwatch) -> None:
    """The first rank of a decode pool is its head; what is done goes to rank 0."""
    receiver = loaded.executor.receiver
    assert receiver is not None
    link = FromEncodePool(world.comm, receiver, encode_head=0)
    head = Head(rule=_rule_of(loaded.pool, schedule), executor=loaded.executor, link=link,
                neighbours=Neighbours(world.comm, loaded.route), sink=link, clock=clock,
                vocabulary=_vocabulary(plan, loaded))
    head.start()
    world.barrier()
    clock.restart()
    head.run()
    world.comm.flush()


def _lead(plan: RunPlan, schedule: Schedule, world: World, clock: Stopwatch,
          shelf: Shelf) -> None:
    """Rank 0 reads the queries, is the first pool's head, and writes everything."""
    queries, num_errors, before = read_work(plan)
    loaded = load(plan, schedule, world, clock, shelf)
    sink = RunSink(plan, num_queries=len(queries), before=before)
    rule = _rule_of(loaded.pool, schedule)
    head = Head(rule=rule, executor=loaded.executor, sink=sink, clock=clock,
                neighbours=Neighbours(world.comm, loaded.route),
                vocabulary=_vocabulary(plan, loaded), link=_link(rule, schedule, world.comm))
    changeable = rule if isinstance(rule, RraRule) else None
    if changeable is not None:
        changeable.make_room(plan.slots)
    order = order_of(len(queries), plan, before)
    if plan.is_watched:
        sink.launcher = LauncherLink(plan.output, rule=changeable, first_query=before.total,
                                  at_work=None if changeable is None else head.lengths_so_far,
                                  order=order if plan.shuffle_window > 1 or before.held else None)
    for place in order:
        query = queries[place]
        assert head.submit(query), f"{query.id = } {query.reserve_tokens = }"
    figures = schedule.figures
    head.start(spare_bytes=max(figures.memory_capacity_bytes - max(figures.memory_bytes), 0))

    def report() -> RankReport:
        loaded.executor.close()
        return report_of(loaded)

    conduct(head, sink, world, clock, report=report, queries_before=before.total,
            num_errors=num_errors)


def _rule_of(pool: Pool, schedule: Schedule) -> BatchingRule:
    names = [other.name for other in schedule.deployment.pools]
    return rules_for(schedule.estimate)[names.index(pool.name)]


def _link(rule: BatchingRule, schedule: Schedule, comm: Comm) -> PoolLink | None:
    """What ties the encode pool of `rule` to the decode pool; None where one pool does both."""
    if len(schedule.deployment.pools) == 1:
        return None
    assert isinstance(rule, EncodingRule), f"{rule = }"
    decode = schedule.deployment.decoding
    return ToDecodePool(comm, rule, _rule_of(decode, schedule), decode.stages[0].ranks[0])


def _vocabulary(plan: RunPlan, loaded: Loaded) -> Vocabulary:
    is_encoder_decoder = loaded.executor.model.spec.is_encoder_decoder
    return Vocabulary(eos_ids=eos_ids(plan.model_dir),
                      decode_text=TextTokenizer(plan.model_dir).decode,
                      start_token=start_token(plan.model_dir) if is_encoder_decoder else None)


def _check_fits(schedule: Schedule, comm: Comm) -> None:
    deployment, name = schedule.deployment, schedule.controls.policy
    roles, expected = [pool.role for pool in deployment.pools], list(policy(name).pools)
    if roles != expected:
        raise XgptError(f"the schedule's stages have the roles {roles}; {name} has {expected}")
    ranks = sorted(rank for stage in deployment.stages for rank in stage.ranks)
    if ranks != list(range(comm.size)):
        raise XgptError(f"the schedule's stages have the ranks {ranks}, the launcher started "
                        f"{comm.size}")
    first = deployment.stages[0].ranks
    if first[0] != 0:
        raise XgptError(f"the schedule's first stage has the ranks {first}: rank 0 must be its "
                        "first, since it decides")


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
