"""The interface between profiler and simulator: `TimingSource`.

The measured profile and the analytic roofline are interchangeable behind it. Sizes and seconds are
arrays, broadcast against each other, in elements, tokens, bytes and seconds. A time is that of one
tensor-parallel group's shard, without synchronisation."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from xgpt.core.cluster import Link
from xgpt.core.policies import Role


class Operator(Enum):
    """Operators that are timed one by one (paper section 3, XProfiler), with sizes x and y:"""

    # prefill, one layer, per request: x = its tokens, y = requests encoded together (0: alone)
    ENCODE_ATTENTION = "encode_attention"
    # one layer: x = requests, y = context (tokens) of each, the one being decoded included
    DECODE_ATTENTION = "decode_attention"
    LAYER_REST = "layer_rest"  # one decoder layer without its attention kernels: x = tokens
    # LAYER_REST in decode steps captured as CUDA graphs (TimingFacts.captured_degrees): x = tokens
    DECODE_REST = "decode_rest"
    EMBED = "embed"  # x = tokens
    HEAD = "head"  # final norm, output head, sampling: x = requests
    KV_COMPACTION = "kv_compaction"  # one layer: x = cache rows moved, y = tokens in each
    # where a pool's bytes lie below its devices (xsimulator.placed)
    HOST_ATTENTION = "host_attention"  # DECODE_ATTENTION by the host over entries in its memory
    UNPACK = "unpack"  # x = elements of weights or entries in 4 bits that are widened
    # encoder-decoder models alone
    ENCODER_REST = "encoder_rest"  # one encoder layer without its attention kernel: x = tokens
    CROSS_KV = "cross_kv"  # one decoder layer's keys and values of encoder output: x = tokens
    CROSS_ATTENTION = "cross_attention"  # one decoder layer: x = requests, y = encoder tokens each

    __hash__ = object.__hash__  # Enum's hashes the name, in Python: planning asks 20,000 times


class MessageKind(Enum):
    """Kind of message over a link. The values are the names of a profile's tables."""

    ALL_REDUCE = "all_reduce"  # over a group, with its synchronisation cost
    TRANSFER = "transfer"  # point to point, between consecutive stages
    HANDOVER = "kv_handover"  # keys and values from one rank's KV cache to another's


class Reach(NamedTuple):
    """Largest sizes x and y that a source has measured; infinite where it computes times."""

    x: float
    y: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingFacts:
    """Properties shared by all times of a source."""

    # host's fixed cost of one micro-batch on one stage (launches, header, bookkeeping)
    step_overhead_s: float
    # whether decode attention reads every request of a micro-batch up to the longest context among
    # them (padded caches) rather than up to its own
    is_padded: bool
    # factor in these times because ranks share cores: above 1 where ranks outnumber the cores and
    # all work at once
    sharing: float = 1.0
    tp_degrees: frozenset[int] | None = None  # degrees that are timed; None: any
    # degrees whose decode steps are captured as CUDA graphs, so that the host does not hold them
    # up. Their layers have times of their own (DECODE_REST): encode steps are launched one by one.
    captured_degrees: frozenset[int] = frozenset()
    # whether a tensor-parallel group also exchanges messages that these times leave out: each step
    # from its first rank, and back to it the tokens chosen from each rank's share of the head
    sends_in_groups: bool = False
    # c of T = (1 - c) max(terms) + c sum(terms) of a layer whose weights or entries are copied
    # beside computing: 0 if all overlap, 1 if none do. measured: FlexGen's Tables 2, 3 and 5 on a
    # T4, to which it was fitted (docs/offload.md); a machine's is Profile.serial_share
    serial_share: float = 0.45
    # bytes per second of copies, where they depend on what is copied; else a tier's own count:
    # "WHAT-TIER-WAY" or "WHAT-TIER-WAY-PHASE" with weights, kv or hidden; host or disk; up or down;
    # encode or decode
    copy_rates: Mapping[str, float] = field(default_factory=dict)
    # seconds until another engine is ready, by tensor-parallel degree, where measured
    start_s: Mapping[int, float] = field(default_factory=dict)

    def can_time(self, tp_degree: int) -> bool:
        """Whether the source has times for groups of `tp_degree`."""
        return self.tp_degrees is None or tp_degree in self.tp_degrees


class TimingSource(Protocol):
    """Seconds of each operator and message on one device type for one model and dtype.

    A size that the source refuses (a profile: beyond four times what it measured) takes infinite
    time, so that no schedule is built on it. A source that wraps another one copies the members
    that it does not change as attributes."""

    def operator_s(self, operator: Operator, x: ArrayLike, y: ArrayLike = 0.0, *,
                   tp_degree: int = 1) -> NDArray[np.float64]:
        """Seconds of `operator` at (x, y) on each rank of a group of `tp_degree`, broadcast.

        x and y may be fractional (expected values). x = 0 costs 0."""

    def message_s(self, kind: MessageKind, num_bytes: ArrayLike, link: Link, *,
                  tp_degree: int = 1) -> NDArray[np.float64]:
        """Seconds of one message of `num_bytes`; an all-reduce is over a group of `tp_degree`."""

    def reach(self, operator: Operator, tp_degree: int) -> Reach:
        """Sizes up to which `operator_s` rests on measurements. Raises XgptError for an operator or
        a degree without times."""

    def provenance(self) -> str:
        """One line for reports about where these times come from."""

    @property
    def facts(self) -> TimingFacts:
        """Properties shared by all times."""


def of_role(source: TimingSource, role: Role) -> TimingSource:
    """The source for steps of a pool of this role (encode, decode or both). It differs from
    `source` only where steps of the two phases were measured to deviate differently."""
    own = getattr(source, "of_role", None)
    if own is None:
        return source
    found: TimingSource = own(role)
    return found
