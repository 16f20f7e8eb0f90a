"""Executes a run with vLLM: `PYTHON -m xrunner.backends.vllm.vllm_worker OUT/run.json`.

It is one process, in the interpreter that has vLLM, besides those that vLLM starts for a
tensor-parallel group. It decides by the schedule's rule, steps vLLM, and writes what every engine's
first rank writes."""

if __name__ == "__main__":  # before what takes seconds to import
    from xgpt.core.system.lifeline import begin_rank

    begin_rank()

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from xgpt.core.prefixes import Prefixes, in_blocks
from xgpt.core.schedule import Schedule
from xgpt.core.schedule_file import load_schedule
from xgpt.core.units import DTYPE_BYTES
from xgpt.requests.chat import has_form
from xgpt.requests.spool import Spool
from xrunner.backends.executor import DecoderOnly
from xrunner.backends.vllm.core import CoreSettings, EngineCore, Token, await_grammar, parameters_of
from xrunner.backends.vllm.row import QUIET, TOOL_PARSER, block_tokens, engine_arguments
from xrunner.backends.vllm.tool_calls import ToolCallFinder
from xrunner.checkpoint.source import read_spec
from xrunner.comm.messages import StartMessage, StepMessage
from xrunner.engine.head import Head
from xrunner.engine.pipeline import SINGLE_RANK, Neighbours
from xrunner.engine.pool_requests import Vocabulary
from xrunner.files.heartbeat import Heartbeat
from xrunner.files.launcher_link import LauncherLink
from xrunner.files.sink import RunSink
from xrunner.files.tokenizer import TextTokenizer, eos_ids
from xrunner.ops.likelihoods import as_row, packed
from xrunner.ops.sampling import NOT_FINITE
from xrunner.plan import RunPlan, load_plan
from xrunner.query import FinishedQuery, PreparedQuery
from xrunner.rank.lifecycle import (
    Stopwatch,
    end_process,
    open_requests,
    run_head,
    run_order,
    run_rank,
)
from xrunner.rank.world import World, connect
from xrunner.rules.changes import Changeable
from xrunner.rules.prefixes import set_prefixes
from xrunner.rules.rra import RraRule
from xrunner.rules.slots import GroupSlots
from xrunner.rules.steps import StepKind, rules_for
from xrunner.step_record import StepSizes, decoded_sizes, equal_input_tokens


def main(arguments: list[str]) -> int:
    """Runs the engine's process; returns its exit code."""
    return run_rank(load_plan(Path(arguments[0])), connect, run)


def run(plan: RunPlan, world: World) -> None:
    """Runs the schedule in the plan's folder from the first request to the last."""
    schedule = load_schedule(plan.output / "schedule.json")
    (rule,) = rules_for(schedule.estimate)  # one pool: the engine's row refuses others
    os.environ.update(QUIET)
    queries, num_errors, before = open_requests(plan)
    clock = Stopwatch()
    sink = RunSink(plan, num_queries=len(queries), before=before, **_parsed(plan))
    heads: list[Head] = []
    refusals = Refusals(plan)

    def tokens_of(query: int, count: int) -> tuple[Sequence[int], int]:
        active = heads[0].requests.active[query]
        return active.tokens(0, count), count - active.input_tokens

    prefixes = sink.sharing.prefixes = _shared_prefixes(plan)
    set_prefixes(rule, prefixes)

    def make_core(message: StartMessage) -> EngineCore:
        return EngineCore(settings_of(plan, schedule, message, prefixes=prefixes,
                                      needs_tokenizer=refusals.are_forms))

    heartbeat = Heartbeat(plan.output, rank=0, stage=0, pool=schedule.deployment.pools[0].name)
    heartbeat.start()
    executor = VllmExecutor(make_core, tokens_of, clock=clock, heartbeat=heartbeat)
    head = Head(rule=rule, executor=executor, sink=sink, clock=clock,
                neighbours=Neighbours(world.comm, SINGLE_RANK),
                vocabulary=Vocabulary(eos_ids=eos_ids(plan.model_dir),
                                      decode_text=TextTokenizer(plan.model_dir).decode))
    head.requests.on_begin = sink.underway.begin
    heads.append(head)
    order = list(run_order(len(queries), plan, before))
    _watch(plan, head, sink, order, first_query=before.total, limit_s=schedule.bound.limit_s)
    for place in order:
        query = queries[place]
        if (why := refusals.of(query)) is not None:
            sink.finished(FinishedQuery(
                query=query, output_ids=(), finish_reason="error", text="", encode_start_s=0.0,
                first_token_s=0.0, last_token_s=0.0, error=why))
            continue
        is_taken = head.submit(query)
        assert is_taken, f"{query.id = } {query.reserve_tokens = }"
    started_s = clock()
    head.start()
    load_s = clock() - started_s
    try:
        run_head(head, sink, world, clock, queries_before=before.total, num_errors=num_errors,
                report=lambda: executor.report(0, load_s, plan.model_dir,
                                               executor.peak_memory_bytes(), version_words()))
    finally:
        executor.close()


