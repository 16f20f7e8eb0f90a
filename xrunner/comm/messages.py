"""What travels down the pipeline: control with the data, so that there is no second channel.

The head decides; each message carries which queries joined and which left; later stages obey what
arrives. Back from the last stage come the sampled tokens, to the head, and an encoder's output, to
all stages that look at it. Under WAA the two pools' heads tell each other which queries change
pools, and the queries' entries go straight from rank to rank (xrunner.comm.handover).
Between replicas, rank 0 tells each other head which queries are its own, and hears what has become
of them (xrunner.engine.replicas)."""

from collections.abc import Mapping
from dataclasses import dataclass

from xrunner.query import FinishedQuery, PreparedQuery, Sampling, TokenLikelihood
from xrunner.rules.changes import Changes
from xrunner.rules.slots import Seat, Span
from xrunner.rules.steps import KvBudget, StepKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """A query that enters a group with this step. `goes_on`: it may need more than its first
    token, so that an encode pool hands its entries to the decode pool. `is_handed`: they were, and
    this pool takes them over."""

    query: int
    input_tokens: int
    sampling: Sampling
    goes_on: bool = False
    is_handed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMessage:
    """Header of one step; the hidden state [rows, H] follows it from stage to stage.

    `removed`: slots freed (and compacted) before this step, as numbered after the last one.
    `ended`: queries that ended with their first token, so that entries handed over are of no use.
    `freed`: seats in other groups whose queries are done, where all groups take of the same blocks:
    the seats go with those groups' next steps, their blocks are free at once.

    Continuous batching: the first of `joined` take the slots `replaced` as they are, numbered after
    the compaction; what is encoded are `spans`, behind the tokens of those who decode; the queries
    in the slots `resting`, encoded in part, do not decode in this step."""

    kind: StepKind
    group: int
    phase: int
    iteration: int
    removed: tuple[int, ...] = ()
    joined: tuple[Joined, ...] = ()
    ended: tuple[int, ...] = ()
    freed: tuple[Seat, ...] = ()
    replaced: tuple[int, ...] = ()
    spans: tuple[Span, ...] = ()
    resting: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StartMessage:
    """The first message: the size of every group's cache, in queries and in tokens of each.

    `encoded_capacity`: tokens of an encoder-decoder model's longest input, which lie in a cache of
    their own; `capacity` is then that of the outputs. `budget`: of a group's queries, whose entries
    lie in blocks then; None: in rows."""

    num_groups: int
    slots: int
    capacity: int
    encoded_capacity: int = 0
    budget: KvBudget | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StopMessage:
    """The last message: every stage reports its log and ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedMessage:
    """Goes from the last stage of an encoder-decoder model to every other: names the group whose
    oldest encode step is done; the encoder's output [T, H] follows."""

    group: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensMessage:
    """Goes back from the last stage: names the group whose tokens follow, [rows]."""

    group: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HandedQuery:
    """A query on its way to the decode pool. `query` comes without its input's tokens."""

    query: PreparedQuery
    input_tokens: int
    output_ids: tuple[int, ...]  # so far: one token, none of an encoder-decoder model
    likelihoods: tuple[TokenLikelihood, ...]  # of it, where they are asked for
    encode_start_s: float
    first_token_s: float | None  # None of an encoder-decoder model

    @property
    def reserve_tokens(self) -> int:
        return self.input_tokens + self.query.max_new_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class HandedMessage:
    """Tells the decode pool's head who goes on of encode step `batch`, and who `ended` with it
    although entries are under way."""

    batch: int
    queries: tuple[HandedQuery, ...]
    ended: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedMessage:
    """Tells the encode pool's head which queries are done, and the decode pool's tokens so far.
    Each `query` comes without its input's tokens. `begun`: of those left to the decode pool, whose
    encoding has begun."""

    results: tuple[FinishedQuery, ...]
    output_tokens: int
    begun: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftMessage:
    """Leaves these queries to the decode pool, which encodes their inputs itself."""

    queries: tuple[PreparedQuery, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockMessage:
    """Tells a decode rank that an encode rank's entries of these queries of encode step `batch`, of
    as many tokens each, follow as one block (xrunner.comm.handover); or the encoder's output
    [T, H]."""

    batch: int
    queries: tuple[int, ...]
    lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldMessage:
    """Tells the decode pool's head that a rank of it has all its blocks of `batch`; and from there
    the encode pool's head, that every rank has."""

    batch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PortionMessage:
    """Rank 0 tells the head of another replica which queries are its own, by their indices in the
    spool. `wanted`: so many of those that it has not begun are to be given back, the last first.
    `is_last`: none will follow; `stops`: it ends after its next step. `change`: of its control
    variables, by the launcher's order `revision`."""

    queries: tuple[int, ...] = ()
    wanted: int = 0
    is_last: bool = False
    stops: bool = False
    change: Changes | None = None
    revision: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaMessage:
    """The head of a replica tells rank 0 how far it is: how many of its queries have begun (in the
    order in which they were given), its tokens so far, and what is done, each query without its
    input's tokens. `at_work`: (input, output) tokens of the active queries; None where they have
    not been looked up. `changed`: (revision, the first phase it holds in) of a change taken up.
    `given_back`: queries that are not its own any more, in answer to what was wanted; None: nothing
    was."""

    replica: int
    begun: int
    output_tokens: int
    results: tuple[FinishedQuery, ...] = ()
    at_work: Mapping[int, tuple[int, int]] | None = None
    changed: tuple[int, int] | None = None
    given_back: tuple[int, ...] | None = None
    has_ended: bool = False


Message = (StartMessage | StepMessage | StopMessage | EncodedMessage | TokensMessage
           | HandedMessage | FinishedMessage | LeftMessage | BlockMessage | HeldMessage
           | PortionMessage | ReplicaMessage)
