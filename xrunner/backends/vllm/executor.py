"""Executes the rule's steps with vLLM: one request of vLLM's per slot."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import Any

import torch
from torch import Tensor

from xgpt.core.errors import XgptError
from xgpt.core.units import format_seconds
from xgpt.requests.chat import has_form
from xrunner.backends.executor import DecoderOnly
from xrunner.backends.vllm.child import LOAD_LIMIT_S, EngineChild
from xrunner.backends.vllm.protocol import Added, Check, Request, SharedStart, Step, Token
from xrunner.backends.vllm.settings import EngineSettings, base_arguments
from xrunner.comm.messages import StartMessage, StepMessage
from xrunner.devices import Arriving
from xrunner.engine.pipeline import ExecutorDied
from xrunner.engine.pool_requests import PoolRequests
from xrunner.files.heartbeat import Heartbeat
from xrunner.files.tokenizer import TextTokenizer
from xrunner.ops.likelihoods import as_row, packed
from xrunner.ops.sampling import NOT_FINITE
from xrunner.plan import RunPlan
from xrunner.query import PreparedQuery
from xrunner.rules.slots import GroupSlots
from xrunner.rules.steps import StepKind
from xrunner.step_record import StepSizes, decoded_sizes, equal_input_tokens

# token of a full request in an unfinished batch
_DEAD = Token(0)


class _Underway(Arriving):
    """Tokens of a step that has begun. `take`: reads what vLLM gave. `underway`: such steps, oldest
    first."""

    def __init__(self, take: Callable[[Mapping[str, Token]], Tensor], child: EngineChild,
                 underway: deque[_Underway]) -> None:
        self._take, self._child, self._underway = take, child, underway
        self._tokens: Tensor | None = None
        underway.append(self)

    def wait(self) -> Tensor:
        while self._tokens is None:
            oldest = self._underway.popleft()
            oldest._tokens = oldest._take(self._child.finish())
        return self._tokens


class VllmExecutor(DecoderOnly):
    """Executes the rule's steps in a vLLM engine. An evicted request is removed, and returns as a
    new one whose input is all its tokens."""

    def __init__(self, child: EngineChild, plan: RunPlan,
                 settings_of: Callable[[StartMessage], EngineSettings], *,
                 clock: Callable[[], float] = time.perf_counter,
                 heartbeat: Heartbeat | None = None) -> None:
        """`settings_of`: settings of an engine with caches of the sizes in the start message."""
        super().__init__(clock, heartbeat)
        self.child, self._plan, self._settings_of = child, plan, settings_of
        self._numbers = count()
        self._requests: PoolRequests
        self._groups: list[GroupSlots[str]] = []
        self._ended: set[str] = set()  # requests that are full
        self._held: dict[str, int] = {}  # cached tokens of each request
        self._joining, self._leaving = list[Added](), list[str]()  # with the next step
        self._underway = deque[_Underway]()
        self._num_stages, self._ended_s = 1, 0.0  # the second: when a step last ended
        self.restarts = self.peak_bytes = 0
        self._death: ExecutorDied | None = None  # that `is_ready` is to tell

    def attach(self, requests: PoolRequests) -> None:
        self._requests = requests

    def start(self, message: StartMessage) -> None:
        """Loads the engine and waits for it; where one has died, starts another, which `is_ready`
        later."""
        is_first = not self._groups
        self._groups = [GroupSlots() for _ in range(message.num_groups)]
        self._ended.clear()
        self._held.clear()
        self._joining, self._leaving, self._death = [], [], None
        self.restarts += not is_first
        self._underway.clear()
        settings = self._settings_of(message)
        self._num_stages = len(settings.stages)
        self._note(f"loading vLLM, at most {format_seconds(LOAD_LIMIT_S)}")
        self.child.load(settings.load)
        if is_first:
            self._await_first()

    def _await_first(self) -> None:
        """Waits for the engine. Raises XgptError if it does not start: nothing is tried again."""
        try:
            self.child.await_ready()
        except ExecutorDied as death:
            raise XgptError(str(death)) from death
        self._note("")

    @property
    def is_ready(self) -> bool:
        if (death := self._death) is not None:
            self._death = None
            raise death
        is_ready = self.child.await_ready(0.0)
        if is_ready:
            self._note("")
        return is_ready

    def _note(self, words: str) -> None:
        if self.heartbeat is not None:
            self.heartbeat.note = words
            self.heartbeat.restarts = self.restarts

    def refusal(self, query: PreparedQuery) -> str | None:
        if not query.sampling.passed:
            return None
        folder = self._plan.model_dir
        if has_form(query.sampling.passed) and not TextTokenizer(folder).is_there:
            return "the model's folder has no tokenizer, which vLLM needs for a structured output"
        try:
            why: str | None = self.ask(Check(
                base_arguments(folder, self._plan.dtype, self._plan.engine_args),
                list(query.input_ids), query.sampling, query.max_new_tokens))
        except ExecutorDied as death:
            return f"vLLM cannot judge it: {death}"
        return why

    def ask(self, question: Request) -> Any:
        """The child's answer, or where it dies the next one's; `is_ready` tells of the death.
        Raises ExecutorDied where that dies, too."""
        try:
            return self.child.ask(question)
        except ExecutorDied as death:
            self._death = death
            return self.child.ask(question)

    def close(self) -> None:
        """Ends the engine's processes, and keeps their peak memory."""
        with suppress(ExecutorDied):
            self.peak_bytes = self.child.peak_memory_bytes()
        self.child.close()

    def execute(self, message: StepMessage, inputs: Tensor) -> Arriving:
        """Next tokens [n]: of decoding requests by slot, then of those whose encoding ends. Packed
        with likelihoods where asked for (xrunner.ops.likelihoods.packed). `inputs`: tokens; vLLM
        already has those of decoding requests. As many steps as the engine has stages are under
        way at a time. Raises ExecutorDied."""
        if self.heartbeat is not None:
            self.heartbeat.begin(message)
        start_s, slots = self._clock(), self._groups[message.group]
        self._end([slots.seats[slot] for slot in message.removed])
        slots.compact(message.removed)
        decoding = self._decoding(message, slots)
        joined = self._join(message, slots)
        decoded = [(slots.seats[slot], 1) for slot in decoding]
        encoded, ends = list[tuple[str, int]](), list[str]()
        if message.spans:
            encoded = [(slots.seats[span.slot], span.tokens) for span in message.spans]
            ends = [slots.seats[span.slot] for span in message.spans if span.is_last]
        elif message.kind is StepKind.ENCODE:
            encoded = [(name, new.input_tokens)
                       for name, new in zip(joined, message.joined, strict=True)]
            ends = joined
        sizes, wanted = self._sizes(decoded, encoded), decoded + encoded
        was_ended = frozenset(self._ended)
        given = [slots.seats[slot] for slot in decoding] + ends
        self.child.send(Step([one for one in wanted if one[0] not in was_ended], self._joining,
                              self._leaving, message.released))
        self._joining, self._leaving = [], []

        def take(gained: Mapping[str, Token]) -> Tensor:
            self._ended.update(name for name, token in gained.items() if token.is_end)
            # its time on a stage: from the step before it, or an equal part of all
            seconds = (now_s := self._clock()) - max(start_s, self._ended_s)
            seconds *= min(len(self._groups), self._num_stages) / self._num_stages
            self.record(message, len(given), len(inputs), now_s - seconds, sizes,
                        seats=sum(len(slots.seats) for slots in self._groups))
            self._ended_s = self.log[-1].end_s
            tokens_given = [_DEAD if name in was_ended else gained[name] for name in given]
            tokens = torch.tensor([token.value if token.is_finite else NOT_FINITE
                                   for token in tokens_given], dtype=torch.long)
            known = [token.likelihood for token in tokens_given]
            return packed(tokens, [None if one is None else as_row(one) for one in known]) if any(
                known) else tokens

        step = _Underway(take, self.child, self._underway)
        if len(self._underway) == self._num_stages:
            self._underway[0].wait()
        return step

    def _end(self, names: Sequence[str]) -> None:
        self._leaving += [name for name in names if name not in self._ended]
        for name in names:
            del self._held[name]
        self._ended.difference_update(names)

    def _decoding(self, message: StepMessage, slots: GroupSlots[str]) -> list[int]:
        """Slots that decode in this step, before others join."""
        if message.kind is StepKind.ENCODE:
            return []
        others = {*message.replaced, *message.resting}
        return [slot for slot in range(len(slots.seats)) if slot not in others]

    def _join(self, message: StepMessage, slots: GroupSlots[str]) -> list[str]:
        self._end([slots.seats[slot] for slot in message.replaced])
        names = []
        for new in message.joined:
            name = f"{new.query}.{next(self._numbers)}"
            active, start = self._requests.active[new.query], new.start
            # vLLM wants all tokens at once, though steps bring them in chunks
            self._joining.append(Added(
                name, list(active.tokens(0, new.input_tokens)), new.sampling,
                new.input_tokens - active.input_tokens,
                None if start is None else SharedStart(start.first, start.node, start.writes)))
            self._held[name] = start.first if start else 0
            names.append(name)
        slots.fill(names, message.replaced)
        return names

    def _sizes(self, decoded: Sequence[tuple[str, int]],
               encoded: Sequence[tuple[str, int]]) -> StepSizes:
        """Sizes of the step; also counts its tokens as cached."""
        held = self._held
        sizes = decoded_sizes([held[name] + 1 for name, _ in decoded])._replace(
            input_tokens=equal_input_tokens([(held[name], tokens) for name, tokens in encoded]))
        for name, tokens in (*decoded, *encoded):
            held[name] += tokens
        return sizes
