"""What travels down the pipeline: control with the data, so that there is no second channel.

The head decides; each message carries which queries joined and which left; later stages obey what
arrives. Back from the last stage come the sampled tokens, to the head, and an encoder's output, to
all stages that look at it.
"""

from __future__ import annotations

from dataclasses import dataclass

from xrunner.rules.steps import StepKind
from xrunner.sampling import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """A query that enters a group with this step."""

    query: int
    input_tokens: int
    sampling: Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMessage:
    """Header of one step; the hidden state [rows, H] follows it from stage to stage.

    `removed`: slots freed (and compacted) before this step, as numbered after the last one.
    """

    kind: StepKind
    group: int
    phase: int
    iteration: int
    removed: tuple[int, ...] = ()
    joined: tuple[Joined, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StartMessage:
    """The first message: the size of every group's cache, in queries and in tokens of each.

    `encoded_capacity`: tokens of an encoder-decoder model's longest input, which lie in a cache of
    their own; `capacity` is then that of the outputs.
    """

    num_groups: int
    slots: int
    capacity: int
    encoded_capacity: int = 0
    spare_bytes: int = 0  # a rank whose caches take no more than this makes them resident at once


@dataclass(frozen=True, slots=True, kw_only=True)
class StopMessage:
    """The last message: every stage reports its log and ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedMessage:
    """From the last stage of an encoder-decoder model to every other: the group whose oldest
    encode step is done; the encoder's output [T, H] follows."""

    group: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensMessage:
    """Back from the last stage: the group whose tokens follow, [rows]."""

    group: int


Message = StartMessage | StepMessage | StopMessage | EncodedMessage | TokensMessage
