"""What every rank of test_exact_runs.py runs: the cases of a file, one after the other, each on as
many of the ranks as its stages have. A case may ask for GPUs (`device`), and for sums over gloo
(`group`). Before them, the checks of ranks_script.py for up to three ranks, where they are named.
Usage: runs_script.py CASES.json ANSWERS.json [mpi|gloo ...]"""

if __name__ == "__main__":  # before what takes seconds to import
    from xgpt.core.system.lifeline import begin_rank

    begin_rank()

import json
import sys
from pathlib import Path
from typing import Any

import ranks_script
import toy_runs
import toys
from mpi4py import MPI

from xgpt.core.deployment import Pool
from xgpt.core.system.lifeline import finish_imports
from xrunner.comm.collective import Group, TorchGroup
from xrunner.comm.handover import LOOK_S
from xrunner.comm.point_to_point import MpiComm, wait_politely
from xrunner.devices import has_own_gpu_each, local_rank, select_device
from xrunner.engine.pipeline import Route, routes
from xrunner.engine.pool_links import ToDecodePool
from xrunner.engine.stage import StageExecutor
from xrunner.models.weights import WHOLE, Shard
from xrunner.rank.world import group_of
from xrunner.rules.rra import RraRule


def run(case: dict[str, Any], comm: Any) -> dict[int, list[int]] | None:
    """The answers, on the first rank."""
    directory, rank = Path(case["directory"]), comm.Get_rank()
    is_waa = "encode" in case
    pools = (toy_runs.waa_pools(directory, case["encode"], case["decode"]) if is_waa
             else [toy_runs.pool_of(toy_runs.stages_of(directory, case["degrees"]))])
    pool, stage = next((p, s) for p in pools for s in p.stages if rank in s.ranks)
    index = stage.ranks.index(rank)
    device = select_device(case.get("device", "cpu"), local_rank(comm))
    group = make_group(case, comm.Split(stage.index, index),
                       is_direct=has_own_gpu_each(comm, device))
    shard = (WHOLE if stage.tp_degree == 1 else
             Shard(index, stage.tp_degree, group.all_reduce, group.gather))
    side: dict[str, Any] = {}
    if is_waa:
        own = toy_runs.transfers_of(pools, toys.spec_of(directory))
        side = toy_runs.couriers(pool.role, MpiComm(comm.Dup(), LOOK_S), own,
                                 toy_runs.ranks_of(pools[1]))
    executor = toy_runs.executor_of(directory, stage, shard, device=device, role=pool.role, **side)
    execute = run_waa if is_waa else run_rra
    answers = execute(case, pools, routes(pools)[rank], MpiComm(comm), executor)
    if isinstance(group, TorchGroup):
        group.close()
    return answers


def make_group(case: dict[str, Any], comm: Any, *, is_direct: bool) -> Group:
    if case.get("group") == "gloo" and comm.Get_size() > 1:
        return TorchGroup(comm, "gloo")
    group = group_of(comm, is_direct=is_direct)
    wanted = case.get("group", type(group).__name__)
    assert comm.Get_size() == 1 or type(group).__name__ == wanted, f"{group = } {wanted = }"
    return group


def run_rra(case: dict[str, Any], pools: list[Pool], route: Route, messages: MpiComm,
            executor: StageExecutor) -> dict[int, list[int]] | None:
    directory = Path(case["directory"])
    if messages.rank > 0:
        toy_runs.serve(messages, route, executor)
        return None
    rule = RraRule(encode_batch=case["encode_batch"], max_active=12, kv_tokens=10_000,
                   decode_iterations=case["decode_iterations"], num_groups=case["num_groups"],
                   encode_chunk=case.get("encode_chunk", 0))
    queries = toys.random_queries(case["queries"])
    sink = toy_runs.lead(directory, messages, route, executor, rule, queries)
    messages.flush()
    return {r.query.index: list(r.output_ids) for r in sink.results}


def run_waa(case: dict[str, Any], pools: list[Pool], route: Route, messages: MpiComm,
            executor: StageExecutor) -> dict[int, list[int]] | None:
    """The same of WAA's two pools."""
    directory = Path(case["directory"])
    decode_head = toy_runs.ranks_of(pools[1])[0]
    rules = toy_runs.toy_waa_rules(len(case["encode"]), encode_batch=case["encode_batch"],
                                   num_groups=case["num_groups"],
                                   encode_chunk=case.get("encode_chunk", 0),
                                   kv_tokens=case.get("kv_tokens", 10_000),
                                   admission=case.get("admission"))
    if messages.rank == 0:
        sink = toy_runs.lead(directory, messages, route, executor, rules[0],
                             toys.random_queries(case["queries"]),
                             link=ToDecodePool(messages, rules[1], decode_head))
        messages.flush()
        return {r.query.index: list(r.output_ids) for r in sink.results}
    if messages.rank == decode_head:
        toy_runs.lead_decoding(directory, messages, route, executor, rules[1])
        messages.flush()
    else:
        toy_runs.serve(messages, route, executor)
    return None


def main() -> None:
    finish_imports()
    world = MPI.COMM_WORLD
    for over in sys.argv[3:]:
        ranks_script.check_sizes(world, over, most=3)
    answers = []
    for case in json.loads(Path(sys.argv[1]).read_text()):
        takes_part = world.Get_rank() < sum(
            case["encode"] + case["decode"] if "encode" in case else case["degrees"])
        comm = world.Split(int(takes_part), world.Get_rank())
        if takes_part:
            answers.append(run(case, comm))
        barrier = world.Ibarrier()  # those left out must not spin on a core meanwhile
        wait_politely(barrier.Test)
    if world.Get_rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps(answers))


main()
