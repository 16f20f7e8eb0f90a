"""Entries on tiers: attention over them is what it is over a cache in memory, whatever joins,
decodes and goes, wherever the entries lie."""

import random
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from examples import examples
from holding import rule_of
from hypothesis import given
from hypothesis import strategies as st
from replays import answers_of
from torch import Tensor
from toy_runs import run_in_process
from toys import make_modern, random_queries

from xgpt.core.errors import XgptError
from xgpt.core.placement import TIERS, Placement, kv_block_tokens, sectors
from xrunner.engine.kv import KvCache, KvShape
from xrunner.offload.arena import Arena
from xrunner.offload.kv_parts import Tiers
from xrunner.offload.mover import Mover, Ticket
from xrunner.offload.placed_cache import Piece, PlacedCache, placed_caches
from xrunner.ops.attention import PLAIN, Scoring, decode_attention, encode_attention
from xrunner.ops.contexts import DecodeContext, EncodeContext, decode_context, encode_context
from xrunner.ops.rows import rotate_and_store
from xrunner.rules.slots import Span

LAYERS, SLOTS, KV_HEADS, HEADS, DIM, CAPACITY = 3, 11, 2, 4, 16, 150
CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
SHARES = [(1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0), (0.3, 0.0, 0.7), (0.4, 0.3, 0.3),
          (0.1, 0.6, 0.3)]


def placement_of(kv: tuple[float, float, float], **settings: object) -> Placement:
    return Placement(weights=(1, 0, 0), kv=kv, hidden=(1, 0, 0),
                     **{"device_batch": 3, **settings})  # type: ignore[arg-type]


class Slow(Mover):
    """Copies of which a `share` comes late."""

    share = 0.1

    def submit(self, term: str, num_bytes: int, call: Callable[[], object],
               after: Sequence[Ticket] = ()) -> Ticket:
        late_s = 0.005 if random.random() < self.share else 0.0
        return super().submit(term, num_bytes, lambda: (time.sleep(late_s), call()), after)


def tiers_of(placement: Placement, folder: Path) -> Tiers:
    return Tiers(placement, CPU, (Arena("device"), Arena("host"), Arena("disk")),
                 Slow(overlap=placement.overlap), folder)


class Both:
    """A cache in rows in memory and one by tiers, which get the same steps."""

    def __init__(self, tiers: Tiers, dtype: torch.dtype, scoring: Scoring, seed: int,
                 placed: PlacedCache | None = None) -> None:
        shape = KvShape(LAYERS, SLOTS, KV_HEADS, CAPACITY, DIM, dtype)
        self.tiers, self.dtype, self.scoring = tiers, dtype, scoring
        self.plain, self.placed = KvCache(shape), placed or placed_caches(1, shape, tiers)[0]
        self.random, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)

    def encode(self, lengths: list[int]) -> None:
        first = len(self.plain.lengths)
        spans = [Span(first + i, 0, length, True) for i, length in enumerate(lengths)]
        for cache in (self.plain, self.placed):
            cache.seat(len(lengths), ())
        self.compare(sum(lengths), encode_context(spans), self.placed.pieces(spans))
        for cache, span in product((self.plain, self.placed), spans):
            cache.grow(span.slot, span.tokens)

    def decode(self) -> None:
        lengths = [length + 1 for length in self.plain.lengths]
        self.compare(len(lengths), decode_context(lengths), self.placed.pieces())
        for cache, slot in product((self.plain, self.placed), range(len(lengths))):
            cache.grow(slot)

    def free(self, removed: list[int]) -> None:
        assert self.plain.free(removed) == self.placed.free(removed)
        assert self.plain.lengths == self.placed.lengths

    def compare(self, rows: int, step: DecodeContext | EncodeContext, pieces: list[Piece]) -> None:
        """The step's attention over both caches, the pieces in one order or the other."""
        assert [row for piece in pieces for row in range(rows)[piece.rows]] == [*range(rows)]
        joints = torch.randn(LAYERS, rows, HEADS + 2 * KV_HEADS, DIM, generator=self.generator)
        if self.tiers.placement.kv_bits == 4:  # such as are packed exactly
            entries = joints[:, :, HEADS:]
            entries[:] = torch.randint(16, entries.shape, generator=self.generator) / 8
            entries[..., 0], entries[..., 1] = 0, 15 / 8
        joints = joints.flatten(2).to(self.dtype)
        found = torch.zeros(LAYERS, rows, HEADS * DIM, dtype=self.dtype)
        order = [*product(range(LAYERS), pieces)]
        if self.tiers.placement.order == "row":
            order.sort(key=lambda own: own[1].rows.start)
        ahead = 0  # pieces that were begun
        for place, (layer, piece) in enumerate(order):
            own, ahead = self.placed.lend(layer, piece), max(ahead, place + 1)
            if ahead < len(order) and self.random.random() < 0.8:
                self.placed.ahead(*order[ahead])
                ahead += 1
            step_of = piece.decoded or piece.encoded
            assert step_of is not None
            found[layer, piece.rows] = self.attended(joints[layer, piece.rows], own, step_of)
            self.placed.put(layer, piece)
        for layer in range(LAYERS):
            expected = self.attended(joints[layer], self.plain.layers[layer], step)
            assert (found[layer] - expected).abs().max() <= TOLERANCE[self.dtype]

    def attended(self, joint: Tensor, cache: tuple[Tensor, Tensor],
                 step: DecodeContext | EncodeContext) -> Tensor:
        query = rotate_and_store(joint.clone(), HEADS, cache, step.places)
        if isinstance(step, DecodeContext):
            return decode_attention(query, cache, step, self.scoring)
        return encode_attention(query, cache, step, self.scoring)


