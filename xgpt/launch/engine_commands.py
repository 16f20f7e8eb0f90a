"""The command that starts another engine as near to a schedule as its flags can say: `xgpt schedule
--export ENGINE`. A pure function of the schedule and its problem; nothing is started.

What no flag of theirs says (when to encode, batches kept even, the order of queries) is told beside
the command, since the figures expected are the schedule's own. A schedule that they have no flags
for at all is refused."""

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from xgpt.core.deployment import Deployment, Pool
from xgpt.core.errors import XgptError
from xgpt.core.problem import Problem
from xgpt.core.schedule import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """An engine's words: how it is started, and its names of what a schedule decides. `copies`
    None: several are several commands."""

    start: tuple[str, ...]  # before the model
    tp: str
    pp: str
    copies: str | None
    queries: str  # at a time, of a copy
    tokens: str  # of a step
    length: str  # of a query, input and output
    dtype: Mapping[str, str]  # of ours -> the words that say it
    kv_tokens: str | None = None  # entries of the cache, of a copy
    chunked: tuple[str, ...] = ()  # inputs in chunks beside decoding
    chunked_note: str = ""  # what they need besides
    whole: tuple[str, ...] = ()  # inputs as a whole


ENGINES: dict[str, Flags] = {
    # read back by the parser of vLLM 0.32 in tests/vllm
    "vllm": Flags(
        start=("vllm", "serve"), tp="--tensor-parallel-size", pp="--pipeline-parallel-size",
        copies="--data-parallel-size", queries="--max-num-seqs",
        tokens="--max-num-batched-tokens", length="--max-model-len",
        dtype={name: f"--dtype={name}" for name in ("float32", "bfloat16", "float16")},
        chunked=("--enable-chunked-prefill",), whole=("--no-enable-chunked-prefill",)),
    # the page of trtllm-serve in TensorRT-LLM's documents; the type is the checkpoint's
    "tensorrt-llm": Flags(
        start=("trtllm-serve",), tp="--tp_size", pp="--pp_size", copies=None,
        queries="--max_batch_size", tokens="--max_num_tokens", length="--max_seq_len", dtype={},
        chunked_note="Chunks need `enable_chunked_prefill: true` in its file of options."),
    # SGLang's own parser; without mixing, a chunk and decoding are steps apart
    "sglang": Flags(
        start=("python", "-m", "sglang.launch_server", "--model-path"), tp="--tp-size",
        pp="--pp-size", copies="--dp-size", queries="--max-running-requests",
        tokens="--chunked-prefill-size", length="--context-length",
        kv_tokens="--max-total-tokens", chunked=("--enable-mixed-chunk",),
        whole=("--chunked-prefill-size", "-1"),
        dtype={name: f"--dtype={name}" for name in ("float32", "bfloat16", "float16")}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCommand:
    """A command, and what is to be known of it, a sentence each."""

    engine: str
    words: tuple[str, ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        """For a shell, what is to be known as comments before it."""
        return "\n".join([*(f"# {note}" for note in self.notes), shlex.join(self.words)])


def engine_command(engine: str, schedule: Schedule, problem: Problem, *, model: str,
                   times_of: str) -> EngineCommand:
    """The command of one of ENGINES for a schedule of `problem`. model: as the engine is to be told
    of it. times_of: by whose times the schedule was planned: an engine, or a profile. Raises
    XgptError for a schedule that the engine has no flags for."""
    flags, estimate = ENGINES[engine], schedule.estimate
    deployment, controls = estimate.deployment, estimate.controls
    pool = _only_pool(engine, schedule)
    words = [*flags.start, model, flags.tp, str(_degree(engine, deployment)), flags.pp,
             str(len(pool.stages))]
    notes = [_figures(schedule), _source(engine, times_of)]
    if model == problem.model.name and "/" not in model:
        notes.append(f"{model} is a shape of the catalog: put its checkpoint there.")
    if deployment.replicas > 1 and flags.copies is not None:
        words += [flags.copies, str(deployment.replicas)]
    elif deployment.replicas > 1:
        notes.append(f"{deployment.replicas} copies: start it {deployment.replicas} times, each on "
                     f"{deployment.devices_per_replica} of the devices and a port of its own.")
    if estimate.others:
        notes.append("This command is of the first copies alone: those of another shape have a "
                     "schedule of their own (`others` in `--json`).")
    words += [flags.queries, str(getattr(controls, "max_active", 0)
                                 or math.ceil(estimate.most_in_system))]
    budget, chunk = getattr(controls, "token_budget", None), getattr(controls, "encode_chunk", 0)
    if chunk:
        budget = chunk + math.ceil(estimate.figures.decode_batch)
    is_chunked = bool(chunk) or estimate.policy == "sarathi"
    if is_chunked:
        words += [flags.tokens, str(budget), *flags.chunked]
        notes += [flags.chunked_note] if flags.chunked_note else []
    else:
        words += flags.whole
        notes.append("Inputs are planned to be encoded whole"
                     + (f", {budget} tokens a step at most." if budget else "."))
    words += [flags.length, str(_longest(problem))]
    if flags.kv_tokens is not None:
        words += [flags.kv_tokens, str(pool.kv_tokens)]
    if problem.dtype in flags.dtype:
        words.append(flags.dtype[problem.dtype])
    notes += _unsaid(schedule, pool)
    return EngineCommand(engine=engine, words=tuple(words), notes=tuple(notes))


def _only_pool(engine: str, schedule: Schedule) -> Pool:
    deployment, policy = schedule.deployment, schedule.estimate.policy
    if len(deployment.pools) > 1:
        raise _no_flags(engine, f"{policy}'s queries are handed from a pool that encodes to one "
                                "that decodes", "policy=[rra, sarathi]")
    if policy in ("ft", "dsi"):
        raise _no_flags(engine, f"{policy} holds a batch until its longest query is done",
                        "policy=auto")
    return deployment.pools[0]


def _degree(engine: str, deployment: Deployment) -> int:
    degrees = {stage.tp_degree for stage in deployment.stages}
    if len(degrees) > 1:
        raise _no_flags(engine, "stages of different tensor-parallel degrees ("
                        f"{', '.join(map(str, sorted(degrees)))})", f"tp_degree={max(degrees)}")
    return degrees.pop()


def _no_flags(engine: str, what: str, change: str) -> XgptError:
    return XgptError(f"{engine} has no flags for this schedule: {what}. `--set "
                     f"'schedule.{change}'` plans one that it can be told of.")


def _longest(problem: Problem) -> int:
    """Positions of the longest query."""
    queries = problem.queries
    if queries is not None:
        return int((queries.inputs + queries.most_outputs).max())
    longest = problem.lengths.inputs.max + max(problem.lengths.outputs.max,
                                               problem.default_max_tokens)
    most = problem.model.max_positions
    return longest if most is None else min(longest, most)


def _figures(schedule: Schedule) -> str:
    figures, bound = schedule.figures, schedule.bound
    limit = "" if math.isinf(bound.limit_s) else f", of {bound.limit_s:.3g} s allowed"
    return (f"Expected: {figures.throughput_qps:.3g} queries/s, latency "
            f"{figures.latency_s:.3g} s{limit}.")


def _source(engine: str, times_of: str) -> str:
    if times_of == engine:
        return f"These are by the times of {engine}."
    return (f"These are by the times of {times_of}, not of {engine}: without a profile `--set "
            f"plan.engine={engine}` plans for those.")


def _unsaid(schedule: Schedule, pool: Pool) -> list[str]:
    """What the schedule decides and no flag says."""
    notes = []
    if schedule.estimate.policy == "rra":
        controls = schedule.estimate.variables
        notes.append(f"No flag says that {controls['encode_batch']} queries are encoded every "
                     f"{controls['decode_iterations']} iterations: the engine encodes as soon as "
                     "there is room, so latencies are others.")
    layers = [stage.num_layers for stage in pool.stages]
    if len(set(layers)) > 1:
        notes.append(f"Planned with {', '.join(map(str, layers))} layers a stage; the engine "
                     "divides them itself.")
    return notes
