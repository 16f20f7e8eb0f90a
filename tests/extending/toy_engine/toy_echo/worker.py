"""One rank of the engine: `mpiexec -n N python -m mpi4py -m toy_echo.worker OUT/run.json`.

Rank 0 reads the queries from the spool, answers those that no earlier run has answered, and leaves
the run's account; the others have nothing to do.
"""

import sys
from pathlib import Path

from xrunner.files.sink import RunSink
from xrunner.plan import RunPlan, load_plan
from xrunner.query import FinishedQuery
from xrunner.rank.lifecycle import (
    RunOutcome,
    Stopwatch,
    open_requests,
    run_order,
    run_rank,
    write_measured,
)
from xrunner.rank.world import World, connect


def main(arguments: list[str]) -> int:
    return run_rank(load_plan(Path(arguments[0])), connect, _run)


def _run(plan: RunPlan, world: World) -> None:
    if world.comm.rank == 0:
        _answer_all(plan)
    world.barrier()


def _answer_all(plan: RunPlan) -> None:
    queries, num_errors, before = open_requests(plan)
    sink, clock, state = RunSink(plan, num_queries=len(queries), before=before), Stopwatch(), "done"
    for place in run_order(len(queries), plan, before):
        if sink.should_stop():
            state = "stopped"
            break
        query, began_s = queries[place], clock()
        answer = tuple(reversed(query.input_ids))[:query.max_new_tokens]
        sink.finished(FinishedQuery(
            query=query, output_ids=answer, finish_reason="length", text=" ".join(map(str, answer)),
            encode_start_s=began_s, first_token_s=clock(), last_token_s=clock()))
        sink.progress(clock(), sink.tally.output_tokens)
    wall_s = clock()
    sink.close(wall_s, state)
    write_measured(sink.output, RunOutcome(
        state=state, wall_s=wall_s, queries_before=before.total, num_errors=num_errors,
        num_held=sink.num_held), sink.tally, reports=())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
