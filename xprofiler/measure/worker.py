"""One measuring rank: `mpiexec -n R python -m mpi4py -m xprofiler.measure.worker REQUEST.json`.

Every rank times the same point at the same time; a point's samples are those of all ranks.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from xgpt.model import ModelSpec
from xgpt.schedule import StageAssignment
from xprofiler.measure.operators import LayerBench
from xprofiler.measure.timer import time_samples
from xprofiler.profile import (
    SPREAD_LIMIT,
    Profile,
    ProfileMetadata,
    ProfileTiming,
    Sample,
    save_profile,
)
from xprofiler.timing import Operator
from xrunner.comm import MpiComm
from xrunner.messages import Joined, StepMessage, TokensMessage
from xrunner.models.stage_model import StageModel
from xrunner.models.weights import RandomWeights
from xrunner.rules.steps import StepKind
from xrunner.sampling import Sampling
from xrunner.stage import StageExecutor

# Dense where kernels change regime (a few rows to a few dozen), sparse where cost is linear.
_ROWS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024)
_LENGTHS = (4, 16, 32, 64, 128, 256, 512)
_BATCHES = (1, 2, 4, 8, 16, 32, 64)
_CONTEXTS = (16, 64, 128, 256, 512)
_TRANSFER_BYTES = (2**10, 2**14, 2**17, 2**20, 2**22)
GRID: dict[Operator, tuple[tuple[int, ...], tuple[int, ...]]] = {
    Operator.LAYER_REST: (_ROWS, (0,)),
    Operator.ENCODE_ATTENTION: (_LENGTHS, (0,)),
    Operator.DECODE_ATTENTION: (_BATCHES, _CONTEXTS),
    Operator.EMBED: ((1, 16, 128, 1024), (0,)),
    Operator.HEAD: ((1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 128), (0,)),
}
_ATTEMPTS = 3
_OVERHEAD_STEPS = 8
_PAUSE_S = 0.02  # lets ranks that finished a point early stop spinning in the next barrier


def main(arguments: list[str]) -> int:
    request = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    metadata = ProfileMetadata(**request["metadata"])
    scaling = request["model"].pop("rope_scaling", None)
    spec = ModelSpec(**request["model"],
                     rope_scaling=tuple(tuple(p) for p in scaling) if scaling else None)
    torch.set_num_threads(metadata.threads_per_rank)
    world = _world(metadata.ranks)
    progress = _progress_writer(world, Path(request["progress"]))
    with torch.inference_mode():
        profile = _measure(spec, metadata, world, progress)
    if world is None or world.Get_rank() == 0:
        save_profile(profile, Path(request["target"]))
    return 0


def _measure(spec: ModelSpec, metadata: ProfileMetadata, world: Any,
             progress: Callable[[int, int], None]) -> Profile:
    bench = LayerBench(spec, getattr(torch, metadata.dtype), metadata.ranks)
    points = [(op, x, y) for op, (xs, ys) in GRID.items() for y in ys for x in xs
              if _is_possible(spec, op, x, y)]
    tables: dict[str, list[Sample]] = {op.value: [] for op in GRID}
    for done, (op, x, y) in enumerate(points):
        progress(done, len(points))
        work, calls = bench.operator(op, x, y)
        tables[op.value].append(_quietest(world, work, calls, x, y))
    if world is not None and world.Get_size() > 1:
        tables["transfer"] = [_transfer(world, n) for n in _TRANSFER_BYTES]
    tables["step_overhead"] = [_step_overhead(bench, tables, metadata, world)]
    progress(len(points), len(points))
    return Profile(metadata=metadata, tables={k: tuple(v) for k, v in tables.items()})


def _is_possible(spec: ModelSpec, op: Operator, x: int, y: int) -> bool:
    longest = {Operator.ENCODE_ATTENTION: x, Operator.DECODE_ATTENTION: y + 1}.get(op, 0)
    return spec.max_positions is None or longest <= spec.max_positions


def _quietest(world: Any, work: Callable[[], object], calls: int, x: int, y: int) -> Sample:
    """The point, measured again where its samples disagree; the least disturbed attempt counts."""
    attempts: list[Sample] = []
    for _ in range(_ATTEMPTS):
        samples = _together(world, lambda: time_samples(work))
        attempts.append(Sample(x=x, y=y, samples_s=tuple(s / calls for s in samples)))
        if attempts[-1].spread <= SPREAD_LIMIT:
            break
    return min(attempts, key=lambda sample: sample.spread)


def _together(world: Any, measure: Callable[[], tuple[float, ...]]) -> tuple[float, ...]:
    """Samples of all ranks, measured at the same time."""
    if world is None:
        return measure()
    world.Barrier()
    samples = measure()
    time.sleep(_PAUSE_S)
    return tuple(s for each in world.allgather(samples) for s in each)


def _transfer(world: Any, num_bytes: int) -> Sample:
    """One-way time of a step's header and tensor between neighbours, by ping-pong."""
    comm = MpiComm(world)
    rank, pairs = comm.rank, comm.size // 2
    tensor = torch.zeros(num_bytes, dtype=torch.uint8)
    header = TokensMessage(group=0)

    def ping_pong() -> None:
        if rank % 2 == 0:
            comm.send(rank + 1, header, tensor)
            comm.receive(rank + 1)
        else:
            comm.receive(rank - 1)
            comm.send(rank - 1, header, tensor)

    samples: tuple[float, ...] = ()
    if rank < 2 * pairs:
        rounds = []
        for _ in range(25):
            start = time.perf_counter()
            ping_pong()
            rounds.append((time.perf_counter() - start) / 2)
        samples = tuple(rounds[5:])
        comm.flush()
    gathered = [s for each in world.allgather(samples) for s in each]
    return Sample(x=num_bytes, y=0, samples_s=tuple(gathered))


