"""One rank of DeepSpeed-Inference:
`mpiexec -n N python -m mpi4py -m xrunner.engines.deepspeed_worker OUT/run.json`.

All ranks are one tensor-parallel group; rank 0 decides, draws the tokens and writes.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch

from xgpt.core.controls import StaticControls
from xgpt.core.errors import XgptError
from xgpt.core.schedule import Schedule
from xgpt.core.schedule_file import load_schedule
from xrunner.checkpoint.source import read_spec
from xrunner.engine.head import Head
from xrunner.engine.pipeline import Neighbours, RankReport, await_start, serve_stage
from xrunner.engine.query import Vocabulary
from xrunner.engines.auto_tp import load_model, weight_bytes
from xrunner.engines.padded_model import PaddedModel
from xrunner.io.sink import RunSink
from xrunner.io.tokenizer import TextTokenizer, eos_ids
from xrunner.lead import conduct, order_of, read_work
from xrunner.plan import RunPlan, load_plan
from xrunner.rank import Stopwatch, to_the_end
from xrunner.rules.static import static_rule
from xrunner.transport.route import routes
from xrunner.world import World, connect


def main(arguments: list[str]) -> int:
    return to_the_end(load_plan(Path(arguments[0])), connect, run)


def run(plan: RunPlan, world: World) -> None:
    """Everything one rank does."""
    torch.set_num_threads(plan.threads_per_rank)
    schedule = load_schedule(plan.output / "schedule.json")
    _check_fits(schedule, world)
    (_lead if world.comm.rank == 0 else _follow)(plan, schedule, world)


def _lead(plan: RunPlan, schedule: Schedule, world: World) -> None:
    queries, num_errors, before = read_work(plan)
    clock = Stopwatch()
    executor, load_s = _load(plan, world, clock)
    sink = RunSink(plan, num_queries=len(queries), before=before)
    head = Head(
        rule=static_rule(schedule.estimate), executor=executor, sink=sink, clock=clock,
        neighbours=Neighbours(world.comm, routes(schedule.deployment.pools)[0]),
        vocabulary=Vocabulary(eos_ids=eos_ids(plan.model_dir),
                              decode_text=TextTokenizer(plan.model_dir).decode))
    for place in order_of(len(queries), plan, before):
        query = queries[place]
        assert head.submit(query), f"{query.id = } {query.reserve_tokens = }"
    head.start()
    conduct(head, sink, world, clock, report=lambda: _report(plan, 0, executor, load_s),
            queries_before=before.total, num_errors=num_errors)


def _follow(plan: RunPlan, schedule: Schedule, world: World) -> None:
    clock, rank = Stopwatch(), world.comm.rank
    executor, load_s = _load(plan, world, clock)
    neighbours = Neighbours(world.comm, routes(schedule.deployment.pools)[rank])
    await_start(neighbours, executor)
    world.barrier()
    clock.restart()
    serve_stage(neighbours, executor)
    world.gather(_report(plan, rank, executor, load_s))


def _load(plan: RunPlan, world: World, clock: Stopwatch) -> tuple[PaddedModel, float]:
    """(this rank's part, seconds it took)"""
    started_s = clock()
    spec = read_spec(plan.model_dir, plan.model_name)
    model = load_model(plan, world.comm.size, world.barrier)
    load_s = clock() - started_s
    return PaddedModel(model, max_positions=spec.max_positions, clock=clock,
                       gives_answers=world.comm.rank == 0), load_s


def _check_fits(schedule: Schedule, world: World) -> None:
    estimate = schedule.estimate
    if not isinstance(estimate.controls, StaticControls):
        raise XgptError(f"policy {estimate.policy!r}: DeepSpeed works static batches, ft or dsi")
    ranks = [list(stage.ranks) for stage in estimate.deployment.stages]
    if ranks != [list(range(world.comm.size))]:
        raise XgptError(f"the schedule's stages have the ranks {ranks}; DeepSpeed takes the "
                        f"{world.comm.size} that the launcher started as one group")


def _report(plan: RunPlan, rank: int, executor: PaddedModel, load_s: float) -> RankReport:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return RankReport(rank=rank, stage=0, log=tuple(executor.log), busy_s=executor.busy_s,
                      load_s=load_s, bytes_read=weight_bytes(plan.model_dir), rows_compacted=0,
                      peak_memory_bytes=peak)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
