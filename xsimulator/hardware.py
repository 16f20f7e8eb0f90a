"""How much of its devices a schedule uses: its throughput as a share of what they could do at all.

    work of a query   products of its rows with every weight, and attention:   FLOPs
                      entries of its KV cache written once and read at every iteration:   bytes
    least_s           max(FLOPs / peak rate, bytes / bandwidth), in the mean over the lengths
    most              devices / least_s   queries/s

No schedule of any policy, copies or layout answers more: every device would multiply at its peak
rate without a pause, or read memory at its bandwidth. Weights are read once a step, by however many
queries share it, so that they count nothing here; nor do messages, embeddings and activations.
Offline engines that were published reach 59 to 90 % of such a bound on one GPU."""

from dataclasses import dataclass

import numpy as np

from xgpt.core.lengths import FloatArray
from xgpt.core.model import active_layer_params
from xgpt.core.problem import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryWork:
    """What a query asks of all devices together, in the mean."""

    flops: float
    kv_bytes: float  # of its cache, written and read


def work_of_a_query(problem: Problem) -> QueryWork:
    """Products and bytes of a mean query of the problem's lengths."""
    model, lengths = problem.model, problem.lengths
    outputs = lengths.outputs
    count = outputs.support.astype(float) - (not model.is_encoder_decoder)  # decode iterations
    first, second = (lengths.mean_input_given_output(power) for power in (1, 2))

    def mean(values: FloatArray) -> float:
        return float(outputs.pmf @ values)

    tokens, steps = lengths.inputs.mean, mean(count)
    own = mean(count * (count + 1) / 2)  # of its output, read over all iterations
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
        causal = mean(second + first) / 2  # tokens that the input's rows attend to
        flops = heads + model.num_layers * (
            2 * active_layer_params(model) * (tokens + steps) + 4 * width * (causal + read))
    entry = model.num_layers * model.kv_elements_per_token_layer * problem.kv_item_bytes
    return QueryWork(flops=flops, kv_bytes=entry * (tokens + steps + read))


def most_queries_per_s(problem: Problem) -> float:
    """What the problem's devices could answer, all of them together."""
    work, device = work_of_a_query(problem), problem.cluster.device
    peak = dict(device.flops_per_s).get(  # of a type without units weights are widened
        problem.weight_dtype, device.peak_flops_per_s(problem.dtype))
    least_s = np.maximum(work.flops / peak, work.kv_bytes / device.bandwidth_bytes_per_s)
    return float(problem.cluster.num_devices / least_s)
