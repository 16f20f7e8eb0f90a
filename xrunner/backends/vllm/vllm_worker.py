"""One rank of a run by vLLM, which executes one replica:
`mpiexec -n N python -m mpi4py -m xrunner.backends.vllm.vllm_worker OUT/run.json`.

It does what our own ranks do (xrunner.rank.worker), but that its steps are executed by a vLLM
engine in a process of its own, on all devices of the replica."""

if __name__ == "__main__":  # before what takes seconds to import
    from xgpt.core.system.lifeline import begin_rank

    begin_rank()

import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from xgpt.core.errors import XgptError
from xgpt.core.model import kv_elements_of_rank
from xgpt.core.prefixes import in_blocks
from xgpt.core.schedule import Schedule
from xgpt.core.units import DTYPE_BYTES
from xgpt.requests.spool import Spool
from xrunner.backends.vllm.child import EngineChild
from xrunner.backends.vllm.devices import own_devices
from xrunner.backends.vllm.executor import VllmExecutor
from xrunner.backends.vllm.protocol import FindCalls
from xrunner.backends.vllm.row import TOOL_PARSER, version_in
from xrunner.backends.vllm.settings import EngineSettings, cores_of_each
from xrunner.checkpoint.source import SERVED_BY, read_spec
from xrunner.checkpoint.staging import staged
from xrunner.comm.messages import StartMessage
from xrunner.engine.pipeline import SINGLE_RANK, ExecutorDied, RankReport
from xrunner.files.heartbeat import Heartbeat
from xrunner.plan import RunPlan, load_plan
from xrunner.query import FinishedQuery, ToolCall
from xrunner.rank.lifecycle import Stopwatch, end_process, run_rank
from xrunner.rank.loading import Loaded
from xrunner.rank.worker import work
from xrunner.rank.world import Replica, World, connect, replicas_of


def main(arguments: list[str]) -> int:
    """Runs one rank; returns its exit code."""
    plan = load_plan(Path(arguments[0]))
    # the engine has the other threads
    return run_rank(replace(plan, threads_per_rank=1), connect, partial(work, load=partial(
        load, threads=plan.threads_per_rank)))


def load(plan: RunPlan, schedule: Schedule, world: World, clock: Stopwatch, *,
         threads: int) -> Loaded:
    """Starts this replica's engine, with `threads` for each of its processes on CPUs. Collective.
    Raises XgptError where ranks would use other versions of vLLM or the same devices."""
    rank, replicas = world.comm.rank, replicas_of(schedule.estimate, rank_each=True)
    if len(replicas) != world.comm.size:
        raise XgptError(f"the schedule has {len(replicas)} replicas, a rank each, but the launcher "
                        f"started {world.comm.size}")
    check_versions(plan, world)
    replica, is_cpu = replicas[rank], plan.device_kind == "cpu"
    shape = schedule.estimate.shapes[replica.shape].deployment
    count = shape.devices_per_replica * (threads if is_cpu else 1)
    devices = own_devices(world.share, rank, plan.device_kind, count)
    heartbeat = Heartbeat(plan.output, rank=rank, stage=replica.first_stage,
                          pool=replica.pools[0].name, replica=replica.number,
                          devices=f"{'cores' if is_cpu else 'GPU'} {','.join(devices)}")
    heartbeat.start()
    plan = staged(plan)  # before the engine's time to load begins
    child = EngineChild(plan.engine_python or sys.executable,
                        plan.output / f"replica-{rank}.log", () if is_cpu else devices,
                        cores=[int(core) for core in devices] if is_cpu else (),
                        replica=rank, step_limit_s=plan.stall_timeout_s)
    child.start()  # it imports vLLM meanwhile

    def settings_of(message: StartMessage) -> EngineSettings:
        own = settings(plan, replica, message, shape.stages[0].tp_degree)
        return replace(
            own, stages=[stage.num_layers for stage in shape.stages], cores=cores_of_each(
                [int(core) for core in devices], shape.devices_per_replica, threads)
            if is_cpu else ())

    executor = VllmExecutor(child, plan, settings_of, clock=clock, heartbeat=heartbeat)

    def report() -> RankReport:
        return replace(executor.report(rank, child.start_s, plan.model_dir, executor.peak_bytes,
                                       plan.engine_version),
                       stage=replica.first_stage, replica=replica.number,
                       pool=replica.pools[0].name, restarts=executor.restarts)

    return Loaded(executor, replace(SINGLE_RANK, rank=rank), replica, replica.pools[0],
                  read_spec(plan.model_dir, plan.model_name), report, replicas,
                  may_die=len(replicas) > 1, parsed=_parsed(plan, executor))


def check_versions(plan: RunPlan, world: World) -> None:
    """Raises XgptError, with all nodes at once, where run.engine_python lacks vLLM or has another
    version than the plan's. Collective."""
    try:
        said = " ".join(version_in(plan.engine_python or sys.executable))
    except XgptError as error:
        said = f"{error}"
    found = world.share(f"{socket.gethostname()}\0{said}")
    wrong = {one for one in found if not plan.engine_version.startswith(one.partition("\0")[2])}
    if wrong and world.comm.rank:
        world.barrier()  # until rank 0 has said it, once for all
    if wrong:
        raise XgptError(f"this run was planned for {plan.engine_version}, and there is, by node: "
                        + "; ".join(sorted(one.replace("\0", ": ") for one in wrong)))


def settings(plan: RunPlan, replica: Replica, message: StartMessage,
             tp_degree: int) -> EngineSettings:
    """Settings of vLLM for as many requests as the rule has at once, and prefixes beside them."""
    found = Spool(plan.output).prefixes if plan.shares_prefixes else None
    prefixes = found and in_blocks(found, plan.kv_block_tokens, is_whole=True)
    queries = message.slots * message.num_groups
    most_tokens = queries * message.capacity + (
        0 if prefixes is None else int(prefixes.own_tokens.sum()))
    spec = read_spec(plan.model_dir, plan.model_name)
    return EngineSettings(
        model_dir=plan.model_dir, dtype=plan.dtype, max_queries=queries,
        device_kind=plan.device_kind,
        max_tokens=min(message.capacity + 1, spec.max_positions or message.capacity + 1),
        tp_degree=tp_degree, kv_token_bytes=int(
            kv_elements_of_rank(spec, tp_degree) * spec.num_layers * DTYPE_BYTES[plan.dtype]),
        kv_tokens=min(replica.own.kv_tokens, most_tokens), has_prefixes=prefixes is not None,
        is_random=plan.served_by == SERVED_BY, arguments=plan.engine_args)


def _parsed(plan: RunPlan, executor: VllmExecutor) -> Callable[[FinishedQuery], FinishedQuery]:
    """A function that finds the tool calls in a result, if the job names a parser."""
    parser = plan.engine_args.get(TOOL_PARSER)

    def parsed(result: FinishedQuery) -> FinishedQuery:
        if parser is None or not result.query.tools or result.error is not None:
            return result
        try:
            found = executor.ask(FindCalls(parser, str(plan.model_dir), result.query.tools,
                                           result.output_ids))
        except ExecutorDied as death:
            return replace(result, finish_reason="error", error=f"tool calls: {death}")
        return result if found is None else replace(result, text=found[0], tool_calls=tuple(
            ToolCall(name, arguments) for name, arguments in found[1]))

    return parsed


if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
