"""vLLM at work on a run: `PYTHON -m xrunner.backends.vllm.vllm_worker OUT/run.json`, in the
interpreter that has vLLM. One process, whatever vLLM starts itself (of a tensor-parallel group, the
others); it decides by the schedule's rule, steps vLLM, and writes what every engine's first
rank writes."""

if __name__ == "__main__":  # before what takes seconds to import
    from xgpt.core.lifeline import begin_rank

    begin_rank()

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from xgpt.core.passed import has_form
from xgpt.core.schedule import Schedule
from xgpt.core.schedule_file import load_schedule
from xgpt.core.units import DTYPE_BYTES
from xrunner.backends.vllm.core import QUIET, CoreSettings, EngineCore, await_form, parameters_of
from xrunner.backends.vllm.executor import VllmExecutor
from xrunner.backends.vllm.row import TOOL_PARSER, engine_arguments
from xrunner.backends.vllm.tool_calls import CallsFinder
from xrunner.checkpoint.source import read_spec
from xrunner.comm.messages import StartMessage
from xrunner.engine.head import Head
from xrunner.engine.pipeline import ALONE, Neighbours, RankReport
from xrunner.engine.roster import Vocabulary
from xrunner.files.beat import Beat
from xrunner.files.launcher_link import LauncherLink
from xrunner.files.sink import RunSink
from xrunner.files.tokenizer import TextTokenizer, eos_ids
from xrunner.plan import RunPlan, load_plan
from xrunner.query import FinishedQuery, PreparedQuery
from xrunner.rank.lead import Stopwatch, conduct, leave, order_of, read_work, to_the_end
from xrunner.rank.world import World, connect
from xrunner.rules.changes import Changeable
from xrunner.rules.rra import RraRule
from xrunner.rules.steps import rules_for


def main(arguments: list[str]) -> int:
    return to_the_end(load_plan(Path(arguments[0])), connect, run)


def run(plan: RunPlan, world: World) -> None:
    """The run of the schedule in the plan's folder, from its first query to its last."""
    schedule = load_schedule(plan.output / "schedule.json")
    (rule,) = rules_for(schedule.estimate)  # of one pool: the engine's row refuses others
    os.environ.update(QUIET)
    queries, num_errors, before = read_work(plan)
    clock = Stopwatch()
    sink = RunSink(plan, num_queries=len(queries), before=before, **_parsed(plan))
    heads: list[Head] = []
    refusals = Refusals(plan)

    def tokens_of(query: int, count: int) -> tuple[Sequence[int], int]:
        active = heads[0].roster.active[query]
        return active.tokens(0, count), count - active.input_tokens

    def make_core(message: StartMessage) -> EngineCore:
        return EngineCore(settings_of(plan, schedule, message,
                                      needs_tokenizer=refusals.are_forms))

    beat = Beat(plan.output, rank=0, stage=0, pool=schedule.deployment.pools[0].name)
    beat.start()
    executor = VllmExecutor(make_core, tokens_of, clock=clock, beat=beat)
    head = Head(rule=rule, executor=executor, sink=sink, clock=clock,
                neighbours=Neighbours(world.comm, ALONE),
                vocabulary=Vocabulary(eos_ids=eos_ids(plan.model_dir),
                                      decode_text=TextTokenizer(plan.model_dir).decode))
    head.roster.on_begin = sink.underway.begin
    heads.append(head)
    order = list(order_of(len(queries), plan, before))
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
        conduct(head, sink, world, clock, queries_before=before.total, num_errors=num_errors,
                report=lambda: _report(plan, executor, load_s))
    finally:
        executor.close()


def _watch(plan: RunPlan, head: Head, sink: RunSink, order: Sequence[int], *,
           first_query: int, limit_s: float) -> None:
    """Room for what the launcher may change the schedule to, and, where it follows the lengths, the
    link to it."""
    rule = head.rule
    is_rra = isinstance(rule, RraRule)
    if isinstance(rule, RraRule):
        rule.make_room(plan.slots)
    if plan.is_watched and isinstance(rule, Changeable):
        sink.launcher = LauncherLink(plan.output, first_query=first_query, rule=rule, order=order,
                                     limit_s=limit_s,
                                     at_work=head.lengths_so_far if is_rra else None)