def drawn(both: Both, steps: int) -> None:
    """Random steps: requests join, decode and go."""
    draw = both.random
    for _ in range(steps):
        here = len(both.plain.lengths)
        if here and draw.random() < 0.25:
            both.free(sorted(draw.sample(range(here), draw.randint(1, here))))
        elif here < SLOTS and draw.random() < 0.4:
            both.encode([draw.randint(1, 100) for _ in range(draw.randint(1, SLOTS - here))])
        elif here and max(both.plain.lengths) < CAPACITY:
            for _ in range(draw.randint(1, 20)):
                if max(both.plain.lengths) < CAPACITY:
                    both.decode()


@examples(80)
@given(kv=st.sampled_from(SHARES), order=st.sampled_from(["zigzag", "row"]), overlap=st.booleans(),
       below=st.sampled_from([{}, {"host_attention": True}, {"kv_bits": 4}]),
       dtype=st.sampled_from([*TOLERANCE]),
       scoring=st.sampled_from([PLAIN, PLAIN, Scoring(window=20), Scoring(cap=1.5)]),
       seed=st.integers(0, 2**31))
def test_attention_over_tiers_is_that_over_memory(
        tmp_path_factory: pytest.TempPathFactory, kv: tuple[float, float, float], order: str,
        overlap: bool, below: dict[str, object], dtype: torch.dtype, scoring: Scoring,
        seed: int) -> None:
    folder = tmp_path_factory.mktemp("kv")
    tiers = tiers_of(placement_of(kv, order=order, overlap=overlap, **below), folder)
    both = Both(tiers, dtype, scoring, seed)
    try:
        drawn(both, 12)
        assert not [*folder.iterdir()]  # the file has no name
        tiers.mover.flush()
        both.placed.close()
        assert [arena.held for arena in tiers.arenas] == [0, 0, 0]
    finally:
        tiers.mover.close()


@pytest.mark.parametrize(("kv", "below"), [
    ((0.0, 1.0, 0.0), {"host_attention": True}), ((0.0, 1.0, 0.0), {}), ((0.0, 0.0, 1.0), {})])
def test_a_step_reads_what_the_last_one_still_writes(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kv: tuple[float, float, float],
        below: dict[str, object]) -> None:
    monkeypatch.setattr(Slow, "share", 1.0)
    tiers = tiers_of(placement_of(kv, **below), tmp_path)
    shape = KvShape(LAYERS, SLOTS, KV_HEADS, CAPACITY, DIM, torch.float32)
    groups = [Both(tiers, torch.float32, PLAIN, 0, one) for one in placed_caches(2, shape, tiers)]
    for both in groups:
        both.encode([40, 3])
    for both in groups:
        both.decode()
        both.encode([30])
        both.free([0])
    for both in groups:
        both.decode()
    tiers.mover.close()


