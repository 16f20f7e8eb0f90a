"""Static batching of FasterTransformer (FT) and DeepSpeed-Inference (DSI), paper section 2, Figure
1: a batch is encoded and decoded until its longest request is done; then comes the next.

FT uses the same micro-batches in both phases; DSI encodes each decode group in several parts. No
request leaves early: finished rows keep decoding, and their contexts grow.

Batches are cut from the input's order, or formed by deadlines and forecasts (`BatchFormer`). Those
are decoded to their longest forecast: who is not done by then waits again, with its tokens."""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice

from xgpt.core.controls import Batches, StaticControls
from xgpt.core.schedule import Estimate
from xrunner.rules.forecast import Forecaster
from xrunner.rules.room import Caps, Waiting
from xrunner.rules.slots import SlotUse
from xrunner.rules.steps import Step, StepKind

OVERHEAD = 1.2  # chosen: growth of a batch's cost with its size (UELLM's L1 and L2)


class BatchFormer:
    """Orders waiting requests and forms the next batch of them (UELLM's SLO-ODBS, S3's packing).

    A request's place is its weighted deadline and forecast; equal ones keep their order. One
    without a deadline comes last."""

    def __init__(self, batches: Batches, *, most: int, num_groups: int,
                 group_kv_tokens: int) -> None:
        """`most`: most requests of a batch. `group_kv_tokens`: KV budget of each group."""
        self.batches, self.most = batches, min(most, batches.most)
        self.forecaster: Forecaster = Caps()
        # seconds from the job's start, by query; None: no deadlines
        self.deadlines_s: Sequence[float] | None = None
        self._longest = (0, 0)  # input and output tokens
        self._num_groups, self._group_kv_tokens = num_groups, group_kv_tokens

    def note(self, input_tokens: int, output_tokens: int) -> None:
        """Records a request's sizes: no row is longer than the longest input and output together,
        which caches are made for."""
        self._longest = max(self._longest[0], input_tokens), max(self._longest[1], output_tokens)

    def output_of(self, one: Waiting) -> int:
        """Output tokens that a request is still to write, by its forecast."""
        forecast = one.forecast or self.forecaster.first(one.input_tokens, one.cap)
        return min(max(forecast - one.written, 1), one.cap - one.written)

    def line(self, waiting: Iterable[Waiting]) -> list[Waiting]:
        """The waiting requests in the order in which batches take them."""
        def key(one: Waiting) -> tuple[bool, float]:
            due_s = self._due_s(one)
            return due_s == 0.0, own.deadline * due_s + own.length * self.output_of(one)

        own = self.batches
        return sorted(waiting, key=key)

    def _due_s(self, one: Waiting) -> float:
        """The deadline; 0 for none, or where deadlines do not count."""
        if self.deadlines_s is None or not self.batches.deadline:
            return 0.0
        due_s = self.deadlines_s[one.query]
        return due_s if math.isfinite(due_s) else 0.0

    def take(self, line: Sequence[Waiting], first: int = 0) -> int:
        """End of the batch that begins with `line[first]`."""
        own, latest_s, longest, widest, packed = self.batches, 0.0, 0, 0, 0
        threshold, pack = own.threshold or math.inf, own.pack or math.inf
        for place in range(first, len(line)):
            new, count = line[place], place - first
            due_s, output, sign = self._due_s(new), self.output_of(new), -1 if own.growth else 1
            cost = (count + 1) * OVERHEAD * (own.deadline * (due_s + latest_s)
                                             + own.length * (output + sign * longest))
            latest_s, longest = max(latest_s, due_s), max(longest, output)
            widest, packed = max(widest, new.tokens), packed + output
            row = widest + longest
            room = self._num_groups * (self._group_kv_tokens // row)
            is_beyond = (cost > threshold or packed > pack or row > sum(self._longest)
                         or count >= min(self.most, room))
            if count and is_beyond:
                return place
        return len(line)


def padding(inputs: Sequence[int], outputs: Sequence[int]) -> tuple[int, int]:
    """(padded input tokens, superfluous output tokens) of a batch of these lengths: what an engine
    computes beside them that pads every row to the longest. FT's runner pads no input."""
    padded, superfluous = (len(own) * max(own) - sum(own) for own in (inputs, outputs))
    return padded, superfluous


class _Batch:
    """Requests of one batch by group, and the KV tokens they reserve. Each reserves its input and
    the longest output of the batch, since its row is decoded that long."""

    def __init__(self, num_groups: int, group_kv_tokens: int) -> None:
        self.groups: list[list[int]] = [[] for _ in range(num_groups)]
        self.unfinished: dict[int, Waiting] = {}
        self.output = 0  # longest, in tokens
        self._inputs = [0] * num_groups
        self._group_kv_tokens = group_kv_tokens

    @property
    def reserved_tokens(self) -> int:
        return sum(self._group_tokens(group, self.output) for group in range(len(self.groups)))

    def add(self, group: int, new: Waiting, output: int) -> bool:
        """Adds `new`, which is to write `output` tokens, to `group`; False if a group would then
        reserve more than its share."""
        output = max(self.output, output)
        tokens = [self._group_tokens(each, output) for each in range(len(self.groups))]
        tokens[group] += new.tokens + output
        if max(tokens) > self._group_kv_tokens:
            return False
        self.groups[group].append(new.query)
        self.unfinished[new.query] = new
        self._inputs[group] += new.tokens
        self.output = output
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
                 kv_tokens: int, batches: Batches | None = None, evicts: bool = False) -> None:
        """`encode_micro_batches`: steps that encode a batch, a multiple of `num_groups`.
        `kv_tokens`: KV budget of the whole pool; each group gets an equal share. `batches`: how
        they are formed (None: in the input's order). `evicts`: batches end with their longest
        forecast, whoever is not done."""
        assert encode_batch >= 1 and num_groups >= 1, f"{encode_batch = } {num_groups = }"
        assert encode_micro_batches >= num_groups and encode_micro_batches % num_groups == 0, (
            f"{encode_micro_batches = } is no multiple of {num_groups = }")
        self.encode_batch = encode_batch
        self.num_groups = num_groups
        self.encode_micro_batches = encode_micro_batches
        self.group_max_active = math.ceil(encode_batch / num_groups)
        self.group_kv_tokens = kv_tokens // num_groups
        self.waiting: deque[Waiting] = deque()
        self.former = None if batches is None else BatchFormer(
            batches, most=encode_batch, num_groups=num_groups,
            group_kv_tokens=self.group_kv_tokens)
        self.evicts = evicts
        self.forecaster: Forecaster = Caps()  # of requests without a forecast
        self._is_line = True  # whether those waiting are in the order of batches
        self._evicted: tuple[int, ...] = ()  # not told to the stages yet
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

    def submit(self, query: int, reserve_tokens: int, input_tokens: int = 0,
               forecast: int = 0) -> bool:
        assert reserve_tokens >= input_tokens >= 0, f"{reserve_tokens = } {input_tokens = }"
        if reserve_tokens > self.group_kv_tokens:
            return False
        self.waiting.append(Waiting(query, reserve_tokens, input_tokens, 0, forecast))
        if self.former is not None:
            self.former.note(input_tokens, reserve_tokens - input_tokens)
            self._is_line = False
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
        if self.evicts and self._iteration >= self._batch.output:
            self._advance()
            if self._group == 0:  # the tokens of all groups are here
                self._give_up()
            return None
        if self._iteration > 0:
            step = Step(kind=StepKind.DECODE, group=group, phase=self._phase,
                        iteration=self._iteration) if members else None
        else:
            joined = self._part_of(members)
            step = Step(kind=StepKind.ENCODE, group=group, phase=self._phase, iteration=0,
                        joined=joined, evicted=self._evicted) if joined else None
            self._evicted = () if joined else self._evicted
        self._advance()
        return step

    def finish(self, query: int) -> None:
        one = self._batch.unfinished.pop(query)
        self.forecaster.ended(one.input_tokens, one.written + self._iteration)
        if not self._batch.unfinished:  # only now is all its KV free
            self._batch = _Batch(self.num_groups, self.group_kv_tokens)

    def _fill_batch(self) -> None:
        """Forms the next batch; in the input's order a smaller one if the KV share is too small."""
        self._phase, self._iteration, self._group, self._part = self._phase + 1, 0, 0, 0
        size, former = self.encode_batch, self.former
        if former is not None:
            former.forecaster = self.forecaster
            if not self._is_line:
                self.waiting = deque(former.line(self.waiting))
            self._is_line = not self.evicts  # else forecasts may change meanwhile
            size = former.take(self.waiting)
        base, odd = divmod(size, self.num_groups)
        for group in range(self.num_groups):
            for new in list(islice(self.waiting, base + (group < odd))):
                output = new.cap if former is None else former.output_of(new)
                if not self._batch.add(group, new, output):
                    break
                self.waiting.popleft()

    def _give_up(self) -> None:
        """Puts those of the batch that are not done back in line, with the tokens they have."""
        left, output = self._batch.unfinished, self._batch.output
        for one in reversed(left.values()):
            written = one.written + output
            self.waiting.appendleft(one._replace(
                tokens=one.tokens + output, written=written, has_begun=True,
                forecast=self.forecaster.beyond(one.input_tokens, written, one.cap)))
        self._evicted = tuple(left)
        self._batch = _Batch(self.num_groups, self.group_kv_tokens)

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
        encode_micro_batches=controls.encode_micro_batches, kv_tokens=deployment.kv_tokens,
        batches=controls.batches,
        evicts=controls.batches is not None and controls.forecast.may_be_outgrown)