def _watch(plan: RunPlan, head: Head, sink: RunSink, order: Sequence[int], *,
           first_query: int, limit_s: float) -> None:
    """Makes room for schedule changes and, if lengths are watched, links to the launcher."""
    rule = head.rule
    is_rra = isinstance(rule, RraRule)
    if isinstance(rule, RraRule):
        rule.make_room(plan.slots)
    if plan.is_watched and isinstance(rule, Changeable):
        sink.launcher = LauncherLink(plan.output, first_query=first_query, rule=rule,
                                     limit_s=limit_s,
                                     at_work=head.lengths_so_far if is_rra else None)
        sink.launcher.begin(order)


def _shared_prefixes(plan: RunPlan) -> Prefixes | None:
    """The prefixes that requests share, in whole blocks; None if they share none."""
    found = Spool(plan.output).prefixes if plan.shares_prefixes else None
    return found and in_blocks(found, block_tokens(plan.engine_args, plan.device_kind),
                               is_whole=True)


def _parsed(plan: RunPlan) -> dict[str, Any]:
    """Arguments of RunSink that find tool calls, if the job names a parser."""
    parser = plan.engine_args.get(TOOL_PARSER)
    return {} if parser is None else {"parsed": ToolCallFinder(parser, plan.model_dir)}


def settings_of(plan: RunPlan, schedule: Schedule, message: StartMessage, *,
                needs_tokenizer: bool = False, prefixes: Prefixes | None = None) -> CoreSettings:
    """Settings of vLLM for as many requests as the rule has at once, and prefixes beside them."""
    queries = message.slots * message.num_groups
    most_tokens = queries * message.capacity + (
        0 if prefixes is None else int(prefixes.own_tokens.sum()))
    spec = read_spec(plan.model_dir, plan.model_name)
    return CoreSettings(
        model_dir=plan.model_dir, dtype=plan.dtype, threads=plan.threads_per_rank,
        max_queries=queries, device_kind=plan.device_kind,
        tp_degree=schedule.deployment.num_devices,
        max_tokens=min(message.capacity + 1, spec.max_positions or message.capacity + 1),
        kv_token_bytes=(spec.kv_elements_per_token_layer * spec.num_layers
                        * DTYPE_BYTES[plan.dtype]),
        kv_tokens=min(schedule.deployment.kv_tokens, most_tokens),
        has_prefixes=prefixes is not None, needs_tokenizer=needs_tokenizer,
        arguments=plan.engine_args)


def version_words() -> str:
    """vLLM's version, for the run's figures."""
    import vllm

    return f"vLLM {vllm.__version__}"


class Refusals:
    """Finds requests that vLLM cannot answer before the run, so that others do not suffer. It tries
    their sampling parameters and compiles their grammars with a configuration of vLLM, without its
    model. For jobs that need neither, vLLM is not imported."""

    def __init__(self, plan: RunPlan) -> None:
        self._plan, self.are_forms = plan, False  # whether some outputs follow a grammar

    @cached_property
    def _judges(self) -> tuple[Any, Any]:
        """(vLLM's configuration, its compiler of grammars)."""
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.structured_output import StructuredOutputManager

        folder = self._plan.model_dir
        config = EngineArgs(**{
            "model": str(folder), "dtype": self._plan.dtype, "trust_remote_code": False,
            "skip_tokenizer_init": not (folder / "tokenizer_config.json").is_file(),
            **engine_arguments(self._plan.engine_args)}).create_engine_config()
        return config, StructuredOutputManager(config)

    def of(self, query: PreparedQuery) -> str | None:
        """Why vLLM cannot answer the request; None if it can."""
        sampling, inputs = query.sampling, list(query.input_ids)
        if not sampling.passed:
            return None
        is_form = has_form(sampling.passed)
        if is_form and not TextTokenizer(self._plan.model_dir).is_there:
            return "the model's folder has no tokenizer, which vLLM needs for a structured output"
        config, manager = self._judges
        from vllm.v1.request import Request

        try:
            parameters = parameters_of(sampling, len(inputs), config, query.max_new_tokens)
            if is_form:
                request = Request(request_id=query.id, prompt_token_ids=inputs,
                                  sampling_params=parameters, pooling_params=None)
                manager.grammar_init(request)
                await_grammar(request)
        except Exception as cause:  # a grammar compiler raises any error
            return f"vLLM: {str(cause).strip() or type(cause).__name__}"
        self.are_forms |= is_form
        return None


