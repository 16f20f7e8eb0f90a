"""Generated problems small enough for brute force, for the proof of the search: toy models on
sources with planted defects, on noisy profiles, and the paper's models on the roofline."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

from taken_as_true import TakenAsTrue

from xgpt.core import lengths as lengths_module
from xgpt.core.cluster import Cluster, Device, Link, uniform_cluster
from xgpt.core.constraint import latency_constraint
from xgpt.core.job import FixedSchedule
from xgpt.core.lengths import JointLengths, joint_empirical
from xgpt.core.model import ModelSpec
from xgpt.core.problem import Problem
from xprofiler.roofline import Roofline

FAST = Link(name="fast", bandwidth_bytes_per_s=200e9, latency_s=3e-6)
SLOW = Link(name="slow", bandwidth_bytes_per_s=10e9, latency_s=10e-6)
TOYS = {
    "decoder": ModelSpec(
        name="toy", family="opt", num_layers=6, hidden_size=1024, num_heads=16, vocab_size=8000,
        intermediate_size=4096, max_positions=512, has_learned_positions=True),
    "encoder-decoder": ModelSpec(
        name="toy-t5", family="t5", num_layers=5, num_encoder_layers=5, hidden_size=1024,
        num_heads=16, vocab_size=8000, intermediate_size=4096, max_positions=512)}
truncated_normal = cache(lengths_module.truncated_normal)  # its parent takes milliseconds to solve


def roofline_of(problem: Problem) -> Roofline:
    return TakenAsTrue(problem.model, problem.cluster.device, problem.dtype)


def toy_cluster(*, devices=4, memory=6e8, link=FAST, nodes=1) -> Cluster:
    device = Device(name="toy", kind="gpu", memory_bytes=int(memory), bandwidth_bytes_per_s=4e11,
                    flops_per_s=(("float32", 1e13), ("float16", 5e13)))
    return uniform_cluster(
        name="toy",
        device=device,
        num_nodes=nodes,
        devices_per_node=devices // nodes,
        intra_link=link,
        inter_link=SLOW,
    )


def toy_problem(*, latency_s=math.inf, fixed=None, inputs=(40, 20, 80), outputs=(9, 4, 20),
                num_queries=None, pairs=None, model="decoder", kind="sequence", quantile=0.99,
                encode_chunk=0, **cluster) -> Problem:
    """`encode_chunk`: where `fixed` has none; None: of any size, which no grid here has."""
    fixed = fixed or FixedSchedule()
    if fixed.encode_chunk is None:
        fixed = replace(fixed, encode_chunk=encode_chunk)
    lengths = joint_empirical(pairs) if pairs is not None else JointLengths(
        inputs=truncated_normal(*inputs), outputs=truncated_normal(*outputs))
    return Problem(
        model=TOYS[model], cluster=toy_cluster(**cluster), lengths=lengths, dtype="float16",
        constraint=latency_constraint(latency_s=latency_s, kind=kind, quantile=quantile),
        fixed=fixed, num_queries=num_queries,
        default_max_tokens=lengths.outputs.max)


