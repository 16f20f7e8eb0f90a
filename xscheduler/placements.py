"""Placements: options that a job leaves open, and the shares of a block in whole tensors and
requests."""

from dataclasses import replace

import numpy as np

from xgpt.core.lengths import FloatArray
from xgpt.core.placement import AskedPlacement, Placement, Shares
from xgpt.core.problem import Problem
from xscheduler.block_program import Choice, Solution
from xscheduler.placed_programs import Programs

ROUNDS = 4  # chosen: programs that are solved with less memory, until whole tensors fit


def options_of(part: Problem) -> list[Placement]:
    """Placements, without shares, of each way to compute attention that the job allows."""
    asked, host = part.fixed.placement or AskedPlacement(), part.cluster.tier("host")
    ways = [False, True] if host and host.attention and asked.kv_bits != 4 else [False]
    if asked.host_attention is not None:
        ways = [own for own in ways if own == asked.host_attention] or ways[:1]
    on_device = (1.0, 0.0, 0.0)
    return [Placement(
        weights=on_device, kv=on_device, hidden=on_device, device_batch=1,
        order=asked.order or "zigzag", overlap=asked.overlap is not False, host_attention=own,
        weight_bits=asked.weight_bits or 16, kv_bits=asked.kv_bits or 16) for own in ways]


def in_whole(programs: Programs, choice: Choice) -> Placement | None:
    """The block's placement, with whole tensors and requests within the memories. Where they do not
    fit, its program is solved again with so much less; None if they never fit."""
    solution: Solution | None = choice.solution
    program = choice.program
    for _ in range(ROUNDS):
        if solution is None:
            break
        weights, kv, hidden = map(_as_shares, np.split(solution.shares, 3))
        placement = replace(programs.options, device_batch=choice.device_batch, weights=weights,
                            kv=kv, hidden=hidden)
        held = programs.held_bytes(placement, choice.requests).sum(axis=-1)
        beyond = np.maximum(held.max(axis=0) - programs.memory.room, 0.0)
        if not beyond.any():
            return replace(placement, budgets=tuple(
                map(tuple, np.ceil(held).astype(int).tolist())))
        memory = program.memory
        program = replace(program, memory=memory._replace(
            capacity=memory.capacity - beyond[list(memory.tiers)]))
        solution = program.solve()
    return None


def _as_shares(shares: FloatArray) -> Shares:
    """Three shares that sum to 1, to six digits."""
    own = np.round(shares, 6) + 0.0  # no negative zero
    own[own.argmax()] += 1 - own.sum()
    return float(own[0]), float(own[1]), float(own[2])
