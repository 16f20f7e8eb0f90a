"""The linear program of a block: FlexGen's published search, and a grid over the shares."""

import itertools
import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from xgpt.core.placement import DEVICE, DISK, HOST
from xgpt.core.units import GIB
from xscheduler.block_program import Program, Step, best_blocks
from xsimulator.placed_memory import MemoryRows
from xsimulator.placed_terms import PlacedStep, Terms

# FlexGen's constants of a T4 machine, fitted by its authors to their runs; the disk's rate is
# fitted to Tables 2, 3 and 5 in place of theirs (docs/offload.md)
UP, ENTRIES_DOWN, HIDDEN_DOWN = 12.89 * GIB, 0.97 * GIB, 4.82 * GIB
READ, ENTRIES_WRITTEN, WRITE = 3.0 * GIB, 0.746 * GIB, 2.015 * GIB
PRODUCTS, ATTENTION, PRODUCTS_DECODING, ATTENTION_DECODING, HOST_FLOPS = (
    21.24e12, 9.97e12, 4.3e12, 0.079e12, 0.0123e12)
MODELS = {"30b": (48, 7168, 56), "175b": (96, 12288, 96)}  # layers, hidden size, heads
S, N = 512, 32
DEVICE_BATCHES, MOST = (1, 2, 3, 4, 8, 16, 32, 48, 64), 20
CAPACITIES = np.array([16, 200, 1500]) * 0.8 * GIB
WEIGHTS, KV, HIDDEN = 0, 3, 6


def host_flops(batch, hidden):
    more, wider = max(0.0, math.log2(64 / batch)), max(0.0, math.log2(4096 / hidden))
    return HOST_FLOPS * max(0.1, 1 + 0.0168 * more * wider - 0.0328 * more - 0.0621 * wider)


def terms(model, batch, count):
    """Steps of a block by appendix A.3, with host attention: by share [5, 9], fixed [5]."""
    _, h1, _ = MODELS[model]
    weights, block = 24 * h1 * h1, batch * count
    encode, decode = (np.zeros((5, 9)), np.zeros(5)), (np.zeros((5, 9)), np.zeros(5))
    for (own, _), hidden in ((encode, 2 * S * h1 * block), (decode, 2 * h1 * block)):
        own[0, [WEIGHTS + HOST, WEIGHTS + DISK]] = weights / UP
        own[0, HIDDEN + HOST] = hidden / UP
        own[1, HIDDEN + HOST] = hidden / HIDDEN_DOWN
    own, fixed = encode
    own[1, [KV + HOST, KV + DISK]] = 4 * (S + 1) * h1 * block / ENTRIES_DOWN
    own[2, WEIGHTS + DISK] = weights / READ
    own[3, KV + DISK] = 4 * (S + 1) * h1 * block / ENTRIES_WRITTEN
    fixed[4] = block * 24 * S * h1 * h1 / PRODUCTS + 4 * block * S**2 * h1 / ATTENTION
    own, fixed = decode
    entries = 4 * block * (S + N / 2) * h1
    own[2, WEIGHTS + DISK], own[2, KV + DISK] = weights / (0.95 * READ), entries / READ
    own[3, KV + DISK] = 4 * block * h1 / WRITE
    own[4, KV + DEVICE] = entries / ATTENTION_DECODING
    own[4, [KV + HOST, KV + DISK]] = entries / host_flops(batch, h1)
    fixed[4] = block * 24 * h1 * h1 / PRODUCTS_DECODING
    return encode, decode


def memory(model, batch, count, capacities):
    """FlexGen's released rows, which add up the work of the device."""
    layers, h1, heads = MODELS[model]
    weights, block, h2 = 24 * h1 * h1, batch * count, 4 * h1
    entries, all_weights = 4 * (S + N) * h1 * block * layers, weights * layers
    rows, fixed = np.zeros((5, 9)), np.zeros(5)
    for row, tokens in ((0, S), (1, 1)):
        rows[row, WEIGHTS], rows[row, KV] = all_weights - 2 * weights, entries
        rows[row, HIDDEN] = 2 * tokens * h1 * (block - batch)
        fixed[row] = 2 * weights + 2 * tokens * h1 * batch
    rows[1, KV] += batch * (8 * (S + N) * h1 + 4 * h1 + 2 * heads * (S + N))
    fixed[0] += batch * (18 * S * h1 + 2 * heads * S**2 + 2 * S * h2)
    fixed[1] += batch * (14 * h1 + 2 * h2)
    rows[2, [WEIGHTS, WEIGHTS + HOST]] = -weights, all_weights
    rows[2, KV + HOST] = 4 * S * h1 * block * layers
    rows[2, [HIDDEN, HIDDEN + HOST]] = -2 * S * h1 * batch, 2 * S * h1 * block
    fixed[2] = weights + 2 * S * h1 * batch
    rows[3, [WEIGHTS + HOST, WEIGHTS + DISK]] = all_weights, weights
    rows[3, [KV + HOST, KV + DISK]] = entries, 8 * (S + N) * h1 * batch
    rows[3, HIDDEN + HOST] = 2 * h1 * block
    fixed[3] = 2 * heads * (S + N) * batch + 2 * h1 * batch
    rows[4, WEIGHTS + DISK], rows[4, KV + DISK] = all_weights, entries
    tiers = (DEVICE, DEVICE, HOST, HOST, DISK)
    return MemoryRows(rows, fixed, capacities[list(tiers)], tiers)


