"""Control variables of a schedule, which steer a policy's batching rule (paper sections 4 and 5),
and those that a job fixes.

Each policy's row (xgpt.core.policies) names its class here, or one of a package of its own."""

from dataclasses import dataclass
from typing import Literal, Protocol, get_args

from xgpt.core.placement import AskedPlacement
from xgpt.core.units import Amount, Count, Flag, Positive, Share, Unbounded

# How far admission to the KV cache looks ahead (xrunner.rules.room).
AdmissionRule = Literal["greedy", "reserve-static", "reserve-dynamic", "future-peak", "reserve"]
ForecastValue = Literal["least", "expected", "most"]
FORECAST_VALUES: tuple[ForecastValue, ...] = get_args(ForecastValue)
# In which order requests are run (xrunner.rules.order).
Order = Literal["input", "random", "shortest-input", "longest-input", "shortest-output",
                "longest-output", "deadline", "prefix", "blend"]
ORDERS: tuple[Order, ...] = get_args(Order)
SHARING_ORDERS: tuple[Order, ...] = ("prefix", "blend")  # keep together who shares a prefix
ADMISSION_RULES: tuple[AdmissionRule, ...] = get_args(AdmissionRule)
# Kinds of forecast; CAP takes each request's own limit.
CAP, DISTRIBUTION, KNOWN, COLUMN, MEAN, CLASS = FORECAST_KINDS = (
    "cap", "distribution", "known", "column", "mean", "class")
FORECASTS_GROUP = "xgpt.forecasts"  # of entry points, (input tokens, text) to a forecast