def test_arenas_hold_what_is_planned(tmp_path: Path) -> None:
    """Bytes by tier of two groups: rows, blocks of a file and last blocks, and two buffers. One
    byte less is refused in words."""
    placement = placement_of((0.4, 0.3, 0.3))  # of 11 slots 4, 4 and 3
    shape = KvShape(LAYERS, SLOTS, KV_HEADS, CAPACITY, DIM, torch.float32)
    token, block = 2 * KV_HEADS * DIM * 4, kv_block_tokens(KV_HEADS, DIM, 4)
    row, blocks = CAPACITY * token, -(-CAPACITY // block) * block * token
    assert (block, blocks) == (32, 5 * 32 * token)
    planned = (2 * sectors(LAYERS * 4 * row) + 2 * sectors(3 * max(row, blocks)),
               2 * sectors(LAYERS * 4 * row) + 2 * sectors(LAYERS * 3 * block * token),
               2 * sectors(LAYERS * 3 * blocks))
    tiers = tiers_of(placement, tmp_path)
    caches = placed_caches(2, shape, tiers)
    assert tuple(arena.peak for arena in tiers.arenas) == planned
    assert sum(cache.num_bytes for cache in caches) == 2 * LAYERS * (8 * row + 3 * blocks)
    for cache in caches:
        cache.close()
    assert [arena.held for arena in tiers.arenas] == [0, 0, 0]
    for tier, name in enumerate(TIERS):
        arenas = [Arena(own, planned[place] - (place == tier)) for place, own in enumerate(TIERS)]
        with pytest.raises(XgptError, match=f"bytes.* of the tier {name}"):
            placed_caches(2, shape, tiers._replace(arenas=tuple(arenas)))


def test_bytes_on_their_way(tmp_path: Path) -> None:
    """Only whole blocks of a file are read and written; a request that moves within it moves no
    bytes."""
    tiers = tiers_of(placement_of((0.0, 0.0, 1.0)), tmp_path)
    both, moved = Both(tiers, torch.float32, PLAIN, 0), tiers.mover.num_bytes
    token, block = 2 * KV_HEADS * DIM * 4, kv_block_tokens(KV_HEADS, DIM, 4)
    both.encode([3 * block, 2 * block - 1, block - 2])
    tiers.mover.flush()
    assert moved == {"read": 0, "write": LAYERS * 4 * block * token, "up": 0, "down": 0}
    both.decode()  # the second request's block becomes whole
    tiers.mover.flush()
    assert (moved["read"], moved["write"]) == (LAYERS * 4 * block * token,
                                               LAYERS * 5 * block * token)
    both.free([0])
    both.decode()
    tiers.mover.flush()
    assert (moved["read"], moved["write"]) == (LAYERS * 6 * block * token,
                                               LAYERS * 6 * block * token)
    tiers.mover.close()


@pytest.mark.parametrize("policy", ["ft", "rra"])
@pytest.mark.parametrize("own", [
    {"kv": (0.0, 0.0, 1.0)}, {"kv": (0.2, 0.4, 0.4)}, {"kv": (0.2, 0.4, 0.4), "order": "row"}],
    ids=str)
def test_tokens_whose_entries_fill_many_blocks(tmp_path: Path, policy: str,
                                               own: dict[str, Any]) -> None:
    """Tokens equal those of the model in memory, with keys and values read from the file."""
    make_modern("llama", tmp_path / "model", head_dim=64)  # blocks of 16 tokens
    queries = random_queries(17, longest=40)
    settings = {"num_stages": 1, "rule": rule_of("ft", batch=8) if policy == "ft" else None}
    wanted, _ = run_in_process(tmp_path / "model", queries, **settings)
    settings["rule"] = rule_of("ft", batch=8) if policy == "ft" else None
    found, (executor,) = run_in_process(
        tmp_path / "model", queries, **settings,
        placed=(placement_of(**own), tmp_path))
    assert answers_of(found) == answers_of(wanted)
    moved = executor.model.report(1.0).num_bytes
    assert moved["read"] > 2 * moved["write"] > 0