def program(model, batch, count, capacities=CAPACITIES, limit_s=math.inf):
    layers = MODELS[model][0]
    encode, decode = terms(model, batch, count)
    return Program(
        requests=batch * count, serial_share=0.45, limit_s=limit_s,
        memory=memory(model, batch, count, capacities),
        steps=tuple(Step(often, often, PlacedStep(layers, Terms(*own, np.zeros((4, 9))), None,
                                                  np.zeros(())))
                    for often, own in ((1, encode), (N - 1, decode))))


def beyond(own, shares):
    """Most bytes beyond a capacity; at most 0 where all rows hold."""
    return (own.memory.by_share @ shares + own.memory.fixed - own.memory.capacity).max()


def best(model, **given):
    choice, *_ = best_blocks({
        batch: {batch * count: partial(program, model, batch, count, **given)
                for count in range(1, MOST + 1)} for batch in DEVICE_BATCHES})
    return choice


@pytest.mark.parametrize(("model", "given", "tokens_per_s", "block"), [
    ("30b", {}, 7.264, (48, 3)), ("30b", {"limit_s": 300.0}, 6.565, (4, 15)),
    ("30b", {"capacities": CAPACITIES + np.array([0, 64 * 0.8 * GIB, 0])}, 7.444, None),
    ("175b", {}, 0.695, (16, 20))])
def test_the_best_block_by_the_published_formulas(model, given, tokens_per_s, block):
    choice = best(model, **given)
    assert choice.solution.qps * N == pytest.approx(tokens_per_s, abs=5e-4)
    assert block in (None, (choice.device_batch, choice.requests // choice.device_batch))
    own, shares = choice.program, choice.solution.shares
    assert own.qps(shares) == pytest.approx(choice.solution.qps)
    assert beyond(own, shares) <= 1e-6 * own.memory.capacity.max()
    assert own.period_s(shares, is_watched=True) <= own.limit_s * (1 + 1e-9)


@pytest.mark.parametrize("model", MODELS)
def test_no_block_that_was_left_out_is_better(model):
    solved = [program(model, batch, count).solve() for batch in DEVICE_BATCHES
              for count in range(1, MOST + 1)]
    most_qps = max(one.qps for one in solved if one is not None)
    assert best(model).solution.qps == pytest.approx(most_qps, rel=1e-9)


def test_no_point_of_a_grid_over_the_shares_beats_the_program():
    own = program("30b", 8, 2)
    solution = own.solve()
    assert solution is not None
    thirds = [np.array([a, b, 10 - a - b]) / 10 for a in range(11) for b in range(11 - a)]
    hidden = [one for one in thirds if not one[DISK]]
    fits = [shares for shares in map(np.concatenate, itertools.product(thirds, thirds, hidden))
            if beyond(own, shares) <= 0]
    assert 1000 < len(fits) < len(thirds) ** 2 * len(hidden)
    assert max(map(own.qps, fits)) <= solution.qps * (1 + 1e-9)


def test_a_price_is_what_more_memory_brings():
    choice = best("30b")
    more = choice.program.memory.capacity + GIB * (np.array(choice.program.memory.tiers) == DEVICE)
    bought = replace(choice.program, memory=choice.program.memory._replace(capacity=more)).solve()
    gain = bought.qps / choice.solution.qps - 1
    assert gain > 0.001 and choice.solution.prices[DEVICE] == pytest.approx(gain, rel=0.1)
    assert choice.solution.prices[DISK] == 0


@pytest.mark.parametrize("limit_s", [300.0, math.inf])
def test_a_block_of_a_size_without_known_times_has_no_solution(limit_s):
    own = program("30b", 8, 2, limit_s=limit_s)
    first, *others = own.steps
    assert own.solve() is not None
    assert replace(own, steps=(first._replace(placed=first.placed._replace(
        other_s=np.array(math.inf))), *others)).solve() is None


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("serial_share", [0.0, 0.45, 1.0])
def test_a_time_that_is_unknown_counts_where_bytes_lie(serial_share):
    """Off the device it is infinite, and nothing lies there; then no time is known."""
    by_share, fixed = np.zeros((5, 9)), np.ones(5)
    by_share[4, KV + HOST] = math.inf
    step = PlacedStep(2, Terms(by_share, fixed, np.zeros((4, 9))), None, np.zeros(()))
    on_device = np.zeros(9)
    on_device[[WEIGHTS, KV, HIDDEN]] = 1.0
    assert step.seconds(on_device, serial_share) == pytest.approx(2 * (1 + 4 * serial_share))
    unknown = step._replace(layer=step.layer._replace(fixed=np.array([1.0, 1, 1, 1, math.inf])))
    assert unknown.seconds(on_device, serial_share) == math.inf


@pytest.mark.filterwarnings("error")
def test_a_term_without_a_known_time_leaves_its_block_out():
    own = program("30b", 8, 2)
    first, *others = own.steps
    layer = first.placed.layer
    own = replace(own, steps=(first._replace(placed=first.placed._replace(layer=layer._replace(
        by_share=np.where(layer.by_share > 0, math.inf, 0.0)))), *others))
    assert best_blocks({8: {16: lambda: own}}) == []
