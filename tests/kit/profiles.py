"""Profiles of a toy without measuring: of given points, or on any layout of the cores by a law of
threads."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from xgpt.core.cluster import Device
from xgpt.core.model import ModelSpec
from xprofiler.profile import (
    HANDOVER,
    STEP_OVERHEAD,
    TRANSFER,
    Profile,
    ProfileMetadata,
    Sample,
    TableKey,
)
from xprofiler.roofline import Roofline
from xprofiler.timing import Operator

Law = Callable[[int], float]  # seconds of t threads over those of one
_SIZES = {Operator.ENCODE_ATTENTION: ((5, 40, 130), (1, 4)),
          Operator.DECODE_ATTENTION: ((1, 9, 33, 130), (17, 130, 520)),
          Operator.LAYER_REST: ((1, 9, 33, 130, 700, 2080), (0,)),
          Operator.EMBED: ((1, 130, 2080), (0,)), Operator.HEAD: ((1, 33, 130), (0,)),
          Operator.KV_COMPACTION: ((1, 5), (17, 520))}


def metadata(**changed: Any) -> ProfileMetadata:
    """Of a toy on a processor, measured here."""
    return ProfileMetadata(**{
        "model": "toy", "model_shape": "m", "device": "cpu", "dtype": "float32", "ranks": 1,
        "threads_per_rank": 1, "kernels": "k", "libraries": "torch 2", **changed})


def profile(**tables: Sequence[Sample]) -> Profile:
    """Of the points of each table of one rank."""
    return Profile(metadata=metadata(),
                   tables={TableKey(name): tuple(table) for name, table in tables.items()})


def amdahl(serial: float) -> Law:
    """Threads divide all but this share."""
    return lambda threads: serial + (1 - serial) / threads


def profile_of(model: ModelSpec, ranks: int, threads: int, law: Law, *, dtype: str = "float32",
               spread: float = 0.0) -> Profile:
    """`spread`: between the quartiles of every point, relative."""
    device = Device(name=f"cpu-{threads}c-toy", kind="cpu", memory_bytes=2**33,
                    bandwidth_bytes_per_s=1e10, flops_per_s=(("float32", 1e11),))
    one_core = Roofline(model, device, dtype)
    samples = np.array([1 - spread / 2, 1, 1 + spread / 2]) * law(threads)
    tables = {TableKey(operator.value): tuple(
        Sample(x=x, y=y, samples_s=tuple(samples * float(one_core.operator_s(operator, x, y))))
        for y in ys for x in xs) for operator, (xs, ys) in _SIZES.items()}
    tables[TableKey(STEP_OVERHEAD)] = (Sample(x=0, samples_s=(2e-4,) * 3),)
    if ranks > 1:
        for name in (TRANSFER, HANDOVER):
            tables[TableKey(name, 1, "shared-memory")] = tuple(
                Sample(x=n, samples_s=(2e-5 + n / 5e9,) * 3) for n in (2**10, 2**20))
    return Profile(tables=tables, model=model, metadata=metadata(
        model=model.name, model_shape="toy", device=device.name, dtype=dtype, ranks=ranks,
        threads_per_rank=threads, kernels="", libraries="", is_padded=False))
