"""A job resolved, which planners answer: the model's shape, the devices, the lengths. And its own
queries: how long they are, before they run, and when each of them came, was begun, and got its
first and its last token."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from xgpt.core.cluster import Cluster
from xgpt.core.constraint import Constraint
from xgpt.core.controls import Adjustment, FixedSchedule
from xgpt.core.lengths import BoolArray, FloatArray, IntArray, JointLengths
from xgpt.core.model import ModelSpec
from xgpt.core.units import WEIGHT_BYTES

# The sizes that decide which layers and heads a schedule can place where. Defaults are resolved
# (kv_heads, head_dim), so that a catalog row and the model's own config.json agree.
_COUNTS = ("num_layers", "hidden_size", "num_heads", "kv_heads", "head_dim", "vocab_size",
           "intermediate_size")
_SHAPE = ("family", "num_encoder_layers", *_COUNTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What a planner is asked. `num_queries` None: the job names no requests (steady state).

    `queries`: the requests of its file, where they were tokenised; None for requests that are made
    (`is_synthetic`: these have exactly the lengths drawn with `seed`) and for texts whose lengths
    nobody knows yet. `observes`: output lengths are caps, until a run has seen what outputs are.
    `is_revised`: a run may change its schedule for what it has seen."""

    model: ModelSpec
    cluster: Cluster
    lengths: JointLengths
    constraint: Constraint
    fixed: FixedSchedule
    dtype: str  # never "auto"; of activations and KV cache
    num_queries: int | None
    default_max_tokens: int  # cap on the output of a request that names none
    adjustment: Adjustment = Adjustment()
    queries: QueryLengths | None = None
    is_synthetic: bool = False
    seed: int = 0  # of the order in which queries are taken up, and of those that are made
    observes: bool = False
    is_revised: bool = False
    # standard deviation of the logarithm by which all inputs may be longer: they were estimated
    input_error: float = 0.0
    # rows of an input whose last hidden states are asked for: one, or of a job that scores its
    # targets, or of one that embeds by their mean all
    head_rows: float = 1.0
    has_head: bool = True  # whether logits are computed at all: not of a job that embeds
    copies: int = 1  # of the model, that work like this one: cluster and queries are of one of them
    weight_dtype: str = ""  # as which weights are held and multiplied; "": as `dtype`
    kv_dtype: str = ""  # as which entries of the cache are held; "": as `dtype`

    def __post_init__(self) -> None:
        for name in ("weight_dtype", "kv_dtype"):
            if not getattr(self, name):
                object.__setattr__(self, name, self.dtype)

    @property
    def kv_item_bytes(self) -> int:
        """Of an element of the cache."""
        return WEIGHT_BYTES[self.kv_dtype]

    @property
    def fingerprint(self) -> str:
        """Identifies the jobs that can execute the same Schedule: the model's sizes, the dtype and
        the number of ranks. Lengths, latency bound and kind of device are left out on purpose:
        they decide how good a schedule is, not whether it runs, and a schedule found for `a40-4` on
        a laptop, or before the output lengths were observed, must be accepted by the run."""
        return _fingerprint(self.model, self.dtype, self.cluster.num_devices)


@lru_cache(maxsize=64)
def _fingerprint(model: ModelSpec, dtype: str, ranks: int) -> str:
    shape = {key: getattr(model, key) for key in _SHAPE}
    parts = {"model": shape, "dtype": dtype, "ranks": ranks}
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


UNLIMITED = 2**31 - 1  # tokens; no request may ask for more


# What a model's positions leave for an output. Those of an encoder-decoder model's encoder and
# decoder are apart: an input takes none of its output's.
def output_room(model: ModelSpec, inputs: Any) -> Any:
    """Most tokens of output after so many tokens of `inputs` (a number or an array): below 1 where
    an input leaves no room for one, UNLIMITED of a model without positions."""
    most = model.max_positions
    if most is None:
        return np.full_like(inputs, UNLIMITED)
    if model.is_encoder_decoder:
        return np.where(np.asarray(inputs) <= most, most, 0)
    return most - inputs


def has_room(model: ModelSpec, inputs: IntArray, forced: IntArray) -> BoolArray:
    """Which queries a model's positions hold: some output after so many tokens of `inputs`, and all
    of it where its length is `forced` (0: the model decides)."""
    return np.asarray(np.maximum(forced, 1) <= output_room(model, inputs))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QueryLengths:
    """Tokens of each query, [queries]. `most_outputs`: what it may write at most, and so reserves.
    `outputs` None: how much it writes depends on what the model says."""

    inputs: IntArray
    most_outputs: IntArray
    outputs: IntArray | None = None

    @property
    def reserves(self) -> IntArray:
        """[queries] tokens of KV cache that each may need."""
        total: IntArray = self.inputs + self.most_outputs
        return total

    def take(self, rows: IntArray) -> QueryLengths:
        """The queries of these rows, in this order."""
        return QueryLengths(inputs=self.inputs[rows], most_outputs=self.most_outputs[rows],
                            outputs=None if self.outputs is None else self.outputs[rows])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QueryTimes:
    """[queries] seconds since the start of the job, of a replay or of a run. A token counts when
    the head takes it up; where a batch is answered as a whole, the last ones all do at its end."""

    arrival_s: FloatArray
    start_s: FloatArray  # of the encoding
    first_token_s: FloatArray
    last_token_s: FloatArray

    @property
    def latency_s(self) -> FloatArray:
        """[queries] from the start of the encoding to the last token."""
        return _since(self.start_s, self.last_token_s)

    @property
    def ttft_s(self) -> FloatArray:
        """[queries] to the first token, from the arrival on: waiting for its turn counts."""
        return _since(self.arrival_s, self.first_token_s)

    @property
    def is_known(self) -> bool:
        """Whether all queries end: a replay met no step larger than any that was timed."""
        return bool(np.isfinite(self.last_token_s).all())

    def tpot_s(self, output_tokens: IntArray) -> FloatArray:
        """[queries of more than one output token] mean time of each token after the first."""
        after = np.asarray(output_tokens) - 1
        has_more = after > 0
        return np.asarray(_since(self.first_token_s, self.last_token_s)[has_more]
                          / after[has_more])


def _since(start_s: FloatArray, end_s: FloatArray) -> FloatArray:
    """[queries]; infinite where an end is: a replay met a step larger than any that was timed."""
    return np.subtract(end_s, start_s, out=np.full_like(end_s, np.inf), where=np.isfinite(end_s))
