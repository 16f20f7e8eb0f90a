"""Which sizes a job needs of a profile."""

import math
from collections.abc import Sequence

from xgpt.core.problem import Problem
from xgpt.core.units import DTYPE_BYTES
from xprofiler.points import OWN_TABLE, Kind, Needs, Point, lacking
from xprofiler.profile import Profile

# no more queries than decode steps are captured for (xrunner.rules.buckets)
_GPU_NEEDS = Needs(input_tokens=2060, context_tokens=4120, queries=500, tokens=8240)
_KV_SHARE = 4  # a decode step is measured with caches of at most this part of a rank's memory
_LEAST_QUERIES = 9
REACH = 2.0  # see `lacks`


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


def lacks(profile: Profile, degree: int, points: Sequence[Point], own: Needs) -> bool:
    """Whether a job of these points has larger sizes than the profile; of one that runs have added
    to, than REACH times its largest: it says how far its lines go on, and the next run adds what it
    sees there. `own`: the job's own sizes, which count where points lie beyond them."""
    reach = REACH if profile.learned else 1.0
    most = {Kind.DECODE: (own.queries, own.context_tokens), Kind.REST: (own.tokens, 0),
            Kind.CROSS: (own.queries, own.input_tokens), Kind.COMPACTION: (0, own.context_tokens)}
    for point in lacking(profile, degree, points):
        table = profile.table(OWN_TABLE[point.kind].value, degree)
        x, y = most.get(point.kind, (own.input_tokens, point.y))
        if not table or min(point.x, x) > reach * max(one.x for one in table) or (
                min(point.y, y) > reach * max(max(one.y for one in table), 1)):
            return True
    return False
