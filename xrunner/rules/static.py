"""Static batching of FasterTransformer (FT) and DeepSpeed-Inference (DSI), paper section 2, Figure
1: a batch is encoded and decoded until its longest request is done; then comes the next.

FT uses the same micro-batches in both phases; DSI encodes each decode group in several parts. No
request leaves early: finished rows keep decoding, and their contexts grow."""

import math
from collections import deque

from xgpt.core.controls import StaticControls
from xgpt.core.schedule import Estimate
from xrunner.rules.slots import SlotUse
from xrunner.rules.steps import Step, StepKind, Waiting


class _Batch:
    """Requests of one batch by group, and the KV tokens they reserve. Each reserves its input and
    the longest output of the batch, since its row is decoded that long."""

    def __init__(self, num_groups: int, group_kv_tokens: int) -> None:
        self.groups: list[list[int]] = [[] for _ in range(num_groups)]
        self.unfinished: set[int] = set()
        self._inputs = [0] * num_groups
        self._output = 0
        self._group_kv_tokens = group_kv_tokens

    @property
    def reserved_tokens(self) -> int:
        return sum(self._group_tokens(group, self._output) for group in range(len(self.groups)))

    def add(self, group: int, new: Waiting) -> bool:
        """Adds `new` to `group`; False if a group would then reserve more than its share."""
        output = max(self._output, new.reserve - new.tokens)
        own = self._group_tokens(group, output) + new.tokens + output
        others = range(len(self.groups)) if output > self._output else ()
        if own > self._group_kv_tokens or any(
                self._group_tokens(other, output) > self._group_kv_tokens for other in others):
            return False
        self.groups[group].append(new.query)
        self.unfinished.add(new.query)
        self._inputs[group] += new.tokens
        self._output = output
        return True

    def _group_tokens(self, group: int, output_tokens: int) -> int:
        return self._inputs[group] + len(self.groups[group]) * output_tokens


class StaticRule:
    """Static batching: ENCODE steps of each group in turn, then rounds of DECODE of each.

    The head learns from a group's tokens that it is done. So the groups before the one with the
    last token run one superfluous step. The next batch starts once all tokens of the last are
    there; stages execute the superfluous steps before it."""

    slot_use = SlotUse.KEPT

    def __init__(self, *, encode_batch: int, num_groups: int, encode_micro_batches: int,
                 kv_tokens: int) -> None:
        """`encode_micro_batches`: steps that encode a batch, a multiple of `num_groups`.
        `kv_tokens`: KV budget of the whole pool; each group gets an equal share."""
        assert encode_batch >= 1 and num_groups >= 1, f"{encode_batch = } {num_groups = }"
        assert encode_micro_batches >= num_groups and encode_micro_batches % num_groups == 0, (
            f"{encode_micro_batches = } is no multiple of {num_groups = }")
        self.encode_batch = encode_batch
        self.num_groups = num_groups
        self.encode_micro_batches = encode_micro_batches
        self.group_max_active = math.ceil(encode_batch / num_groups)
        self.group_kv_tokens = kv_tokens // num_groups
        self.waiting: deque[Waiting] = deque()
        self._batch = _Batch(num_groups, self.group_kv_tokens)
        self._phase = -1  # number of the batch
        self._iteration = 0  # 0: encoding
        self._group = 0
        self._part = 0  # number of the group's ENCODE step

    @property
    def reserved_tokens(self) -> int:
        return self._batch.reserved_tokens

    @property
    def needs_tokens(self) -> bool:
        return self._iteration > 0

    def submit(self, query: int, reserve_tokens: int, input_tokens: int = 0) -> bool:
        assert reserve_tokens >= input_tokens >= 0, f"{reserve_tokens = } {input_tokens = }"
        if reserve_tokens > self.group_kv_tokens:
            return False
        self.waiting.append(Waiting(query, reserve_tokens, input_tokens))
        return True

    def next_group(self) -> int | None:
        if not self._batch.unfinished:
            if not self.waiting:
                return None
            self._fill_batch()
        return self._group

    def decide(self) -> Step | None:
        group, members = self._group, self._batch.groups[self._group]
        if not self._batch.unfinished:
            return None  # these tokens were the batch's last
        if self._iteration > 0:
            step = Step(kind=StepKind.DECODE, group=group, phase=self._phase,
                        iteration=self._iteration) if members else None
        else:
            joined = self._part_of(members)
            step = Step(kind=StepKind.ENCODE, group=group, phase=self._phase, iteration=0,
                        joined=joined) if joined else None
        self._advance()
        return step

    def finish(self, query: int) -> None:
        self._batch.unfinished.remove(query)
        if not self._batch.unfinished:  # only now is all its KV free
            self._batch = _Batch(self.num_groups, self.group_kv_tokens)

    def quota(self, group: int) -> int:
        """Number of requests of a full batch that `group` takes; they sum to encode_batch."""
        base, odd = divmod(self.encode_batch, self.num_groups)
        return base + (group < odd)

    def _fill_batch(self) -> None:
        """Forms the next batch in the input's order; a smaller one if the KV share is too small."""
        self._phase, self._iteration, self._group, self._part = self._phase + 1, 0, 0, 0
        for group in range(self.num_groups):
            for _ in range(self.quota(group)):
                if not self.waiting or not self._batch.add(group, self.waiting[0]):
                    break
                self.waiting.popleft()

    def _part_of(self, members: list[int]) -> tuple[int, ...]:
        parts = self.encode_micro_batches // self.num_groups
        first, end = (len(members) * place // parts for place in (self._part, self._part + 1))
        return tuple(members[first:end])

    def _advance(self) -> None:
        if self._iteration == 0 and self._part + 1 < self.encode_micro_batches // self.num_groups:
            self._part += 1
            return
        self._part = 0
        self._group += 1
        if self._group == self.num_groups:
            self._group, self._iteration = 0, self._iteration + 1


def static_rule(estimate: Estimate) -> StaticRule:
    """The rule that executes `estimate` of policy "ft" or "dsi"."""
    controls, deployment = estimate.controls, estimate.deployment
    assert isinstance(controls, StaticControls), f"{estimate.policy = }"
    return StaticRule(
        encode_batch=controls.encode_batch, num_groups=deployment.num_groups,
        encode_micro_batches=controls.encode_micro_batches, kv_tokens=deployment.kv_tokens)
