"""The planning problem of a job: model shape, devices, lengths, constraint. And the job's own
requests: their lengths before they run, and their times (arrival, start, first and last token)."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from xgpt.core.arrivals import Arrivals
from xgpt.core.cluster import Cluster
from xgpt.core.constraint import Constraint
from xgpt.core.controls import Adjustment, FixedSchedule
from xgpt.core.lengths import BoolArray, FloatArray, IntArray, JointLengths
from xgpt.core.model import ModelSpec
from xgpt.core.prefixes import Prefixes
from xgpt.core.units import WEIGHT_BYTES

# The sizes that decide where a schedule can place layers and heads. Defaults are resolved
# (kv_heads, head_dim), so that a catalog row and the model's own config.json agree.
_COUNTS = ("num_layers", "hidden_size", "num_heads", "kv_heads", "head_dim", "vocab_size",
           "intermediate_size")
_SHAPE = ("family", "num_encoder_layers", *_COUNTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A planning problem. `num_queries` None: the job names no requests (steady state).

    `queries`: lengths of the job's requests, if tokenised, or of made ones that share prefixes.
    None for other synthetic requests (`is_synthetic`: with exactly the lengths drawn with `seed`)
    and for texts not yet counted.
    `observes`: output lengths are caps until a run has measured them. `is_revised`: a run may
    change its schedule after what it measures. `learned`: lengths of requests that earlier runs of
    the job finished; None: there are none, or no forecast is made from them."""

    model: ModelSpec
    cluster: Cluster
    lengths: JointLengths
    constraint: Constraint
    fixed: FixedSchedule
    dtype: str  # never "auto"; of activations and KV cache
    num_queries: int | None
    default_max_tokens: int  # cap on the output of a request without one of its own
    adjustment: Adjustment = Adjustment()
    queries: QueryLengths | None = None
    is_synthetic: bool = False
    seed: int = 0  # of the order of requests, and of synthetic ones
    observes: bool = False
    is_revised: bool = False
    learned: JointLengths | None = None
    # standard deviation of the logarithm by which all (estimated) inputs may be longer
    input_error: float = 0.0
    # tokens of an input whose last hidden states are needed: 1; for a scoring job its targets; for
    # embedding by their mean all
    head_rows: float = 1.0
    has_head: bool = True  # whether logits are computed; a job that embeds needs none
    copies: int = 1  # replicas that work like this one; cluster and queries are those of one
    weight_dtype: str = ""  # that weights are held and multiplied in; "": `dtype`
    kv_dtype: str = ""  # of the KV cache; "": `dtype`
    # most stages of a replica, for an engine of equal replicas, each of equal tensor-parallel
    # groups within a node; None: any division
    most_stages: int | None = None
    # whether the cluster's tiers may hold what its devices cannot
    offload: Literal["auto", "off"] = "auto"
    arrivals: Arrivals | None = None  # None: a batch job, whose requests are there at the start

    def __post_init__(self) -> None:
        for name in ("weight_dtype", "kv_dtype"):
            if not getattr(self, name):
                object.__setattr__(self, name, self.dtype)

    @property
    def kv_item_bytes(self) -> int:
        """Bytes of an element of the KV cache."""
        return WEIGHT_BYTES[self.kv_dtype]

    @property
    def fingerprint(self) -> str:
        """Hash of the model's sizes, dtype and number of ranks; equal for jobs that can execute the
        same Schedule. Lengths, limits and kind of device decide how good a schedule is, not whether
        it runs: a schedule planned on a laptop must be accepted by the run."""
        return _fingerprint(self.model, self.dtype, self.cluster.num_devices)


@lru_cache(maxsize=64)
def _fingerprint(model: ModelSpec, dtype: str, ranks: int) -> str:
    shape = {key: getattr(model, key) for key in _SHAPE}
    parts = {"model": shape, "dtype": dtype, "ranks": ranks}
    if model.split.is_asked:
        parts["split"] = asdict(model.split)
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


UNLIMITED = 2**31 - 1  # tokens; no request may ask for more


# An encoder-decoder model has positions of its own for inputs: they take none of the output's.
def output_room(model: ModelSpec, inputs: Any) -> Any:
    """Most output tokens that the model's positions allow after `inputs` tokens (a number or an
    array). Below 1: no room; UNLIMITED for a model without positions."""
    most = model.max_positions
    if most is None:
        return np.full_like(inputs, UNLIMITED)
    if model.is_encoder_decoder:
        return np.where(np.asarray(inputs) <= most, most, 0)
    return most - inputs