# token of a full request in an unfinished batch
_DEAD = Token(0)


class VllmExecutor(DecoderOnly):
    """Executes the rule's steps with one vLLM request per slot. An evicted request is removed, and
    returns as a new one whose input is all its tokens."""

    def __init__(self, make_core: Callable[[StartMessage], EngineCore],
                 tokens_of: Callable[[int, int], tuple[Sequence[int], int]], *,
                 clock: Callable[[], float] = time.perf_counter,
                 heartbeat: Heartbeat | None = None) -> None:
        """`make_core`: starts a core with caches of the sizes in the start message. `tokens_of`:
        first tokens of a request, and how many of these are its own output. vLLM wants them at
        once, though steps bring them in chunks."""
        super().__init__(clock, heartbeat)
        self._make_core, self._tokens_of, self._numbers = make_core, tokens_of, count()
        self._core: EngineCore
        self._groups: list[GroupSlots[str]] = []
        self._ended: set[str] = set()  # requests that are full
        self._held: dict[str, int] = {}  # cached tokens of each request
        self.passes = 0

    def start(self, message: StartMessage) -> None:
        self._core = self._make_core(message)
        self._groups = [GroupSlots() for _ in range(message.num_groups)]

    def peak_memory_bytes(self) -> int:
        """Peak memory of the engine's processes in bytes."""
        return self._core.peak_memory_bytes()

    def close(self) -> None:
        """Ends the core's processes, if it has started."""
        if hasattr(self, "_core"):
            self._core.close()

    def execute(self, message: StepMessage, inputs: Tensor) -> Tensor:
        """Next tokens [n]: of decoding requests by slot, then of those whose encoding ends. Packed
        with likelihoods where asked for (xrunner.ops.likelihoods.packed). `inputs`: tokens; vLLM
        already has those of decoding requests."""
        if self.heartbeat is not None:
            self.heartbeat.begin(message)
        start_s, slots = self._clock(), self._groups[message.group]
        self._leave(slots, message.removed)
        self._core.release(message.released)
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
        gained, was_ended = dict[str, Token](), frozenset(self._ended)
        for wanted_of in passes([one for one in wanted if one[0] not in self._ended],
                                self._core.max_pass):
            gained |= self._core.step(wanted_of)
            self.passes += 1
        self._ended.update(name for name, token in gained.items() if token.is_end)
        given = [slots.seats[slot] for slot in decoding] + ends
        self.record(message, len(given), len(inputs), start_s, sizes,
                    seats=sum(len(slots.seats) for slots in self._groups))
        tokens_given = [_DEAD if name in was_ended else gained[name] for name in given]
        tokens = torch.tensor([token.value if token.is_finite else NOT_FINITE
                               for token in tokens_given], dtype=torch.long)
        known = [token.likelihood for token in tokens_given]
        return packed(tokens, [None if one is None else as_row(one) for one in known]) if any(
            known) else tokens

    def _leave(self, slots: GroupSlots[str], removed: Sequence[int]) -> None:
        self._end([slots.seats[slot] for slot in removed])
        slots.compact(removed)

    def _end(self, names: Sequence[str]) -> None:
        self._core.end([name for name in names if name not in self._ended])
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
            names.append(f"{new.query}.{next(self._numbers)}")
            tokens, generated = self._tokens_of(new.query, new.input_tokens)
            self._core.add(names[-1], tokens, new.sampling, generated, new.start)
            self._held[names[-1]] = new.start.first if new.start else 0
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


def passes(wanted: Sequence[tuple[str, int]], most: int) -> Iterator[dict[str, int]]:
    """Divides the `wanted` tokens of each request, in order, into passes of at most `most`
    tokens."""
    current: dict[str, int] = {}
    for name, tokens in wanted:
        while tokens:
            taken = min(tokens, most - sum(current.values()))
            current[name] = taken
            tokens -= taken
            if sum(current.values()) == most:
                yield current
                current = {}
    if current:
        yield current


if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
