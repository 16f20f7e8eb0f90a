"""The seam between what is timed and what is simulated: `TimingSource`.

The measured profile and the analytic roofline are interchangeable behind it. Sizes and seconds are
arrays (broadcast against each other), in elements, tokens, bytes and seconds; a time is what one
tensor-parallel group needs for its shard, without synchronisation."""

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from xgpt.core.cluster import Link
from xgpt.core.policies import Role


class Operator(Enum):
    """What is timed apart from the rest (paper section 3, XProfiler). Arguments `x`, `y`:"""

    # one query's share in one layer: x = its tokens, y = queries encoded with it (0: alone)
    ENCODE_ATTENTION = "encode_attention"
    # one layer: x = queries, y = context (tokens) of each, the one being decoded included
    DECODE_ATTENTION = "decode_attention"
    LAYER_REST = "layer_rest"  # one decoder layer without its attention kernels: x = tokens
    # the same in decode steps that a GPU takes captured (TimingFacts.captured_degrees): x = tokens
    DECODE_REST = "decode_rest"
    EMBED = "embed"  # x = tokens
    HEAD = "head"  # final norm, output head, sampling: x = queries
    KV_COMPACTION = "kv_compaction"  # one layer: x = cache rows moved, y = tokens in each
    # encoder-decoder models alone
    ENCODER_REST = "encoder_rest"  # one encoder layer without its attention kernel: x = tokens
    CROSS_KV = "cross_kv"  # one decoder layer's keys and values of encoder output: x = tokens
    CROSS_ATTENTION = "cross_attention"  # one decoder layer: x = queries, y = encoder tokens each

    __hash__ = object.__hash__  # Enum's is of the name, in Python: planning asks 20,000 times


class MessageKind(Enum):
    """What goes over a link. The values are the names of a profile's tables."""

    ALL_REDUCE = "all_reduce"  # over a group, with its synchronisation cost
    TRANSFER = "transfer"  # point to point, between consecutive stages
    HANDOVER = "kv_handover"  # KV entries in one rank's cache to the same entries in another's


class Reach(NamedTuple):
    """Largest sizes a source has measured; infinite where it computes them."""

    x: float
    y: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingFacts:
    """What holds of all of a source's times."""

    # host's fixed cost of one micro-batch on one stage (launches, header, bookkeeping)
    step_overhead_s: float
    # whether decode attention costs every query of a micro-batch the longest context among them
    # (kernels that read padded caches), not its own
    is_padded: bool
    # how many times longer operators take, in these answers, than where a rank has the cores it
    # works on for itself: 1, or more where ranks outnumber the cores and all work at once
    sharing: float = 1.0
    tp_degrees: frozenset[int] | None = None  # sizes of groups that are timed; None: any
    # those whose decode steps are captured in CUDA graphs, which the host does not hold up: their
    # layers are timed apart (DECODE_REST), for those of steps that encode are launched one by one
    captured_degrees: frozenset[int] = frozenset()
    # whether the ranks of a tensor-parallel group get each step by a message from the first, and
    # send it what the head chose of their shares, besides what is in these times
    sends_in_groups: bool = False

    def can_time(self, tp_degree: int) -> bool:
        """Whether the source answers for groups of `tp_degree`."""
        return self.tp_degrees is None or tp_degree in self.tp_degrees


class TimingSource(Protocol):
    """Seconds of each operator and message on one device type for one model and dtype.

    A size that the source refuses (a profile: beyond four times what it measured) takes infinite
    time, so that no schedule is built on it. A source made of another one holds those of the
    other's members that it does not change, as attributes."""

    def operator_s(self, operator: Operator, x: ArrayLike, y: ArrayLike = 0.0, *,
                   tp_degree: int = 1) -> NDArray[np.float64]:
        """Seconds of `operator` at (x, y) on each rank of a group of `tp_degree`.

        x and y may be fractional (expected values). x = 0 costs 0."""

    def message_s(self, kind: MessageKind, num_bytes: ArrayLike, link: Link, *,
                  tp_degree: int = 1) -> NDArray[np.float64]:
        """Seconds of one message of `num_bytes`; an all-reduce is over a group of `tp_degree`."""

    def reach(self, operator: Operator, tp_degree: int) -> Reach:
        """Sizes up to which `operator_s` rests on measurements. Raises XgptError where there are
        none."""

    def provenance(self) -> str:
        """One line for reports: where these times come from."""

    @property
    def facts(self) -> TimingFacts:
        """What holds of all times."""


def of_role(source: TimingSource, role: Role) -> TimingSource:
    """The source of a pool's steps that works one phase, or both: another one where it was seen
    that the steps of one phase take other times than those of the other."""
    own = getattr(source, "of_role", None)
    if own is None:
        return source
    found: TimingSource = own(role)
    return found
