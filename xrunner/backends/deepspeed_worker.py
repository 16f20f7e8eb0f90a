"""One rank of DeepSpeed-Inference:
`mpiexec -n N python -m mpi4py -m xrunner.backends.deepspeed_worker OUT/run.json`.

DeepSpeed's AutoTP divides a Hugging Face model over all ranks, one tensor-parallel group. Rank 0
decides, draws the tokens and writes."""

from __future__ import annotations

if __name__ == "__main__":  # before what takes seconds to import
    from xgpt.core.system.lifeline import begin_rank

    begin_rank()

import fcntl
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from xgpt.core.controls import StaticControls
from xgpt.core.errors import XgptError
from xgpt.core.schedule import Schedule
from xgpt.core.schedule_file import load_schedule
from xgpt.requests.spool import Spool
from xrunner.backends.executor import DecoderOnly
from xrunner.checkpoint.source import cache_dir, read_spec
from xrunner.checkpoint.staging import staged
from xrunner.comm.exchange import broadcast
from xrunner.comm.messages import StartMessage, StepMessage
from xrunner.devices import CPU, peak_memory_bytes
from xrunner.engine.head import Head
from xrunner.engine.pipeline import Neighbours, RankReport, await_start, routes, serve_stage
from xrunner.engine.pool_requests import Vocabulary
from xrunner.files.sink import RunSink
from xrunner.files.tokenizer import TextTokenizer, eos_ids
from xrunner.ops.output_head import WholeScores
from xrunner.ops.sampling import sample
from xrunner.plan import RunPlan, load_plan
from xrunner.query import Sampling
from xrunner.rank.lifecycle import Stopwatch, open_requests, run_head, run_order, run_rank
from xrunner.rank.world import World, connect
from xrunner.rules.static import static_rule
from xrunner.rules.steps import StepKind, set_deadlines

_ALL_REDUCE = "deepspeed_shm_comm"  # the extension that DeepSpeed compiles at first use


def main(arguments: list[str]) -> int:
    """Runs one rank; returns its exit code."""
    return run_rank(load_plan(Path(arguments[0])), connect, run)


def run(plan: RunPlan, world: World) -> None:
    """Runs one rank from start to end."""
    torch.set_num_threads(plan.threads_per_rank)
    schedule = load_schedule(plan.output / "schedule.json")
    _check_fits(schedule, world)
    (_lead if world.comm.rank == 0 else _follow)(plan, schedule, world)


def _lead(plan: RunPlan, schedule: Schedule, world: World) -> None:
    queries, num_errors, before = open_requests(plan)
    clock = Stopwatch()
    executor, load_s = _load(plan, world, clock)
    sink = RunSink(plan, num_queries=len(queries), before=before)
    head = Head(rule=static_rule(schedule.estimate), executor=executor, sink=sink, clock=clock,
                neighbours=Neighbours(world.comm, routes(schedule.deployment.pools)[0]),
                vocabulary=Vocabulary(eos_ids=eos_ids(plan.model_dir),
                                      decode_text=TextTokenizer(plan.model_dir).decode))
    set_deadlines(head.rule, Spool(plan.output).deadlines_s)
    head.requests.on_begin = sink.underway.begin
    for place in run_order(len(queries), plan, before):
        query = queries[place]
        is_taken = head.submit(query)
        assert is_taken, f"{query.id = } {query.reserve_tokens = }"
    head.start()
    run_head(head, sink, world, clock, report=lambda: _report(plan, 0, executor, load_s),
            queries_before=before.total, num_errors=num_errors)


def _follow(plan: RunPlan, schedule: Schedule, world: World) -> None:
    clock, rank = Stopwatch(), world.comm.rank
    executor, load_s = _load(plan, world, clock)
    neighbours = Neighbours(world.comm, routes(schedule.deployment.pools)[rank])
    await_start(neighbours, executor)
    world.barrier()
    clock.restart()
    serve_stage(neighbours, executor)
    world.barrier()
    world.gather(_report(plan, rank, executor, load_s))


