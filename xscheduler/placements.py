"""Placements: options that a job leaves open, and the shares of a block in whole tensors and
requests."""

from dataclasses import replace

import numpy as np

from xgpt.core.lengths import FloatArray
from xgpt.core.placement import DEVICE, AskedPlacement, Placement, Shares, stage_tensors
from xgpt.core.problem import Problem
from xscheduler.block_program import Choice
from xscheduler.placed_programs import Programs

ROUNDS = 4  # chosen: programs that are solved with less memory, until whole tensors fit
# chosen: share of a stage's weights that a tensor has, from which other shares are tried
COARSE = 0.05
ON_DEVICE = (0.49, *np.linspace(0, 1, 21).tolist())  # chosen: below a half the embedding is not


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


def in_whole(programs: Programs, choice: Choice) -> tuple[Choice, Placement] | None:
    """The block with whole tensors and requests within the memories, of several shares of
    weights the quickest. Where none fits, its program is solved again with so much less."""
    asked, stage = programs.part.fixed.placement, programs.plan.stages[-1]
    sizes = [own.elements for own in stage_tensors(
        programs.part.model, stage.num_layers, is_first=stage.index == 0, is_last=True)]
    is_fine = max(sizes) < COARSE * sum(sizes) or (asked is not None and asked.weights is not None)
    for _ in range(ROUNDS):
        found, over = list[tuple[float, Placement]](), list[FloatArray]()
        weights, kv, hidden = np.split(choice.solution.shares, 3)
        for own in [weights] if is_fine else _near(weights):
            placement = replace(
                programs.options, device_batch=choice.device_batch, weights=_as_shares(own),
                kv=_as_shares(kv), hidden=_as_shares(hidden))
            held = programs.held_bytes(placement, choice.requests).sum(axis=-1)
            beyond = np.maximum(held.max(axis=0) - programs.memory.room, 0.0)
            over.append(beyond)
            if not beyond.any():
                budgets = tuple(map(tuple, np.ceil(held).astype(int).tolist()))
                found.append((programs.exact_s(placement, choice), replace(
                    placement, budgets=budgets)))
        if found:
            return choice, min(found, key=lambda one: one[0])[1]
        memory = choice.program.memory
        program = replace(choice.program, memory=memory._replace(
            capacity=memory.capacity - over[0][list(memory.tiers)]))
        if (solution := program.solve()) is None:
            break
        choice = choice._replace(program=program, solution=solution)
    return None


def _near(weights: FloatArray) -> list[FloatArray]:
    """Shares of weights to round: these, and others on the device. Where a few tensors are large,
    such as embedding and head, others fit, or are quicker."""
    below = weights[1:]
    if not below.any():
        return [weights]
    return [np.concatenate([[own], below * ((1 - own) / below.sum())])
            for own in (float(weights[DEVICE]), *ON_DEVICE)]


def _as_shares(shares: FloatArray) -> Shares:
    """Three shares that sum to 1, to six digits."""
    own = np.round(shares, 6) + 0.0  # no negative zero
    own[own.argmax()] += 1 - own.sum()
    return float(own[0]), float(own[1]), float(own[2])
