"""Seconds of a mixture of experts on each rank of a tensor-parallel group.

All experts are equally likely: no weights say more. Where ranks hold whole experts, the other ranks
wait for those whose experts have most rows, so that theirs are counted."""

import math

import numpy as np

from xgpt.core.lengths import FloatArray
from xgpt.core.model import Experts, ModelSpec
from xprofiler.kernels import Kernels

# kernels beside the products: to choose experts, to sort tokens by expert, to gather rows in that
# order, and to add up the results of each token
LAUNCHES = 4


def busiest_share(experts: Experts, tokens: FloatArray, ep_degree: int) -> FloatArray:
    """Rows of the busiest of `ep_degree` parts of the experts, divided by the mean over the parts.

    The rows of a part have the variance of draws without replacement. The largest of n values lies
    at most sqrt(2 ln n) deviations above their mean (an upper bound for normal ones)."""
    mean = np.maximum(tokens, 1e-9) * experts.per_token / ep_degree
    varies = (1 - 1 / ep_degree) * (experts.count - experts.per_token) / max(experts.count - 1, 1)
    share: FloatArray = 1 + np.sqrt(2 * np.log(ep_degree) * varies / mean)
    # a token has no more rows in a part than experts there
    return np.minimum(share, min(ep_degree, experts.count / experts.per_token))


def reached_share(experts: Experts, parts: int) -> float:
    """Share of the tokens that have an expert in one of `parts` equal parts of the experts."""
    others = experts.count - experts.count // parts
    return 1 - math.comb(others, experts.per_token) / math.comb(experts.count, experts.per_token)


class ExpertKernels:
    """Seconds of the MLP of one model, a mixture of experts. Its layers are taken as their mean."""

    def __init__(self, model: ModelSpec, experts: Experts, kernels: Kernels) -> None:
        self._experts, self._kernels, self._hidden = experts, kernels, model.hidden_size
        self._split, self._dense = model.split, experts.dense_layers / model.num_layers

    def mlp_s(self, tokens: FloatArray, own: FloatArray, tp_degree: int) -> FloatArray:
        """Seconds for `tokens`, of which ranks that share an attention have `own`: these ranks
        choose the experts of theirs, and compute shared experts and dense layers for them."""
        experts, degree = self._experts, self._split.attention_degree(tp_degree)
        router_s = self._kernels.gemm_s(own, experts.count, self._hidden)
        mixed_s = (router_s + self._routed_s(tokens, tp_degree)
                   + self._gated_s(own, experts.shared / degree))
        return np.asarray((1 - self._dense) * mixed_s + self._dense * self._gated_s(
            own, experts.dense_inner / degree))

    def _routed_s(self, tokens: FloatArray, tp_degree: int) -> FloatArray:
        """Seconds of the busiest rank's experts: their products, with one launch for all experts
        that have rows, and the rows gathered before and added up after."""
        experts, parts = self._experts, self._split.ep_degree
        share = busiest_share(experts, tokens, parts)
        rows = share * tokens * experts.per_token / parts
        hit = np.maximum(experts.hit(share * tokens) / parts, 1e-9)
        inner, multiply_s = experts.inner * parts / tp_degree, self._kernels.layer_product_s
        products_s = (multiply_s(rows / hit, 2 * inner, self._hidden, hit)
                      + multiply_s(rows / hit, self._hidden, inner, hit))
        moved = 2 * self._hidden * (rows + reached_share(experts, parts) * tokens)
        return np.asarray(products_s + self._kernels.copied_s(moved * self._kernels.item_bytes)
                          + LAUNCHES * self._kernels.constants.elementwise_launch_s)

    def _gated_s(self, tokens: FloatArray, inner: float) -> FloatArray | float:
        """Seconds of a gated MLP with `inner` columns on a rank; 0 for none."""
        if not inner:
            return 0.0
        multiply_s = self._kernels.layer_product_s
        return multiply_s(tokens, 2 * inner, self._hidden) + multiply_s(
            tokens, self._hidden, inner)