class Controls(Protocol):
    """A policy's control variables: a frozen dataclass of plain values that names its policy."""

    @property
    def policy(self) -> str:
        """The name of the policy's row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvenBatches:
    """Workload adjustment while a job runs (paper section 5.2). Tokens of an encode batch may leave
    their mean (`mean_input_tokens` per request) by the share `adjustment`. Batches steer the number
    of active requests (RRA: at a phase's begin; WAA: in the decode pool) to `target_active`; 0:
    they do not."""

    adjustment: Share = 0.0
    mean_input_tokens: Amount = 0.0
    target_active: Amount = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecasting:
    """How the output tokens of a request are forecast (xrunner.rules.forecast).

    `kind`: "cap" (its own limit), "distribution", "known", "column", "mean", "class", or the name
    of an entry point `xgpt.forecasts`. `bins`: ranges of input lengths with forecasts of their own.
    `width`: output tokens of a class. `accuracy`: share of right classes, of which the others are
    neighbours; 0: classes are learned from finished requests. `use`: the value that admission
    reads."""

    kind: str = CAP
    bins: Positive = 8
    width: Positive = 200
    accuracy: Share = 0.0
    use: ForecastValue = "most"

    @property
    def is_learned(self) -> bool:
        """Whether forecasts are made from finished requests."""
        return self.kind == MEAN or (self.kind == CLASS and not self.accuracy)

    @property
    def needs_outputs(self) -> bool:
        """Whether forecasts are made from output lengths that must be known beforehand."""
        return self.kind == KNOWN or (self.kind == CLASS and self.accuracy > 0)

    @property
    def may_be_outgrown(self) -> bool:
        """Whether requests may write more tokens than forecast."""
        return self.kind not in (CAP, KNOWN)

    @property
    def is_given(self) -> bool:
        """Whether each request brings its forecast, in a column or by an entry point."""
        return self.kind == COLUMN or self.kind not in FORECAST_KINDS


AT_CAPS = Forecasting()


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """How a policy admits requests to its KV cache. `rule` None: greedy with paged KV, else
    reserve. `after_free`: reserve-dynamic looks at the moment after the first request has left,
    not before."""

    rule: AdmissionRule | None = None
    forecast: Forecasting = AT_CAPS
    after_free: Flag = False

    @property
    def may_overflow(self) -> bool:
        """Whether requests may outgrow what was admitted, so that some must be evicted."""
        return self.rule in ("greedy", "reserve-dynamic") or (
            self.rule in ("reserve-static", "future-peak") and (
                self.forecast.kind != CAP or self.forecast.use != "most"))


@dataclass(frozen=True, slots=True, kw_only=True)
class RraControls:
    """RRA: `encode_batch` requests (B_E) are encoded together, then follow `decode_iterations`
    (N_D), in G micro-batches. With `encode_chunk` above 0 they are encoded beside decoding, in
    chunks of at most so many tokens, and a micro-batch has room for twice the requests of a mean
    input that join it with one chunk."""

    policy: str = "rra"
    encode_batch: Positive
    decode_iterations: Positive
    decode_micro_batches: Positive
    encode_chunk: Count = 0
    even: EvenBatches = EvenBatches()
    admission: Admission = Admission()


@dataclass(frozen=True, slots=True, kw_only=True)
class WaaControls:
    """WAA: the encode pool encodes `encode_batch` requests (B_E) together, the decode pool decodes
    in G micro-batches; at most `max_in_system` requests are in both. With `encode_chunk` above 0
    the decode pool also encodes up to so many tokens of waiting inputs in each step while it has
    fewer requests than `planned_active`. `stock_tokens` of such inputs are fetched beforehand."""

    policy: str
    encode_batch: Positive
    decode_micro_batches: Positive
    max_in_system: Positive
    encode_chunk: Count = 0
    planned_active: Count = 0
    stock_tokens: Count = 0
    even: EvenBatches = EvenBatches()
    admission: Admission = Admission()


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """How static batches are formed (xrunner.rules.static.BatchFormer). `deadline`, `length`:
    weights of a request's deadline (seconds) and forecast (tokens), by which requests are sorted
    and a batch's cost is counted. A batch has at most `most` requests, a cost of at most
    `threshold` (infinite: any; None: left to the planner), and forecasts of at most `pack` tokens
    together (None: any). `growth`: the cost of length is how much a batch's longest forecast grows;
    else its sum with the request's."""

    most: Positive = 10
    threshold: Unbounded | None = None
    deadline: Amount = 0.0
    length: Amount = 1.0
    growth: Flag = True
    pack: Positive | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticControls:
    """FT, DSI: a batch is encoded in `encode_micro_batches` steps and decoded in
    `decode_micro_batches` micro-batches until its longest request is done. `batches`: how they are
    formed (None: in the input's order), by forecasts of the kind `forecast`."""

    policy: str
    encode_batch: Positive
    decode_micro_batches: Positive
    encode_micro_batches: Positive
    batches: Batches | None = None
    forecast: Forecasting = AT_CAPS


@dataclass(frozen=True, slots=True, kw_only=True)
class ContinuousControls:
    """ORCA, prefill-first, Sarathi: at most `max_active` requests at a time over all micro-batches,
    and at most `token_budget` tokens in a step (None: no limit)."""

    policy: str
    max_active: Positive
    token_budget: Positive | None = None
    admission: Admission = Admission()


def forecasting_of(controls: Controls) -> Forecasting:
    """How a policy forecasts output tokens; at the caps if it has no such variable."""
    own = getattr(controls, "admission", Admission()).forecast
    forecasting: Forecasting = getattr(controls, "forecast", own)
    return forecasting


def max_in_system(controls: Controls) -> int:
    """Most requests between the start of prefill and the last token; 0 if the policy has no such
    variable."""
    most: int = getattr(controls, "max_in_system", 0)
    return most


# How a request is routed to a replica: round-robin; least-tokens, to the replica with the fewest
# tokens so far (known, or expected as output), so that all end together; fixed, as least-tokens,
# but each replica keeps its requests however slow it is. Where requests arrive over time,
# least-tokens counts the tokens of those that are not done, least-queries these requests; deferred
# keeps a request until a replica would begin it.
ROUND_ROBIN, LEAST_TOKENS, FIXED = "round-robin", "least-tokens", "fixed"
RANDOM, LEAST_QUERIES, DEFERRED = "random", "least-queries", "deferred"
ROUTINGS = (LEAST_TOKENS, ROUND_ROBIN, FIXED)  # of a batch job
ARRIVAL_ROUTINGS = (LEAST_QUERIES, LEAST_TOKENS, ROUND_ROBIN, RANDOM, DEFERRED, FIXED)


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedSchedule:
    """Control variables that the user fixed; None leaves them to the scheduler."""

    policies: tuple[str, ...] = ()  # to choose from; (): all that the engine executes
    replicas: int | None = None
    encode_batch: int | None = None
    decode_iterations: int | None = None
    decode_micro_batches: int | None = None
    encode_chunk: int | None = None  # RRA; 0: whole inputs, before decoding
    encode_micro_batches: int | None = None  # DSI
    max_active: int | None = None  # ORCA, vLLM, Sarathi
    token_budget: int | None = None  # vLLM, Sarathi
    tp_degree: int | None = None
    tp_gpus: int | None = None
    ep_degree: int | None = None  # of a mixture of experts: see xgpt.core.model.Split
    attention_dp: int | None = None
    placement: AskedPlacement | None = None  # of every pool; None: none is asked for
    others: tuple[tuple[str, int], ...] = ()  # (name, value) of variables of other packages

    @property
    def policy(self) -> str | None:
        """The only policy to choose from; None if there are several or all."""
        return self.policies[0] if len(self.policies) == 1 else None

    def value_of(self, variable: str) -> int | None:
        """The fixed value of a control variable, of our policies or of other packages; None if it
        is free."""
        value: int | None = getattr(self, variable, None)
        return dict(self.others).get(variable) if value is None else value


@dataclass(frozen=True, slots=True, kw_only=True)
class Adjustment:
    """Workload adjustment that the user asks for (paper section 5.2); None: the default.
    `order`: in which order requests are run; "auto" leaves the choice to the planner. `window`:
    number of consecutive requests that are ordered among themselves, 0 for the whole job.
    `routing`: one of ROUTINGS, how replicas share the requests. `admission`: its rule None leaves
    the choice to the planner. `batches`: how static batches are formed. `prefixes`: whether shared
    prefixes are encoded once."""

    share: float | None = None  # by which an encode batch's tokens may leave their mean
    steers: bool | None = None  # whether encode batches steer the decode batch to its mean
    order: Order | Literal["auto"] = "auto"
    window: int | None = None
    routing: str = LEAST_TOKENS
    admission: Admission = Admission()
    batches: Batches | None = None
    prefixes: Literal["auto", "off"] = "auto"
