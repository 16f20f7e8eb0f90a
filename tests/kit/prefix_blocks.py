"""A random machine of groups that share blocks and prefixes: requests join, write prefixes, begin
behind those of others, grow, are evicted and leave. Every token's entries say whose they are."""

import random

import torch
from integrity import check_blocks, check_slots

from xgpt.core.model import ModelSpec
from xrunner.engine.kv import BlockPool, KvCache, Room, kv_shape
from xrunner.rules.slots import GroupSlots
from xrunner.rules.steps import Start

SPEC = ModelSpec(name="toy", family="llama", num_layers=2, hidden_size=8, num_heads=2,
                 num_kv_heads=1, vocab_size=11, intermediate_size=8)
GROUPS, SLOTS, OWN = 2, 4, 30  # of each: requests; of each request: own tokens


class SharingMachine:
    """Admits by the budget that the blocks are counted for, so that `take` fails if these are too
    few. Of each node: its parent, before it, and its end."""

    def __init__(self, seed: int, size: int, device: torch.device | str = "cpu") -> None:
        self.rng, self.size = random.Random(seed), size
        self.parents, self.ends = list[int](), list[int]()
        for node in range(self.rng.randint(1, 8)):
            self.parents.append(self.rng.randint(-1, node - 1))
            self.ends.append(self.end_of(self.parents[-1]) + self.rng.randint(1, 40))
        capacity = max(self.ends) + OWN
        self.budget = self.rng.randint(capacity + 16, 4 * capacity)
        own = sorted(map(self.own, range(len(self.ends))))
        self.unit = self.rng.choice([1, min(16, size)])
        room = Room(SLOTS, capacity, self.budget, self.unit, GROUPS, prefixes=sum(
            sum(own[:count]) <= self.budget for count in range(1, len(own) + 1)))
        shape = kv_shape(SPEC, torch.float32, slots=room.num_blocks(size), capacity=size)
        self.pool = BlockPool(shape, device)
        self.caches = [KvCache(shape, room=room, pool=self.pool) for _ in range(GROUPS)]
        self.slots = [GroupSlots[int]() for _ in range(GROUPS)]
        self.chains: dict[int, list[int]] = {}  # nodes of the requests at work, root first
        self.writers: dict[int, int] = {}  # of the living nodes
        self.whole: set[int] = set()  # nodes encoded to their ends
        self.hasty: set[int] = set()  # requests that encode their nodes in the step they join in
        self.next = self.copied = self.shared = 0

    def end_of(self, node: int) -> int:
        return self.ends[node] if node >= 0 else 0

    def own(self, node: int) -> int:
        return self.ends[node] - self.end_of(self.parents[node])

    def chain(self, node: int) -> list[int]:
        return [] if node < 0 else [*self.chain(self.parents[node]), node]

    def value(self, query: int, place: int) -> float:
        """The value of the request's token there: the same for all that share it."""
        return next((1000.0 * node + place for node in self.chains[query]
                     if place < self.ends[node]), 100_000.0 + 1000 * query + place)

    def step(self) -> None:
        """One group's step: some leave, prefixes are released, some join, some get tokens."""
        group = self.rng.randrange(GROUPS)
        cache, slots = self.caches[group], self.slots[group]
        gone = [query for query in slots.seats if self.rng.random() < 0.2]
        for query in gone:
            del self.chains[query]
        slots.vacate(gone)
        released = self.released()
        tries = self.rng.randint(0, SLOTS - len(slots.seats) + len(gone))
        starts = [start for _ in range(tries) if (start := self.start()) is not None]
        seating = slots.seat([start.query for start in starts], is_reused=True)
        self.pool.release(released)
        cache.free(seating.removed)
        cache.seat(len(starts), seating.replaced)
        for start in starts:
            cache.share(slots.seats.index(start.query), start)
        self.write(cache, slots.seats)
        self.whole |= {node for node, writer in self.writers.items() if writer in slots.seats
                       and cache.lengths[slots.seats.index(writer)] >= self.ends[node]}
        self.hasty.clear()

    def released(self) -> list[int]:
        """Nodes without requests and living children: those that are not whole, and some more."""
        used, found = {node for chain in self.chains.values() for node in chain}, list[int]()
        for node in sorted(self.writers, reverse=True):
            used |= {self.parents[other] for other in self.writers}
            if node not in used and (node not in self.whole or self.rng.random() < 0.5):
                found.append(node)
                del self.writers[node]
                self.whole.discard(node)
        return found

    def start(self) -> Start | None:
        """How the next request begins; None where there is no room, or it must wait."""
        chain, query = self.chain(self.rng.randint(-1, len(self.ends) - 1)), self.next
        writes = [node for node in chain if node not in self.writers]
        held = -(-OWN // self.unit) * self.unit * (len(self.chains) + 1) + sum(
            map(self.own, {*self.writers, *writes}))
        if held > self.budget or any(node not in self.whole and self.writers[node] not in self.hasty
                                     for node in chain if node not in writes):
            return None
        first, behind = 0, -1
        for node in (node for node in chain if node in self.writers):
            end = self.ends[node] - (0 if node in self.whole else self.ends[node] % self.size)
            first, behind = (end, node) if end > first else (first, behind)
        self.next, self.chains[query] = query + 1, chain
        self.shared, self.copied = self.shared + first, self.copied + (first % self.size > 0)
        self.writers |= dict.fromkeys(writes, query)
        if self.rng.random() < 0.7:
            self.hasty.add(query)
        return Start(query, first, behind, tuple((node, self.ends[node]) for node in writes))

    def write(self, cache: KvCache, seats: list[int]) -> None:
        """Gives the requests more tokens, at once as a step does."""
        grown = dict[int, int]()
        for slot, query in enumerate(seats):
            has, shared = cache.lengths[slot], max((self.ends[n] for n in self.chains[query]),
                                                   default=0)
            least = max(shared, has) if query in self.hasty else has
            grown[slot] = self.rng.randint(least, shared + OWN)
        table = cache.room_for([*grown.values()], [*grown])
        assert table is not None
        for slot, length in grown.items():
            at = torch.arange(cache.lengths[slot], length, device=cache.store.device)
            blocks, within = table.places(torch.full_like(at, slot), at)
            values = torch.tensor([self.value(seats[slot], place) for place in at.tolist()])
            cache.store[:, :, blocks, :, within] = values.to(cache.store)[:, None, None, None, None]
            cache.grow(slot, length - cache.lengths[slot])

    def check(self) -> None:
        """Every request finds its own entries; no block is lost or had twice."""
        check_blocks(*self.caches)
        for cache, slots in zip(self.caches, self.slots, strict=True):
            check_slots(cache, least=0)
            table = cache.room_for([])
            assert table is not None
            for slot, query in enumerate(slots.seats):
                at = torch.arange(cache.lengths[slot], device=cache.store.device)
                blocks, within = table.places(torch.full_like(at, slot), at)
                found = cache.store[:, :, blocks, :, within].flatten(1)
                expected = [self.value(query, place) for place in at.tolist()]
                assert (found.cpu() == torch.tensor(expected)[:, None]).all(), f"{query = }"
