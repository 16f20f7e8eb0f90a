"""Messages between ranks; control travels with the data, so there is no second channel.

The head decides. Each step message says which requests join and leave, and later stages follow it.
The last stage returns sampled tokens to the head, and encoder output to all stages that read it.
Under WAA the two pools' heads tell each other which requests change pools, and KV goes straight
from rank to rank (xrunner.comm.handover). Between replicas, rank 0 gives each head its requests and
reads their results (xrunner.engine.replicas)."""

from collections.abc import Mapping
from dataclasses import dataclass

from xrunner.query import FinishedQuery, PreparedQuery, Sampling, TokenLikelihood
from xrunner.rules.changes import Changes
from xrunner.rules.slots import Seat, Span
from xrunner.rules.steps import KvBudget, Start, StepKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """A request that enters a group with this step. `goes_on`: it may need a second token, so an
    encode pool hands its KV over. `is_handed`: its KV comes from another pool. `start`: the prefix
    that it begins with, and those that it writes."""

    query: int
    input_tokens: int
    sampling: Sampling
    goes_on: bool = False
    is_handed: bool = False
    start: Start | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMessage:
    """Header of one step; the hidden state [rows, H] follows it from stage to stage.

    `removed`: slots compacted away before the step, numbered as after the last one.
    `joined`: requests that enter the group.
    `ended`: requests that ended with their first token; their KV was handed over for nothing.
    `freed`: seats of finished requests in other groups that share the blocks. Blocks are free at
      once; seats go with those groups' next steps.
    `released`: prefixes whose blocks are given back before the step.
    `replaced`: slots that the first of `joined` take, numbered as after compaction.
    `spans`: what is encoded, behind the tokens of those that decode.
    `resting`: slots of partly encoded requests, which do not decode in this step."""

    kind: StepKind
    group: int
    phase: int
    iteration: int
    removed: tuple[int, ...] = ()
    joined: tuple[Joined, ...] = ()
    ended: tuple[int, ...] = ()
    freed: tuple[Seat, ...] = ()
    released: tuple[int, ...] = ()
    replaced: tuple[int, ...] = ()
    spans: tuple[Span, ...] = ()
    resting: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StartMessage:
    """The first message: number of groups, and slots and tokens of each group's cache.
    `encoded_capacity`: tokens of an encoder-decoder model's longest input, cached apart; `capacity`
    is then that of outputs. `budget`: of a group's blocks; None: KV lies in rows."""

    num_groups: int
    slots: int
    capacity: int
    encoded_capacity: int = 0
    budget: KvBudget | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StopMessage:
    """The last message: the stage reports its log and ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedMessage:
    """Encoder output [T, H] follows, from the last stage to every other. It is that of the group's
    oldest encode step without."""

    group: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensMessage:
    """Tokens [rows] of the group follow, from the last stage to the head."""

    group: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HandedQuery:
    """A request on its way to the decode pool; `query` comes without input tokens."""

    query: PreparedQuery
    input_tokens: int
    output_ids: tuple[int, ...]  # one token so far; none of an encoder-decoder model
    likelihoods: tuple[TokenLikelihood, ...]  # of that token, where asked for
    encode_start_s: float
    first_token_s: float | None  # None for an encoder-decoder model

    @property
    def reserve_tokens(self) -> int:
        return self.input_tokens + self.query.max_new_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class HandedMessage:
    """Tells the decode pool's head which requests of encode step `batch` go on. `ended`: those that
    are done although their KV is under way."""

    batch: int
    queries: tuple[HandedQuery, ...]
    ended: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedMessage:
    """Reports results and output tokens so far to the encode pool's head. Each `query` comes
    without input tokens. `begun`: inputs left to the decode pool whose encoding has begun.
    `joined`: (round, requests that decode from it on), where admission asks for it."""

    results: tuple[FinishedQuery, ...]
    output_tokens: int
    begun: tuple[int, ...] = ()
    joined: tuple[tuple[int, tuple[int, ...]], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class InputsMessage:
    """Requests whose inputs the decode pool is to encode itself."""

    queries: tuple[PreparedQuery, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockMessage:
    """KV of these requests of encode step `batch` follows as one block, or encoder output [T, H].
    `lengths`: tokens of each (xrunner.comm.handover)."""

    batch: int
    queries: tuple[int, ...]
    lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedMessage:
    """Says that a decode rank has all its blocks of `batch` (to its head), or that every rank has
    them (from there to the encode pool's head)."""

    batch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PortionMessage:
    """Rank 0's instructions to the head of another replica.

    `queries`: indices in the spool of its next requests. `arrival_s`: when each arrived, by the
    run's clock; () if all were there at the start. `wanted`: number of requests not begun to
    give back, the last ones first. `is_last`: no more will follow. `stops`: end after the next
    step. `change`: new settings, by the launcher's order `revision`."""

    queries: tuple[int, ...] = ()
    arrival_s: tuple[float, ...] = ()
    wanted: int = 0
    is_last: bool = False
    stops: bool = False
    change: Changes | None = None
    revision: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaMessage:
    """Progress of a replica, from its head to rank 0.

    `begun`: requests begun, in the order given. `results`: each request without input tokens.
    `at_work`: (input, output) tokens of active requests; None if not looked up. `changed`:
    (revision, first phase) of a change that was applied. `given_back`: indices given back on
    request; None if none was made. `lost`: indices that had begun, and that had not, when what
    executes its steps died, and `died` says how. `is_ready`: it can execute steps."""

    replica: int
    begun: int
    output_tokens: int
    results: tuple[FinishedQuery, ...] = ()
    at_work: Mapping[int, tuple[int, int]] | None = None
    changed: tuple[int, int] | None = None
    given_back: tuple[int, ...] | None = None
    has_ended: bool = False
    died: str = ""
    lost: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    is_ready: bool = True


Message = (StartMessage | StepMessage | StopMessage | EncodedMessage | TokensMessage
           | HandedMessage | FinishedMessage | InputsMessage | BlockMessage | ReceivedMessage
           | PortionMessage | ReplicaMessage)