def _parsed(plan: RunPlan) -> dict[str, Any]:
    """What finds calls of tools, where the job names a parser of vLLM's."""
    parser = plan.engine_args.get(TOOL_PARSER)
    return {} if parser is None else {"parsed": CallsFinder(parser, plan.model_dir)}


def settings_of(plan: RunPlan, schedule: Schedule, message: StartMessage, *,
                needs_tokenizer: bool = False) -> CoreSettings:
    """What vLLM is started with: room for what the rule lets be there at once."""
    queries = message.slots * message.num_groups
    spec = read_spec(plan.model_dir, plan.model_name)
    return CoreSettings(
        model_dir=plan.model_dir, dtype=plan.dtype, threads=plan.threads_per_rank,
        max_queries=queries, device_kind=plan.device_kind,
        tp_degree=schedule.deployment.num_devices,
        max_tokens=min(message.capacity + 1, spec.max_positions or message.capacity + 1),
        kv_token_bytes=(spec.kv_elements_per_token_layer * spec.num_layers
                        * DTYPE_BYTES[plan.dtype]),
        kv_tokens=min(schedule.deployment.kv_tokens, queries * message.capacity),
        needs_tokenizer=needs_tokenizer, arguments=plan.engine_args)


def _report(plan: RunPlan, executor: VllmExecutor, load_s: float) -> RankReport:
    files = [path.stat().st_size for path in plan.model_dir.glob("*.safetensors")]
    return RankReport(rank=0, stage=0, log=tuple(executor.log), busy_s=executor.busy_s,
                      load_s=load_s, bytes_read=sum(files), rows_compacted=0,
                      peak_memory_bytes=executor.peak_memory_bytes(), operators=version_words())


def version_words() -> str:
    """Whose kernels served, in a line."""
    import vllm

    return f"vLLM {vllm.__version__}"


class Refusals:
    """Which queries vLLM cannot answer, said before a run: one must not cost the others.
    Most jobs ask for nothing that it might not: none of vLLM is loaded for them."""

    def __init__(self, plan: RunPlan) -> None:
        self._plan, self._judge = plan, cast("Judge | None", None)
        self.are_forms = False  # whether some outputs are held to a form

    def of(self, query: PreparedQuery) -> str | None:
        """Why vLLM does not answer it; None where it does."""
        if not query.sampling.passed:
            return None
        is_form = has_form(query.sampling.passed)
        if is_form and not TextTokenizer(self._plan.model_dir).is_there:
            return "the model's folder has no tokenizer, by which vLLM holds an output to a form"
        if self._judge is None:
            self._judge = Judge(self._plan.model_dir, self._plan.dtype,
                                self._plan.engine_args)
        why = self._judge.refusal(query)
        self.are_forms |= is_form and why is None
        return why


class Judge:
    """Tries queries' sampling parameters, and compiles the forms of their outputs, by a
    configuration of vLLM's own and without its model."""

    def __init__(self, model_dir: Path, dtype: str, arguments: Mapping[str, Any]) -> None:
        """`arguments`: the job's own, of vLLM's engine. vLLM's environment is set up."""
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.structured_output import StructuredOutputManager

        self._config = EngineArgs(**{
            "model": str(model_dir), "dtype": dtype, "trust_remote_code": False,
            "skip_tokenizer_init": not (model_dir / "tokenizer_config.json").is_file(),
            **engine_arguments(arguments)}).create_engine_config()
        self._manager = StructuredOutputManager(self._config)

    def refusal(self, query: PreparedQuery) -> str | None:
        """Why vLLM does not answer it; None where it does."""
        from vllm.v1.request import Request

        sampling, inputs = query.sampling, list(query.input_ids)
        try:
            parameters = parameters_of(sampling, len(inputs), self._config, query.max_new_tokens)
            if has_form(sampling.passed):
                request = Request(request_id=query.id, prompt_token_ids=inputs,
                                  sampling_params=parameters, pooling_params=None)
                self._manager.grammar_init(request)
                await_form(request)
        except Exception as cause:  # of what compiles a form, which raises as it likes
            return f"vLLM: {str(cause).strip() or type(cause).__name__}"
        return None


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