def _step_overhead(bench: LayerBench, tables: dict[str, list[Sample]], metadata: ProfileMetadata,
                   world: Any) -> Sample:
    """What a whole decode step of a stage takes beyond the sum of its operators (cache tables,
    mask, bookkeeping): so that the sum predicts what the runner really does."""
    full = {name: tuple(points) for name, points in tables.items()}
    zero = (Sample(x=0, y=0, samples_s=(0.0,)),)
    timing = ProfileTiming(Profile(metadata=metadata, tables={**full, "step_overhead": zero}))
    residuals: list[float] = []
    longest = bench.spec.max_positions or _CONTEXTS[-1]
    for queries, context in ((1, 32), (4, 64), (8, 96), (16, 128)):
        context = min(context, longest - _OVERHEAD_STEPS)
        measured = _together(world, partial(_decode_steps, bench, queries, context))
        layer_s = (timing.operator_s(Operator.LAYER_REST, queries)
                   + timing.operator_s(Operator.DECODE_ATTENTION, queries, context))
        expected_s = bench.num_layers * layer_s + timing.operator_s(Operator.EMBED, queries)
        residuals.append(max(statistics.median(measured) - float(expected_s), 0.0))
    return Sample(x=0, y=0, samples_s=tuple(residuals))


def _decode_steps(bench: LayerBench, queries: int, context: int,
                  steps: int = _OVERHEAD_STEPS) -> tuple[float, ...]:
    """Seconds of real decode steps of an executor that already holds `queries` queries."""
    stage = StageAssignment(index=0, ranks=(0,), first_layer=0, num_layers=bench.num_layers)
    model = bench.model if not bench.model.is_last else StageModel(
        bench.spec, RandomWeights(bench.dtype), stage, bench.dtype)
    executor = StageExecutor(model, 1)
    joined = tuple(Joined(query=i, input_tokens=context - steps // 2,
                          reserve_tokens=context + steps, sampling=Sampling())
                   for i in range(queries))
    tokens = torch.ones(queries * (context - steps // 2), dtype=torch.long)
    executor.execute(StepMessage(kind=StepKind.ENCODE, group=0, phase=0, iteration=0,
                                 joined=joined), tokens)
    times = []
    for iteration in range(1, steps + 1):
        start = time.perf_counter()
        executor.execute(StepMessage(kind=StepKind.DECODE, group=0, phase=0, iteration=iteration),
                         torch.ones(queries, dtype=torch.long))
        times.append(time.perf_counter() - start)
    return tuple(times[2:])


def _world(ranks: int) -> Any:
    """COMM_WORLD, or None for a single rank started without a launcher."""
    if "mpi4py" not in sys.modules:
        assert ranks == 1, f"{ranks = } without MPI"
        return None
    from mpi4py import MPI

    assert MPI.COMM_WORLD.Get_size() == ranks, f"{MPI.COMM_WORLD.Get_size() = } {ranks = }"
    return MPI.COMM_WORLD


def _progress_writer(world: Any, path: Path) -> Callable[[int, int], None]:
    is_root = world is None or world.Get_rank() == 0

    def write(done: int, total: int) -> None:
        if is_root:
            path.write_text(f"{done} {total}\n", encoding="utf-8")

    return write


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
