"""One measuring rank: `mpiexec -n R python -m mpi4py -m xprofiler.measure.worker REQUEST.json`.

Every rank times the same point at the same time; a point's samples are those of all ranks. The
profile is saved as it grows: a stopped measurement continues after its last point.
"""

if __name__ == "__main__":  # before what takes seconds to import
    from xgpt.core.system.lifeline import begin_rank

    begin_rank()

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from xgpt.core.errors import XgptError
from xgpt.core.model import ModelSpec, model_from_dict
from xgpt.core.system.lifeline import finish_imports
from xprofiler.measure.bench import (
    DRAWN,
    GREEDY,
    LEAST_LAYERS,
    LayerBench,
    contexts_of_mean,
    contexts_up_to,
    few_layers,
    layers_for,
    ordinary_inputs,
)
from xprofiler.measure.network import Subject, find_nodes, measure_network
from xprofiler.measure.probe import Capturing, measure_peaks
from xprofiler.measure.ranks import Disturbance, Ranks, connect, select_device
from xprofiler.measure.recorder import Recorder
from xprofiler.measure.streaming import times_below
from xprofiler.points import Kind, Needs, Point, points_to_repeat, quick_points, skeleton
from xprofiler.profile import ALL_REDUCE, TRANSFER, Peaks, Profile, ProfileMetadata, TableKey
from xprofiler.profile_file import load_profile, save_profile
from xprofiler.timing import Operator
from xrunner.devices import has_own_gpu_each
from xrunner.engine.graphs import CudaCapture

_COMPACTIONS = 5  # chosen: samples per rank of a compaction
_SAVE_EVERY_S = 2.0
_ATTENTION_LAYERS = 2  # chosen: layers of a step that is timed for its attention alone
# chosen: KV cache of a quick profile's decode step (allocating it takes longer than the step)
_QUICK_KV_BYTES = 2**28


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureRequest:
    """Request of the launcher to measure a profile; its fields are those of REQUEST.json."""

    metadata: dict[str, Any]
    model: dict[str, Any]
    refused: dict[str, str]
    degrees: list[int]
    needs: dict[str, Any]  # sizes to cover (`Needs`)
    own: dict[str, Any]  # sizes of the job itself (`Needs`)
    is_quick: bool  # few points, each measured briefly
    patience_s: float  # seconds to spend waiting for other programs and re-measuring
    near: str  # names of the links inside a node and between nodes
    far: str
    target: str  # path of the profile
    progress: str  # path of the file that gets the share done and the seconds left
    stop: str  # path of a file whose existence asks to stop
    ranks: int  # that measure
    captures: bool = True  # whether a run captures decode steps on GPUs
    offload: str = ""  # a folder on the disk below the devices, where the job needs it
    # for another engine: model folder, its own arguments, kind of device
    engine: dict[str, Any] = field(default_factory=dict)


def main(arguments: list[str]) -> int:
    """Measures as the request file `arguments[0]` says; returns the exit code."""
    finish_imports()
    request = MeasureRequest(**json.loads(Path(arguments[0]).read_text(encoding="utf-8")))
    ranks = connect(request.ranks, float(request.metadata["sharing"]))
    torch.set_num_threads(int(request.metadata["threads_per_rank"]))
    with torch.inference_mode():
        Measuring(request, ranks).run()
    return 0


