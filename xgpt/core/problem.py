"""A job resolved, which planners answer: the model's shape, the devices, the lengths."""

import hashlib
import json
from dataclasses import dataclass
from functools import lru_cache

from xgpt.core.cluster import Cluster
from xgpt.core.constraint import Constraint
from xgpt.core.controls import Adjustment, FixedSchedule
from xgpt.core.lengths import JointLengths
from xgpt.core.model import ModelSpec
from xgpt.core.queries import QueryLengths
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
