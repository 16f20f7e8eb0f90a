"""Roofline limit on the throughput of any schedule on a problem's devices.

    work per request  FLOPs: matmuls of its rows with every weight, and attention
                      bytes: its KV cache, written once and read at every iteration
    least_s           max(FLOPs / peak rate, bytes / bandwidth), mean over the lengths
    limit             devices / least_s   requests/s

Reading of weights, messages, embeddings and activations are not counted, since many requests may
share them. Published offline engines reach 59 to 90 % of such a limit on one GPU."""

from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from xgpt.core.lengths import FloatArray
from xgpt.core.model import active_layer_params
from xgpt.core.problem import Problem
from xsimulator.sharing import sharing_of


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestWork:
    """Mean work of a request, over all devices together."""

    flops: float
    kv_bytes: float  # of its cache, written and read


def work_per_request(problem: Problem) -> RequestWork:
    """Mean FLOPs and KV cache bytes of a request of the problem's lengths."""
    model, lengths = problem.model, problem.lengths
    outputs = lengths.outputs
    count = outputs.support.astype(float) - (not model.is_encoder_decoder)  # decode iterations
    first, second = (lengths.mean_input_given_output(power) for power in (1, 2))

    def mean(values: FloatArray) -> float:
        return float(outputs.pmf @ values)

    tokens, steps = lengths.inputs.mean, mean(count)
    pairs = mean(second + first) / 2  # tokens that the rows of an input attend to, causally
    if sharing := sharing_of(problem):
        tokens, sizes = sharing.own.mean() + sharing.each, 1.0 + np.arange(len(sharing.attended))
        pairs = float(sharing.attended @ (sizes * (sizes + 1) / 2))
    own = mean(count * (count + 1) / 2)  # output tokens read over all iterations
    read = mean(count * first) + own
    width = model.num_heads * model.head_dim
    heads = 2 * model.head_params * outputs.mean
    if model.is_encoder_decoder:
        cross = 2 * model.hidden_size * model.kv_heads * model.head_dim  # weights of keys, values
        flops = heads + model.num_encoder_layers * (
            2 * model.encoder_layer_params * tokens + 4 * width * mean(second))
        flops += model.num_layers * (2 * (active_layer_params(model) - cross) * steps
                                     + 2 * cross * tokens + 4 * width * read)
    else:
        flops = heads + model.num_layers * (
            2 * active_layer_params(model) * (tokens + steps) + 4 * width * (pairs + read))
    entry = model.num_layers * model.kv_elements_per_token_layer * problem.kv_item_bytes
    return RequestWork(flops=flops, kv_bytes=entry * (tokens + steps + read))


def num_surely_late(problem: Problem) -> int:
    """Number of the problem's requests that are late by every schedule and order, at least.

    All prefills together proceed at most at the peak rate of all devices. So requests in time would
    be so in a queue of prefills at that rate, of which Moore and Hodgson's rule leaves out the
    fewest: by rising deadline, and where one is late, the longest so far."""
    known = problem.queries
    if known is None or known.deadlines_s is None:
        return 0
    model, tokens = problem.model, known.inputs.astype(float)
    layers, params, pairs = model.num_layers, active_layer_params(model), tokens * (tokens + 1) / 2
    if known.prefixes is not None:  # others may encode these tokens
        shared = np.minimum(known.prefixes.shared, tokens)
        tokens, pairs = tokens - shared, pairs - shared * (shared + 1) / 2
    if model.is_encoder_decoder:
        layers, params, pairs = model.num_encoder_layers, model.encoder_layer_params, tokens**2
    flops = layers * (2 * params * tokens + 4 * model.num_heads * model.head_dim * pairs)
    seconds = flops / (problem.cluster.num_devices * _peak(problem))
    order = np.argsort(known.deadlines_s, kind="stable")
    taken, end_s = list[float](), 0.0
    for own_s, deadline_s in zip(seconds[order].tolist(), known.deadlines_s[order].tolist(),
                                 strict=True):
        heappush(taken, -own_s)
        end_s += own_s
        if end_s > deadline_s:
            end_s += heappop(taken)
    return len(seconds) - len(taken)


def _peak(problem: Problem) -> float:
    """Peak rate of a device, FLOP/s; without units for the type, weights are widened."""
    device = problem.cluster.device
    return dict(device.flops_per_s).get(problem.weight_dtype,
                                        device.peak_flops_per_s(problem.dtype))


def roofline_limit_qps(problem: Problem) -> float:
    """Roofline limit, requests/s, of all devices of the problem."""
    work, device = work_per_request(problem), problem.cluster.device
    least_s = np.maximum(work.flops / _peak(problem), work.kv_bytes / device.bandwidth_bytes_per_s)
    return float(problem.cluster.num_devices / least_s)