class Measuring:
    """Measures the points of a request, together with the other ranks."""

    def __init__(self, request: MeasureRequest, ranks: Ranks) -> None:
        self.request, self._ranks = request, ranks
        metadata, spec = ProfileMetadata(**request.metadata), model_from_dict(request.model)
        target = Path(request.target)
        known = load_profile(target) if target.is_file() else Profile(
            metadata=metadata, tables={}, model=spec)
        refused = {**known.refused, **{int(k): v for k, v in request.refused.items()}}
        known = replace(known, refused=refused)
        self._spec, self._dtype = spec, getattr(torch, metadata.dtype)
        self._weight_dtype = getattr(torch, metadata.weight_dtype)
        self._device = self.device_of(metadata.device)
        self._subject = Subject(spec=spec, dtype=self._dtype, device=self._device,
                                weight_dtype=self._weight_dtype)
        self._known, self._recorder = known, Recorder(known)
        self._sampling = DRAWN if metadata.sampling == "drawn" else GREEDY
        self.begin_s = self._saved_s = time.monotonic()
        self._left = 0.0  # effort of points still to measure
        is_cpu = self._device.type == "cpu"
        # as in a run, which captures nothing where ranks share a GPU
        self._captures = request.captures and self._device.type == "cuda" and (
            ranks.world is None or has_own_gpu_each(ranks.world, self._device))
        self._watch = Disturbance(ranks, request.patience_s) if is_cpu else None

    def device_of(self, name: str) -> torch.device:
        """This rank's device of that name."""
        return select_device(name, self._ranks)

    def run(self) -> None:
        """Measures peaks, messages and points, and saves the profile."""
        if self._known.peaks is None and not self.request.is_quick:
            self._measure_peaks()
        self.add_network()
        if self.request.offload and self._known.serial_share is None:
            for key, x, y, seconds in times_below(self._subject, self.request.offload, self._ranks):
                self._recorder.add(key, x, y, seconds)
        points, degrees = _points(self.request, self._spec), self.request.degrees
        again = {d: points_to_repeat(self._known, d, points) for d in degrees}
        todo = [(d, p) for d in degrees for p in points
                if not self._recorder.has(p, d) or p in again[d]]
        self._total = self._left = sum(effort(p) for _, p in todo)
        self._worked_s = 0.0  # seconds spent on points
        self._measure_points(todo)
        self._save(force=True)

    def bench_of(self, degree: int) -> LayerBench:
        """The bench that executes this degree's points; for a quick profile with few layers."""
        spec, ranks = self._spec, self._known.metadata.ranks
        if self.request.is_quick:
            spec = few_layers(spec, self._dtype, degree, stages=ranks)
        bench = LayerBench(spec, self._dtype, tp_degree=degree, num_stages=ranks,
                           device=self._device, sampling=self._sampling,
                           weight_dtype=self._weight_dtype)
        if self._captures and not spec.is_encoder_decoder and (
                self._recorder.has_captured(degree) is not False):
            bench.capturing = Capturing(CudaCapture(self._device))
        return bench

    def _measure_points(self, todo: Sequence[tuple[int, Point]]) -> None:
        """Measures the (degree, point) pairs, one degree after the other, until asked to stop."""
        for degree in dict.fromkeys(own for own, _ in todo):
            bench = self.bench_of(degree)
            for point in [point for own, point in todo if own == degree]:
                if self._ranks.agree(Path(self.request.stop).exists()):
                    return
                begin_s = time.monotonic()
                self._measure(bench, degree, point)
                self._worked_s += time.monotonic() - begin_s
                self._left -= effort(point)
                self._save()

    def _measure(self, bench: LayerBench, degree: int, point: Point) -> None:
        if point.kind is Kind.COMPACTION:
            move = bench.compaction(point.x, point.y)
            move()
            seconds = self._ranks.measure_all(lambda: [move() for _ in range(_COMPACTIONS)])
            self._recorder.add(TableKey(Operator.KV_COMPACTION.value, degree), point.x, point.y,
                               seconds)
            return
        lengths = _lengths(point, self._spec.max_positions, self._known.metadata.is_padded)
        is_decode = point.kind in (Kind.DECODE, Kind.CROSS)
        rows = len(lengths) if is_decode else sum(lengths)
        most_layers = self.most_layers(bench, point)
        take = bench.decode if is_decode else bench.encode
        steps = self._ranks.measure_step(take(lengths, most_layers=most_layers),
                                         is_brief=self.request.is_quick, watch=self._watch,
                                         is_warm=self._device.type == "cpu")
        if point.kind is Kind.DECODE and _captures_no_more(self._ranks, bench):
            before = [p for p in self._recorder.done(degree) if p.kind is Kind.DECODE]
            self._recorder.forget_decoded(degree)
            for one in (*before, point):
                self._measure(bench, degree, one)
            return
        self._recorder.add_step(point, degree, rows, len(lengths), steps,
                                min(bench.num_layers, most_layers or bench.num_layers))

    def most_layers(self, bench: LayerBench, point: Point) -> int | None:
        """Number of layers that a step executes; None: all of the bench."""
        if point.kind is Kind.ENCODE:
            return _ATTENTION_LAYERS
        if not self.request.is_quick or self._spec.is_encoder_decoder:
            return None
        if point.kind is Kind.REST:
            return layers_for(point.x)
        return max(_QUICK_KV_BYTES // bench.layer_kv_bytes(point.x, point.y), LEAST_LAYERS)

    def _measure_peaks(self) -> None:
        self._ranks.barrier()
        peaks = self._ranks.gather(measure_peaks(self._dtype, self._device), Peaks)
        # a disturbed rank must not make the device look smaller than it is
        best = Peaks(flops_per_s=max(p.flops_per_s for p in peaks), source=peaks[0].source,
                     bandwidth_bytes_per_s=max(p.bandwidth_bytes_per_s for p in peaks))
        self._recorder = Recorder(replace(self._known, peaks=best))

    def add_network(self) -> None:
        """Measures messages and all-reduces between the ranks, where the profile lacks them."""
        request, ranks, nodes = self.request, self._ranks, self._known.metadata.nodes
        if ranks.size == 1 or all(map(self._recorder.has_network,
                                      messages_between(request, ranks.size, nodes))):
            return
        if nodes > 1 and not find_nodes(ranks.world).is_split:
            raise XgptError(f"the profile is to be of {nodes} nodes, and MPI finds all ranks on "
                            "one: no transfer over the network can be timed")
        self._recorder.add_network(measure_network(
            ranks.world, self._subject, near=request.near, far=request.far,
            degrees=tuple(d for d in request.degrees if d <= ranks.size)))

    def _save(self, *, force: bool = False) -> None:
        now = time.monotonic()
        if self._ranks.rank != 0 or (now - self._saved_s < _SAVE_EVERY_S and not force):
            return
        self._saved_s = now
        spent_s = self._known.spent_s + now - self.begin_s
        save_profile(self._recorder.profile(spent_s=spent_s), Path(self.request.target))
        done = 1 - self._left / self._total if self._total else 1.0
        # 0 if stopped before the first point: nothing is known then
        left_s = self._worked_s * (1 / done - 1) if done > 0 else 0.0
        Path(self.request.progress).write_text(f"{done:.3f} {left_s:.1f}\n", encoding="utf-8")


def _points(request: MeasureRequest, spec: ModelSpec) -> list[Point]:
    """Points to measure, those of a quick profile first."""
    needs = Needs(**request.needs)
    quick = quick_points(spec, needs, Needs(**request.own))
    return quick if request.is_quick else sorted(
        skeleton(spec, needs), key=lambda point: point not in quick)


def effort(point: Point) -> float:
    """Rough duration of a point in units of a quick one."""
    match point.kind:
        case Kind.REST:
            return 1 + point.x / 110
        case Kind.ENCODE | Kind.ENCODER:
            return 1 + point.x * point.y / 700
        case _:
            return 1 + point.x * (point.y + 130) / 20_000


def messages_between(request: MeasureRequest, ranks: int, nodes: int) -> list[TableKey]:
    """Keys of the message tables that a whole profile of these ranks on these nodes has."""
    is_near = ranks > nodes  # some node has two ranks
    transfers = [request.near] * is_near + [request.far] * (nodes > 1)
    return [*(TableKey(TRANSFER, 1, link) for link in transfers),
            *(TableKey(ALL_REDUCE, d, request.near) for d in request.degrees
              if 1 < d <= ranks // nodes)]


def _captures_no_more(ranks: Ranks, bench: LayerBench) -> bool:
    """Whether any rank has just failed to capture a step; then stops capturing on all ranks."""
    if not isinstance(bench, LayerBench) or (
            bench.capturing is None and bench.capture_failure is None):
        return False  # on every rank, or on none
    failures = [why for why in ranks.gather(bench.capture_failure or "", str) if why]
    bench.capture_failure = None
    if failures:
        bench.capturing = None
        print("decode steps are timed kernel by kernel, as one could not be captured: "
              f"{failures[0]}", file=sys.stderr)
    return bool(failures)


def _lengths(point: Point, most: int | None, is_padded: bool) -> list[int]:
    """Tokens cached before a decode step, or input lengths of an encode step, by request. `most`:
    the model's positions. A decode point's y is the longest context where attention is padded to
    it, else the mean."""
    if point.kind in (Kind.DECODE, Kind.CROSS):
        # the token decoded is read too
        contexts = contexts_up_to if is_padded else contexts_of_mean
        return contexts(point.x, point.y - 1)
    return ordinary_inputs(point.x, most) if point.kind is Kind.REST else [point.x] * point.y


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
