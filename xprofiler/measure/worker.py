"""One measuring rank: `mpiexec -n R python -m mpi4py -m xprofiler.measure.worker REQUEST.json`.

Every rank times the same point at the same time; a point's samples are those of all ranks.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from xgpt.model import ModelSpec
from xprofiler.measure.host import head_overhead
from xprofiler.measure.operators import LayerBench
from xprofiler.measure.timer import time_samples
from xprofiler.profile import SPREAD_LIMIT, Grid, Profile, ProfileMetadata, Sample, save_profile
from xprofiler.timing import Operator
from xrunner.comm import MpiComm
from xrunner.messages import TokensMessage

# Dense where kernels change regime (a few rows to a few dozen), sparse where cost is linear. Not
# the powers of two: kernels tile by them and are up to a tenth quicker there than at the sizes
# between, which are what a run meets.
_ROWS = (1, 2, 3, 5, 7, 10, 14, 19, 27, 38, 53, 75, 105, 150, 210, 300, 430, 610, 900, 1350, 2000)
_LENGTHS = (5, 18, 35, 70, 135, 265, 520)
_BATCHES = (1, 2, 3, 5, 9, 17, 33, 66)
_CONTEXTS = (17, 65, 130, 260, 520)
_TRANSFER_BYTES = (2**10, 2**14, 2**17, 2**20, 2**22)
GRID: dict[Operator, tuple[tuple[int, ...], tuple[int, ...]]] = {
    Operator.ENCODE_ATTENTION: (_LENGTHS, (0,)),
    Operator.DECODE_ATTENTION: (_BATCHES, _CONTEXTS),
    Operator.EMBED: ((1, 15, 130, 1000), (0,)),
    Operator.HEAD: ((1, 2, 3, 5, 7, 10, 14, 19, 27, 38, 53, 75, 130), (0,)),
}
_ATTEMPTS = 3
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
        progress(done, len(points) + len(_ROWS))
        work, calls = bench.operator(op, x, y)
        tables[op.value].append(_quietest(
            world, partial(time_samples, work, calls), x, y))
    for done, rows in enumerate(_ROWS):
        progress(len(points) + done, len(points) + len(_ROWS))
        tables.setdefault(Operator.LAYER_REST.value, []).append(
            _layer_rest(bench, rows, tables, world))
    if world is not None and world.Get_size() > 1:
        tables["transfer"] = [_transfer(world, n) for n in _TRANSFER_BYTES]
    tables["step_overhead"] = [_quietest(world, head_overhead, 0, 0)]
    progress(len(points) + len(_ROWS), len(points) + len(_ROWS))
    return Profile(metadata=metadata, tables={k: tuple(v) for k, v in tables.items()})


def _layer_rest(bench: LayerBench, rows: int, tables: dict[str, list[Sample]],
                world: Any) -> Sample:
    """A real step of `rows` tokens, less its attention and embedding, a layer's share of it."""
    work, lengths = bench.step(rows)
    whole = _quietest(world, lambda: time_samples(work), rows, 0)

    def table(operator: Operator, x: ArrayLike, y: ArrayLike = 0.0) -> float:
        return float(np.sum(Grid(tables[operator.value])(np.asarray(x, float),
                                                         np.asarray(y, float))))

    attention_s = (table(Operator.ENCODE_ATTENTION, lengths) if lengths else
                   table(Operator.DECODE_ATTENTION, rows, bench.step_context + 1))
    embed_s = table(Operator.EMBED, rows)
    return Sample(x=rows, y=0, samples_s=tuple(
        max((s - embed_s) / bench.num_layers - attention_s, 0.0) for s in whole.samples_s))


def _is_possible(spec: ModelSpec, op: Operator, x: int, y: int) -> bool:
    longest = {Operator.ENCODE_ATTENTION: x, Operator.DECODE_ATTENTION: y + 1}.get(op, 0)
    return spec.max_positions is None or longest <= spec.max_positions


def _quietest(world: Any, measure: Callable[[], tuple[float, ...]], x: int, y: int) -> Sample:
    """The point, measured again where its samples disagree; the least disturbed attempt counts."""
    attempts: list[Sample] = []
    for _ in range(_ATTEMPTS):
        attempts.append(Sample(x=x, y=y, samples_s=_together(world, measure)))
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
