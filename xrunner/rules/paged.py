"""Batching rules over paged KV: prefill-first (vLLM's of 2023) and Sarathi (chunked prefill).

Sources: vLLM, SOSP '23; Sarathi-Serve, OSDI '24. KV lies in blocks that are allocated as a request
grows; nothing is reserved for its output. If a group needs more blocks than are free, the latest
admitted request is evicted. It waits first in line to be encoded again: its input and its output so
far. Groups are as in xrunner.rules.iteration."""

from collections.abc import Callable
from functools import partial

from xgpt.core.controls import ContinuousControls
from xgpt.core.schedule import Estimate
from xrunner.rules.chunks import PartialInput
from xrunner.rules.iteration import ContinuousRule
from xrunner.rules.steps import Chunk, KvBudget, Step, StepKind, kind_of

BLOCK_TOKENS = 16  # vLLM's default
WATERMARK = 0.01  # vLLM's default: share of blocks that admission keeps free


def blocks_of(tokens: int) -> int:
    """Number of blocks that hold so many tokens."""
    return -(-tokens // BLOCK_TOKENS)


class _PagedGroup:
    """Blocks and requests of one group. All running requests grow together, so a request holds base
    + clock tokens with a fixed base. It needs a new block when that is a multiple of BLOCK_TOKENS.
    Counting requests by base modulo BLOCK_TOKENS makes a step's need of blocks a look-up."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.left_free = int(WATERMARK * num_blocks)  # blocks that admission keeps free
        self.free = num_blocks
        self.running: dict[int, int] = {}  # query -> base, latest admitted last
        self.partial: PartialInput | None = None  # it holds the blocks of its whole input
        self._clock = 0  # decode steps so far
        self._begins = [0] * BLOCK_TOKENS  # requests by base modulo BLOCK_TOKENS

    @property
    def num_present(self) -> int:
        return len(self.running) + (self.partial is not None)

    @property
    def num_needed(self) -> int:
        """Number of new blocks that the next decode step needs."""
        return self._begins[-self._clock % BLOCK_TOKENS]

    def has_room(self, tokens: int) -> bool:
        """Whether a request of `tokens` may join; an empty group takes any that fits at all."""
        left = self.free - blocks_of(tokens)
        return left >= (self.left_free if self.num_present else 0)

    def hold(self, tokens: int) -> None:
        self.free -= blocks_of(tokens)
        assert self.free >= 0, f"{self.free = }"

    def release(self, tokens: int) -> None:
        self.free += blocks_of(tokens)
        assert self.free <= self.num_blocks, f"{self.free = } {self.num_blocks = }"

    def join(self, query: int, tokens: int) -> None:
        """Starts decoding a request whose input's blocks are held already."""
        base = tokens - self._clock
        self.running[query] = base
        self._begins[base % BLOCK_TOKENS] += 1

    def advance(self) -> None:
        """Lets every running request grow by one token."""
        self.free -= self.num_needed
        self._clock += 1
        assert self.free >= 0, f"{self.free = }"

    def leave(self, query: int) -> int:
        """Frees a running request's blocks; returns the tokens it held."""
        base = self.running.pop(query)
        self._begins[base % BLOCK_TOKENS] -= 1
        held = base + self._clock
        self.release(held)
        return held

    def evict(self) -> tuple[int, int]:
        """Frees the blocks of the latest admitted request; returns (query, tokens to encode
        again)."""
        if self.partial is not None:
            partial, self.partial = self.partial, None
            self.release(partial.tokens)
            return partial.query, partial.tokens
        query = next(reversed(self.running))
        return query, self.leave(query) + 1  # its latest token was not in the cache yet


class PagedRule(ContinuousRule):
    """Continuous batching over groups of KV blocks. Sarathi encodes inputs in chunks beside
    decoding (`is_chunked`), prefill-first encodes them whole in steps of their own."""

    evicts = True

    def __init__(self, *, is_chunked: bool, num_groups: int, max_active: int, kv_tokens: int,
                 token_budget: int) -> None:
        """`kv_tokens`: KV budget over all groups."""
        assert token_budget >= 1, f"{token_budget = }"
        super().__init__(num_groups, max_active, token_budget)
        self.is_chunked = is_chunked
        num_blocks = kv_tokens // num_groups // BLOCK_TOKENS
        self.groups = [_PagedGroup(num_blocks) for _ in range(num_groups)]
        self._group_of: dict[int, _PagedGroup] = {}
        self._held = 0  # blocks over all groups

    @property
    def reserved_tokens(self) -> int:
        return self._held * BLOCK_TOKENS

    @property
    def kv_budget(self) -> KvBudget:
        return KvBudget(self.groups[0].num_blocks * BLOCK_TOKENS, BLOCK_TOKENS)

    def submit(self, query: int, reserve_tokens: int, input_tokens: int = 0) -> bool:
        if blocks_of(max(reserve_tokens, input_tokens)) > self.groups[0].num_blocks:
            return False
        self.waiting.append((query, input_tokens))
        return True

    def next_group(self) -> int | None:
        return self.turns.find(lambda g: bool(self.waiting or self.groups[g].num_present))

    def decide(self) -> Step | None:
        group = self.groups[self.turns.group]
        free = group.free
        decided = _decode_and_chunks if self.is_chunked else _encode_or_decode
        step = decided(self, self.turns.group)
        self._held += free - group.free
        return step

    def finish(self, query: int) -> None:
        group = self._group_of.pop(query)
        free = group.free
        group.leave(query)
        self._held += free - group.free

    def can_admit(self, index: int) -> bool:
        """Whether the first waiting request may join the group now."""
        group = self.groups[index]
        return (bool(self.waiting) and group.num_present < self.slots[index]
                and group.has_room(self.waiting[0][1]))

    def admit(self, group: _PagedGroup) -> tuple[int, int]:
        """Gives the first waiting request the blocks of its input; returns (query, tokens)."""
        query, tokens = self.waiting.popleft()
        group.hold(tokens)
        self._group_of[query] = group
        return query, tokens

    def make_room(self, group: _PagedGroup) -> tuple[int, ...]:
        """Evicts until every request left can grow by a token; returns the evicted. They include a
        partly encoded request, which starts at its first chunk again."""
        evicted = []
        while group.num_needed > group.free:
            query, tokens = group.evict()
            del self._group_of[query]
            self.waiting.appendleft((query, tokens))
            evicted.append(query)
        return tuple(evicted)


def _encode_or_decode(rule: PagedRule, index: int) -> Step | None:
    """An ENCODE step if a waiting request has room, else a DECODE step of all that run. An ENCODE
    step takes as many requests as the token budget holds."""
    group, left, joined = rule.groups[index], rule.token_budget, list[int]()
    while rule.can_admit(index):
        # an input longer than the budget is encoded alone: eviction makes inputs longer
        if joined and rule.waiting[0][1] > left:
            break
        query, tokens = rule.admit(group)
        group.join(query, tokens)
        left -= tokens
        joined.append(query)
    number = rule.turns.end()
    if joined:
        return Step(kind=StepKind.ENCODE, group=index, phase=number, iteration=0,
                    joined=tuple(joined))
    if not group.running:
        return None
    evicted = rule.make_room(group)
    group.advance()
    return Step(kind=StepKind.DECODE, group=index, phase=number, iteration=1, evicted=evicted)


def _decode_and_chunks(rule: PagedRule, index: int) -> Step | None:
    """A step of at most the budget's tokens: one per running request, the rest input chunks. A
    request holds the blocks of its whole input from its first chunk on."""
    group, number = rule.groups[index], rule.turns.end()
    may_admit = group.num_needed <= group.free
    evicted = rule.make_room(group)
    left = rule.token_budget - len(group.running)
    is_decode = bool(group.running)
    if is_decode:
        group.advance()
    chunks, joined = list[Chunk](), list[int]()
    while left > 0:
        if group.partial is None:
            if not (may_admit and rule.can_admit(index)):
                break
            query, tokens = rule.admit(group)
            group.partial = PartialInput(query, tokens)
        chunk, group.partial = group.partial.next(left)
        chunks.append(chunk)
        left -= chunk.tokens
        if group.partial.is_whole:
            group.join(group.partial.query, group.partial.tokens)
            joined.append(group.partial.query)
            group.partial = None
    if not is_decode and not chunks:
        return None
    return Step(kind=kind_of(is_decode, chunks), group=index, phase=number,
                iteration=int(is_decode), joined=tuple(joined), chunks=tuple(chunks),
                evicted=evicted)


vllm = partial(PagedRule, is_chunked=False)


def sarathi(*, num_groups: int, max_active: int, kv_tokens: int, token_budget: int) -> PagedRule:
    """A Sarathi rule; arguments as of `PagedRule`."""
    # each running request adds a token to a step, so no more can run than a step has tokens
    return PagedRule(is_chunked=True, num_groups=num_groups, kv_tokens=kv_tokens,
                     max_active=min(max_active, num_groups * token_budget),
                     token_budget=token_budget)


def _rule(make: Callable[..., PagedRule], estimate: Estimate) -> PagedRule:
    """The rule that executes `estimate`."""
    controls, deployment = estimate.controls, estimate.deployment
    assert isinstance(controls, ContinuousControls), f"{estimate.policy = }"
    assert controls.token_budget is not None, f"{controls = }"
    return make(num_groups=deployment.num_groups, max_active=controls.max_active,
                kv_tokens=deployment.kv_tokens, token_budget=controls.token_budget)


vllm_rule, sarathi_rule = partial(_rule, vllm), partial(_rule, sarathi)
