"""Figures of a placed plan beside its schedule: bytes by tier with the price of more, seconds and
bytes of its steps, and limits of other orders of work."""

import math
from dataclasses import replace

import numpy as np

from xgpt.core.placement import (
    TIERS,
    AskedPlacement,
    PlacedFigures,
    Placement,
    StepTerms,
    TierBytes,
)
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate
from xgpt.core.units import format_bytes
from xprofiler.timing import TimingSource
from xscheduler.block_program import Choice
from xscheduler.placed_programs import Programs, shares_of
from xscheduler.refusals import least_room
from xsimulator.memory import least_weight_bytes
from xsimulator.placed_terms import Terms


def placed_figures(problem: Problem, timing: TimingSource, programs: Programs, choice: Choice,
                   estimate: Estimate, tried: int) -> PlacedFigures:
    """The figures of the chosen block. tried: number of blocks that the programs cover."""
    placement, room = estimate.deployment.decoding.placement, programs.memory.room
    assert placement is not None
    held = programs.held_bytes(placement, choice.requests)
    tiers = []
    for tier, name in enumerate(TIERS):
        if room[tier] > 0:
            own = held[held[:, tier].sum(axis=-1).argmax(), tier]  # of the fullest stage
            weights, kv, hidden, work = map(int, own)
            tiers.append(TierBytes(name=name, weights=weights, kv=kv, hidden=hidden, work=work,
                                   free=max(int(room[tier] - own.sum()), 0),
                                   price=float(choice.solution.prices[tier])))
    least, layers = least_room(problem, timing).memory_bytes, programs.plan.times.layers
    return PlacedFigures(
        tiers=tuple(tiers), steps=tuple(_steps(programs, choice, placement)), tried=tried,
        block=choice.requests * programs.groups,
        program_qps=choice.solution.qps * programs.part.copies,
        any_order_qps=any_order_qps(programs) * programs.part.copies,
        diagonal_block=int(choice.requests * programs.groups * diagonal_over_zigzag(
            layers.model.num_layers * layers.model.kv_elements_per_token_layer
            * programs.part.kv_item_bytes, layers.row_bytes, programs.work.inputs.mean,
            programs.work.iterations + 1)),
        needed_bytes=int(least if math.isfinite(least) else least_weight_bytes(problem)))


def _steps(programs: Programs, choice: Choice, placement: Placement) -> list[StepTerms]:
    """An encode step, and a decode step (the mean of a phase), of all layers of a stage."""
    shares, found = shares_of(placement), []
    for is_encode in (True, False):
        own = [(float(kind.often[0]), step) for kind, step in programs.kinds(choice)
               if kind.is_encode == is_encode]
        often = sum(count for count, _ in own) or 1.0
        seconds = sum(count / often * float(step.seconds(
            shares, choice.program.serial_share)[0]) for count, step in own)
        terms, moved = (np.sum([count / often * times * at(part, shares)[0] for count, step in own
                                for times, part in step.parts], axis=0)
                        for at in (Terms.at, Terms.bytes_at))
        up, down, read, write = map(int, moved)
        groups, stages = programs.groups, len(programs.plan.stages)
        # a stage waits for the others in the rest of its period
        often *= groups / (groups + stages - 1 if is_encode else max(groups, stages))
        found.append(StepTerms(
            kind="encode" if is_encode else "decode", count=often, seconds=seconds,
            up_bytes=up, down_bytes=down, read_bytes=read, write_bytes=write,
            **dict(zip(("up_s", "down_s", "read_s", "write_s", "compute_s"), terms.tolist(),
                       strict=True))))
    return found


def any_order_qps(programs: Programs) -> float:
    """Throughput that no order of work exceeds: the most requests whose entries fit all tiers, over
    the seconds to read, for each of their tokens, the weights that cannot be resident."""
    part, room = programs.part, programs.memory.room
    weights = least_weight_bytes(part) / len(programs.plan.stages)
    host, disk = part.cluster.tier("host"), part.cluster.tier("disk")
    most = min(programs.memory.most_slots(programs.options, programs.capacity),
               part.num_queries or math.inf)
    reading_s = max((max(weights - above, 0.0) / tier.up.bandwidth_bytes_per_s
                     for tier, above in ((host, room[0]), (disk, room[0] + room[1]))
                     if tier is not None), default=0.0)
    return most / ((programs.work.iterations + 1) * reading_s) if reading_s else math.inf


def diagonal_over_zigzag(entry: float, row: float, inputs: float, outputs: float) -> float:
    """Requests of a block in diagonal order over those of a zig-zag block of as many bytes
    (FlexGen, A.2). Its requests are at different tokens, so that few hold all their entries.

    entry, row: bytes of a token's entries in all layers, and of its hidden state."""
    zigzag = row + entry * (inputs + outputs)
    diagonal = row + entry * (2 * inputs + outputs) * (outputs - 1) / (2 * outputs)
    return zigzag / diagonal


def lacking(programs: Programs) -> str:
    """Words for what the smallest block lacks: its bytes on each tier, below which no placement
    is."""
    has_host, has_disk = programs.memory.room[1:] > 0
    below = (0.0, float(not has_disk), float(has_disk))
    hidden = (0.0, 1.0, 0.0) if has_host else (1.0, 0.0, 0.0)
    given = programs.part.fixed.placement or AskedPlacement()
    least = replace(programs.options, weights=given.weights or below, kv=given.kv or below,
                    hidden=given.hidden or hidden)
    blocks = {batch: min(own) for batch, own in programs.all().items() if own}
    batch, slots = min(blocks.items(), key=lambda one: (one[1], one[0]), default=(1, 1))
    held, words = programs.held_bytes(replace(least, device_batch=batch), slots).max(axis=0), []
    for name, room, parts in zip(TIERS, programs.memory.room, held, strict=True):
        if room > 0 or parts.any():
            own = [f"{format_bytes(part)} of {what}" for part, what in zip(
                parts, ("weights", "KV cache", "hidden states",
                        "two layers' buffers and activations"), strict=True) if part]
            words.append(f"{name}: {', '.join(own) or 'nothing'}; {format_bytes(room)} can be used")
    count = "one request" if slots == 1 else f"{slots:,} requests at once"
    return f"needs at least, for {count}: {'. '.join(words)}"