def _load(plan: RunPlan, world: World, clock: Stopwatch) -> tuple[PaddedModel, float]:
    """(this rank's part, seconds that loading took)."""
    started_s = clock()
    spec = read_spec(plan.model_dir, plan.model_name)
    model = load_model(staged(plan), world.comm.size, world.barrier)
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
    return executor.report(rank, load_s, plan.model_dir, peak_memory_bytes(CPU))


def join_ranks() -> dict[str, str]:
    """Environment variables that DeepSpeed and torch.distributed need. Collective. mpiexec sets
    none of them. Without LOCAL_SIZE DeepSpeed's all-reduce through shared memory ends in a
    segmentation fault."""
    rank, size, local_rank, local_size = 0, 1, 0, 1
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address, port = probe.getsockname()
    if "mpi4py" in sys.modules:
        from mpi4py import MPI

        world = MPI.COMM_WORLD
        local = world.Split_type(MPI.COMM_TYPE_SHARED)
        rank, size = world.Get_rank(), world.Get_size()
        local_rank, local_size = local.Get_rank(), local.Get_size()
        address, port = broadcast(
            world, (socket.gethostname() if local_size < size else address, port), tuple[str, int])
    return {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(local_rank),
            "LOCAL_SIZE": str(local_size), "MASTER_ADDR": address, "MASTER_PORT": str(port),
            "DS_ACCELERATOR": "cpu", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}


def load_model(plan: RunPlan, ranks: int, barrier: Callable[[], None]) -> Any:
    """This rank's slices of the model. Collective. Each rank reads the whole model first, since
    AutoTP divides a loaded one."""
    os.environ.update(join_ranks())
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(cache_dir() / "torch_extensions"))
    import deepspeed
    from transformers import AutoModelForCausalLM

    if ranks > 1:
        _compile(Path(os.environ["TORCH_EXTENSIONS_DIR"]), barrier)
    dtype = getattr(torch, plan.dtype)
    whole = AutoModelForCausalLM.from_pretrained(
        plan.model_dir, dtype=dtype, local_files_only=True, trust_remote_code=False)
    engine = deepspeed.init_inference(whole, tensor_parallel={"tp_size": ranks}, dtype=dtype)
    barrier()
    if os.environ["RANK"] == "0":
        _forget_shared_memory()
    return engine.module.eval()


def _compile(folder: Path, barrier: Callable[[], None]) -> None:
    """Compiles DeepSpeed's all-reduce on the first rank of each host, unless it is there. torch
    would wait for ever for the lock file of a killed run. It is removed under a lock that ends with
    its process."""
    from deepspeed.accelerator import get_accelerator

    if os.environ["LOCAL_RANK"] == "0":
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / ".xgpt-lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            for stale in folder.glob(f"{_ALL_REDUCE}/lock"):
                stale.unlink(missing_ok=True)
            get_accelerator().create_op_builder("ShareMemCommBuilder").load()
    barrier()


def _forget_shared_memory() -> None:
    """Removes the names of DeepSpeed's shared memory, which it would leave; call it after loading.
    The ranks hold the memory itself while they live."""
    names = "deepspeed_allreduce_buffer_*_{MASTER_ADDR}_{MASTER_PORT}_*".format(**os.environ)
    for path in Path("/dev/shm").glob(names):
        path.unlink(missing_ok=True)


@dataclass(slots=True)
class _PaddedRows:
    """One group's part of a batch. W: tokens of its longest input and of its outputs so far."""

    phase: int
    cache: Any  # transformers' DynamicCache with W entries a row
    mask: Tensor  # [rows, W], 0 where a row is padded
    positions: list[int]  # tokens of each row so far
    choices: list[Sampling]