def has_room(model: ModelSpec, inputs: IntArray, forced: IntArray) -> BoolArray:
    """Whether the model's positions hold each request, [requests]: `inputs` tokens with some output
    after them, or with all `forced` output tokens (0: the model decides)."""
    return np.asarray(np.maximum(forced, 1) <= output_room(model, inputs))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QueryLengths:
    """Tokens of each request, [requests]. `most_outputs`: most output tokens, which are reserved.
    `outputs`: output tokens if known beforehand; None: the model decides. `forecasts`: [requests,
    3] least, expected and most output tokens by a forecast; None: none is made beforehand.
    `deadlines_s`: seconds from the job's start, infinite for none; None: no request has one.
    `prefixes`: which requests begin alike; None: none do, or nothing is shared."""

    inputs: IntArray
    most_outputs: IntArray
    outputs: IntArray | None = None
    forecasts: IntArray | None = None
    deadlines_s: FloatArray | None = None
    prefixes: Prefixes | None = None

    @property
    def expected_outputs(self) -> IntArray:
        """Output tokens that each request is expected to have, [requests]: by its forecast, else as
        known beforehand, else the most."""
        if self.forecasts is not None:
            return self.forecasts[:, 1]
        return self.most_outputs if self.outputs is None else self.outputs

    @property
    def encoded(self) -> IntArray:
        """Input tokens that each request encodes, [requests], if the first request of a prefix, in
        this order, encodes it for all."""
        if self.prefixes is None:
            return self.inputs
        count = len(self.inputs)
        written = np.bincount(self.prefixes.lives[0], self.prefixes.own_tokens, count + 1)[:count]
        return np.asarray(self.inputs - self.prefixes.shared + written.astype(np.int64))

    @property
    def reserves(self) -> IntArray:
        """Tokens of KV cache that each request may need, [requests]."""
        total: IntArray = self.inputs + self.most_outputs
        return total

    def that_became(self, outputs: IntArray) -> QueryLengths:
        """The lengths of a run with these outputs, which goes by what was expected of them."""
        forecasts = self.forecasts if self.forecasts is not None else (
            np.tile(self.expected_outputs[:, None], 3))
        return replace(self, outputs=outputs, forecasts=forecasts)

    def take(self, rows: IntArray) -> QueryLengths:
        """The lengths of the requests `rows`, in this order."""
        own: dict[str, Any] = {}
        for one in fields(self):
            column = getattr(self, one.name)
            own[one.name] = None if column is None else column[rows]
        return QueryLengths(**own)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QueryTimes:
    """Times of each request in seconds since the job's start, [requests], in a simulation or a run.
    A token counts when the head receives it; in a batch that is answered as a whole, the last
    tokens count at its end."""

    arrival_s: FloatArray
    start_s: FloatArray  # of the prefill
    first_token_s: FloatArray
    last_token_s: FloatArray

    def take(self, rows: IntArray) -> QueryTimes:
        """The times of the requests `rows`, in this order."""
        return QueryTimes(
            arrival_s=self.arrival_s[rows], start_s=self.start_s[rows],
            first_token_s=self.first_token_s[rows], last_token_s=self.last_token_s[rows])

    @property
    def latency_s(self) -> FloatArray:
        """Seconds from the start of prefill to the last token, [requests]."""
        return _since(self.start_s, self.last_token_s)

    @property
    def ttft_s(self) -> FloatArray:
        """Seconds from arrival to the first token (TTFT), waiting included, [requests]."""
        return _since(self.arrival_s, self.first_token_s)

    @property
    def is_known(self) -> bool:
        """Whether all times are finite: a simulation met no step beyond the measured sizes."""
        return bool(np.isfinite(self.last_token_s).all())

    def tpot_s(self, output_tokens: IntArray) -> FloatArray:
        """Mean seconds per token after the first (TPOT), [requests of more than one token]."""
        after = np.asarray(output_tokens) - 1
        has_more = after > 0
        return np.asarray(_since(self.first_token_s, self.last_token_s)[has_more]
                          / after[has_more])


def _since(start_s: FloatArray, end_s: FloatArray) -> FloatArray:
    """`end_s - start_s`, [requests]; infinite where the end is."""
    return np.subtract(end_s, start_s, out=np.full_like(end_s, np.inf), where=np.isfinite(end_s))
