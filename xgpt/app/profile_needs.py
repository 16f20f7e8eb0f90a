"""What a job needs of a profile: which sizes, and how much of its time measuring them may take."""

import math

from xgpt.core.problem import Problem
from xgpt.core.units import DTYPE_BYTES
from xprofiler.coarse import JobWork
from xprofiler.points import Needs
from xrunner.engines.engine import Engine

SHARE = 0.1  # of a job's time, that measuring may take
_BOUNDED_SHARE = 0.2  # the same, where a bound makes the plan depend on how far times are off
# no more queries than decode steps are captured for (xrunner.rules.buckets)
_GPU_NEEDS = Needs(input_tokens=2060, context_tokens=4120, queries=500, tokens=8240)
_KV_SHARE = 4  # a decode step is measured with caches of at most this part of a rank's memory
_LEAST_QUERIES = 9


def work_of(problem: Problem) -> JobWork | None:
    """What the job has to do in all; None of one without end."""
    count, lengths = problem.num_queries, problem.lengths
    return None if not count else JobWork(
        queries=count, input_tokens=math.ceil(count * lengths.inputs.mean),
        output_tokens=math.ceil(count * lengths.outputs.mean))


def share_of(problem: Problem, engine: Engine) -> float:
    """Of the job's time, that measuring more than the least may take. Infinite where the job has no
    end, and where nobody has seen how far off few points are: of GPUs and other engines."""
    if not problem.num_queries or problem.cluster.device.kind != "cpu" or (
            engine.identity is not None):
        return math.inf
    is_bounded = any(math.isfinite(bound.limit_s) for bound in problem.constraint.bounds)
    return _BOUNDED_SHARE if is_bounded else SHARE


def needs_of(problem: Problem, kv_layout: str = "auto") -> Needs:
    """The job's own sizes where they are larger than usual ones. `kv_layout`: the job's wish; what
    lies in blocks, as it does on GPUs by default, is copied for nobody."""
    usual = Needs() if problem.cluster.device.kind == "cpu" else _GPU_NEEDS
    inputs, outputs = problem.lengths.inputs.max, problem.lengths.outputs.max
    context = max(usual.context_tokens, inputs + max(outputs, problem.default_max_tokens))
    per_query = (problem.model.kv_elements_per_token_layer * DTYPE_BYTES[problem.dtype]
                 * min(context, problem.model.max_positions or context)
                 # a step of an encoder-decoder model is measured with as long a cache for its input
                 * (2 if problem.model.is_encoder_decoder else 1))
    room = problem.cluster.device.memory_bytes // _KV_SHARE // per_query
    return Needs(input_tokens=max(usual.input_tokens, inputs), context_tokens=context,
                 queries=max(min(usual.queries, room), _LEAST_QUERIES),
                 tokens=max(usual.tokens, inputs),
                 moves_rows=kv_layout == "rows" or problem.model.is_encoder_decoder or (
                     problem.cluster.device.kind == "cpu")).within(problem.model)


def own_sizes(problem: Problem, usual: Needs) -> Needs:
    """The sizes of the job itself; `usual` where it does not say how many queries it has."""
    lengths, count = problem.lengths, problem.num_queries
    if any(problem.fixed.value_of(name) for name in ("encode_batch", "max_active")):
        count = None  # it is planned for as many as these keep present, which may be more
    inputs = lengths.inputs.max
    return Needs(
        input_tokens=inputs,
        context_tokens=inputs + max(lengths.outputs.max, problem.default_max_tokens),
        queries=usual.queries if count is None else min(max(count, 1), usual.queries),
        tokens=usual.tokens if count is None else max(
            min(math.ceil(count * lengths.inputs.mean), usual.tokens), inputs))