class PaddedModel(DecoderOnly):
    """A model that every rank calls with the same inputs."""

    def __init__(self, model: Any, *, max_positions: int | None, gives_answers: bool = True,
                 clock: Callable[[], float] = time.perf_counter) -> None:
        """`gives_answers`: whether this rank draws the tokens (only the first one does)."""
        super().__init__(clock)
        self._model, self._max_positions = model, max_positions
        self._gives_answers = gives_answers
        self._groups: dict[int, _PaddedRows] = {}

    def start(self, message: StartMessage) -> None:
        """Clears the groups; transformers' caches grow by themselves."""
        self._groups.clear()

    @torch.inference_mode()
    def execute(self, message: StepMessage, inputs: Tensor) -> Tensor | None:
        """Next token of each request, [n]; None on ranks that draw none. `inputs`: tokens of
        joining requests one after the other [T], or the last token of each row [n]."""
        start_s = self._clock()
        is_encode = message.kind is StepKind.ENCODE
        out = (self._encode if is_encode else self._decode)(message, inputs)
        queries = len(message.joined) if is_encode else len(inputs)
        self.record(message, queries, len(inputs), start_s)
        return out

    def _encode(self, message: StepMessage, inputs: Tensor) -> Tensor | None:
        lengths = [joined.input_tokens for joined in message.joined]
        choices = [joined.sampling for joined in message.joined]
        ids, mask = padded_left(inputs, lengths)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        out = self._model(input_ids=ids, attention_mask=mask, position_ids=positions,
                          use_cache=True, logits_to_keep=1)
        rows = _PaddedRows(message.phase, out.past_key_values, mask, lengths, choices)
        before = self._groups.get(message.group)
        if before is not None and before.phase == message.phase:
            rows = _together(before, rows)
        self._groups[message.group] = rows
        return self._sample(out.logits, choices, lengths)

    def _decode(self, message: StepMessage, inputs: Tensor) -> Tensor | None:
        rows = self._groups[message.group]
        assert rows.phase == message.phase and len(inputs) == len(rows.positions), f"{message = }"
        rows.mask = pad(rows.mask, (0, 1), value=1)
        positions = torch.tensor(rows.positions)
        if self._max_positions is not None:
            # only a finished row of an unfinished batch gets this far
            positions = positions.clamp(max=self._max_positions - 1)
        out = self._model(input_ids=inputs[:, None], attention_mask=rows.mask,
                          position_ids=positions[:, None], past_key_values=rows.cache,
                          use_cache=True, logits_to_keep=1)
        rows.cache = out.past_key_values
        rows.positions = [position + 1 for position in rows.positions]
        return self._sample(out.logits, rows.choices, rows.positions)

    def _sample(self, logits: Tensor, choices: Sequence[Sampling],
                positions: Sequence[int]) -> Tensor | None:
        """Tokens [n] drawn from logits [n, 1, V]; None on ranks that draw none."""
        return sample(
            WholeScores(logits[:, -1]), choices, positions) if self._gives_answers else None


def padded_left(inputs: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Tokens and mask, both [rows, longest], of packed tokens [T]."""
    width = max(lengths)
    ids = torch.zeros((len(lengths), width), dtype=torch.long)
    mask = torch.zeros_like(ids)
    end = 0
    for row, length in enumerate(lengths):
        begin, end = end, end + length
        ids[row, width - length:] = inputs[begin:end]
        mask[row, width - length:] = 1
    return ids, mask


def _together(first: _PaddedRows, second: _PaddedRows) -> _PaddedRows:
    """Two parts of a group, encoded one after the other, as one; the narrower is padded."""
    width = max(first.mask.shape[1], second.mask.shape[1])
    for mine, other in zip(first.cache.layers, second.cache.layers, strict=True):
        mine.keys = torch.cat([_wider(mine.keys, width), _wider(other.keys, width)])
        mine.values = torch.cat([_wider(mine.values, width), _wider(other.values, width)])
    masks = [pad(rows.mask, (width - rows.mask.shape[1], 0)) for rows in (first, second)]
    return _PaddedRows(first.phase, first.cache, torch.cat(masks),
                       first.positions + second.positions, first.choices + second.choices)


def _wider(entries: Tensor, width: int) -> Tensor:
    """KV [rows, heads, W, head_dim], padded on the left to `width`."""
    return pad(entries, (0, 0, width - entries.shape[2], 0))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
