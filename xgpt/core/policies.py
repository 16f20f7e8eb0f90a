"""The scheduling policies, a row each: other code asks the row what a policy can do.

A row has the policy's description, control variables, pools of stages, abilities, and the places of
its parts. A package outside of xgpt adds a row through the entry point group `xgpt.policies`: an
object of type Policy under the policy's name."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

from xgpt.core.controls import CAP, KNOWN, Admission, AdmissionRule, FixedSchedule
from xgpt.core.engines import load_row, rows_of_others
from xgpt.core.errors import UnknownNameError

Role = Literal["both", "encode", "decode"]
GROUP = "xgpt.policies"  # of entry points


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """A control variable that a job may fix: its name, its meaning in words, and its range.
    `otherwise`: its value if a job fixes other variables but not this one (None: it must)."""

    name: str
    words: str
    least: int = 1
    most: int = 1 << 16
    otherwise: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A policy. `pools`: role of each pool of stages, in the order of the ranks.

    The parts are named as "module:attribute" and imported on demand. `controls`: dataclass of its
    control variables, as a schedule holds them. `rules`: function from an Estimate to its batching
    rule, or one rule per pool (torch-free). `formula`: class of its rough formula, made of (name,
    problem, timing, plans of its stages, workload); see xsimulator.rough.figures.Formula. The
    default fits any rule of one pool, and knows only how many requests it takes at a time. None:
    there is none; candidates are in powers of 2, ordered as those of prefill-first."""

    name: str
    title: str
    words: str
    variables: tuple[Variable, ...]
    controls: str
    rules: str
    formula: str | None = "xsimulator.rough.any_rule:AnyRule"
    pools: tuple[Role, ...] = ("both",)
    is_searched: bool = False  # if the job leaves the policy open
    turn: int = 1  # order of a search over several policies: likely winners first
    is_papers: bool = False  # whether the paper proposes it
    is_baseline: bool = False  # whether gains are measured against it
    has_even_batches: bool = False  # whether encode batches are kept even while a job runs
    is_changeable: bool = False  # whether control variables may change while a job runs
    shares_prefixes: bool = False  # whether a prefix of several requests is encoded once
    # rules of admission to choose from if the job names none, the simplest first; (): it has none
    admits: tuple[AdmissionRule, ...] = ()
    forecast: str = CAP  # kind of forecast of a job that names the policy and no kind
    # function from an Estimate to the limits that its rule may take up while it runs, if steps take
    # other times than planned; None: none (RRA has its own, xrunner.rules.changes)
    limits: str | None = None
    # whether one pass encodes some requests beside decoding others, or encodes a request again with
    # its output: an encoder-decoder model would need two passes, through different layers
    is_decoder_only: bool = False

    @property
    def variable_names(self) -> tuple[str, ...]:
        return tuple(variable.name for variable in self.variables)

    def admissions(self, asked: Admission) -> tuple[Admission, ...]:
        """The admission rules to choose from, the simplest first; alone the one that a job asks
        for. Two pools have none by which requests are evicted."""
        if not self.admits or asked.rule:
            return (asked,)
        rules = [replace(asked, rule=rule) for rule in self.admits]
        return tuple(one for one in rules if len(self.pools) == 1 or not one.may_overflow)

    def load(self, part: Literal["controls", "rules", "formula", "limits"]) -> Any:
        """The named part, imported; None if the policy has none."""
        where: str | None = getattr(self, part)
        if where is None:
            return None
        return load_row(where)


_ENCODE_BATCH = Variable(name="encode_batch", words="requests encoded together")
_ITERATIONS = Variable(name="decode_iterations", words="decode iterations between two prefills")
_GROUPS = Variable(name="decode_micro_batches", words="micro-batches of the decode batch")
_GROUP_A_STAGE = replace(_GROUPS, otherwise=0)
_ONE_GROUP = replace(_GROUPS, otherwise=1)
_PARTS = Variable(name="encode_micro_batches", words="steps in which a batch is encoded",
                  otherwise=1)
_ACTIVE = Variable(name="max_active", words="concurrent requests, over all micro-batches")
_BUDGET = Variable(name="token_budget", words="tokens per step", otherwise=0)
_CHUNK = Variable(name="encode_chunk", least=0, otherwise=0,
                  words="tokens that a micro-batch's step encodes beside decoding")

# future-peak has room for more requests, and lengthens their latency
_RESERVING: tuple[AdmissionRule, ...] = ("reserve", "future-peak")


def _waa(name: str, title: str, words: str) -> Policy:
    return Policy(
        name=name, title=title, words=words, variables=(_ENCODE_BATCH, _ONE_GROUP, _CHUNK),
        controls="xgpt.core.controls:WaaControls", rules="xrunner.rules.waa:waa_rules",
        formula="xsimulator.rough.two_pools:TwoPools",
        limits="xrunner.rules.waa:system_limits",
        pools=("encode", "decode"), is_searched=True, is_papers=True, has_even_batches=True,
        admits=_RESERVING)


def _static(name: str, title: str, words: str, *more: Variable, turn: int) -> Policy:
    return Policy(
        name=name, title=title, words=words, variables=(_ENCODE_BATCH, _GROUPS, *more),
        controls="xgpt.core.controls:StaticControls", rules="xrunner.rules.static:static_rule",
        formula="xsimulator.rough.static:Static", is_searched=True, is_baseline=True, turn=turn)


def _continuous(name: str, title: str, words: str, rules: str, *more: Variable, turn: int = 2,
                admits: tuple[AdmissionRule, ...] = ("greedy",)) -> Policy:
    return Policy(
        name=name, title=title, words=words, variables=(_ACTIVE, *more),
        controls="xgpt.core.controls:ContinuousControls", rules=f"xrunner.rules.{rules}",
        formula="xsimulator.rough.one_pool:Continuous", is_searched=True, turn=turn, admits=admits,
        limits="xrunner.rules.iteration:step_limits",
        is_decoder_only=True, shares_prefixes=True)


def _vidurs(row: Policy, **others: Any) -> Policy:
    """A policy of Vidur's (sections 4.5 and 7.3), which is searched for services alone, or where it
    is named."""
    return replace(row, formula=None, is_searched=False, **others)


_ROWS = (
    Policy(name="rra", title="RRA",
           words="round-robin allocation: all devices encode a batch, then decode for some "
                 "iterations",
           variables=(_ENCODE_BATCH, _ITERATIONS, _GROUP_A_STAGE, _CHUNK),
           controls="xgpt.core.controls:RraControls", rules="xrunner.rules.rra:rra_rule",
           formula="xsimulator.rough.one_pool:Rra", is_searched=True, is_papers=True,
           has_even_batches=True, is_changeable=True, admits=_RESERVING, shares_prefixes=True),
    _waa("waa-c", "WAA-C", "workload-aware allocation: some devices encode, the others decode, "
         "divided by computing time"),
    _waa("waa-m", "WAA-M", "workload-aware allocation: some devices encode, the others decode, "
         "divided by memory"),
    _static("ft", "FT", "FasterTransformer: static batches, each until its longest request is done",
            turn=3),
    _static("dsi", "DSI", "DeepSpeed-Inference: static batches, encoded in smaller micro-batches "
            "than they are decoded in", _PARTS, turn=4),
    _continuous("orca", "Orca", "iteration-level scheduling: a request joins as soon as one ends",
                "iteration:orca_rule", admits=_RESERVING),
    _continuous("vllm", "prefill-first", "iteration-level scheduling as in vLLM of 2023: paged "
                "memory; a step encodes or decodes", "paged:vllm_rule", _BUDGET),
    _continuous("sarathi", "Sarathi", "every step decodes and encodes chunks beside it, "
                "within a budget of tokens", "paged:sarathi_rule", _BUDGET, turn=0),
    _vidurs(_continuous("mixed", "mixed batching", "every step decodes and encodes whole inputs "
                        "beside it, within a budget of tokens", "paged:mixed_rule", _BUDGET)),
    _vidurs(_continuous("lightllm", "LightLLM", "a step encodes or decodes; requests join every "
                        "10 steps, if the most memory they will ever need together is there",
                        "paged:lightllm_rule", _BUDGET, admits=("future-peak",)),
            forecast=KNOWN),
)
_OWN: Mapping[str, Policy] = {row.name: row for row in _ROWS}


@cache
def _rows() -> Mapping[str, Policy]:
    """All rows by name; another package cannot replace one of ours."""
    return {**{name: load_row(place) for name, place in rows_of_others(GROUP).items()}, **_OWN}


def policy(name: str) -> Policy:
    """The row of that name. Raises UnknownNameError, which lists the known names."""
    row = _OWN.get(name) or _rows().get(name)
    if row is None:
        raise UnknownNameError("policy", name, _rows())
    return row


def policies() -> tuple[Policy, ...]:
    """All rows: our own in the order of the paper, then those of other packages."""
    return (*_ROWS, *(row for name, row in _rows().items() if name not in _OWN))


def policy_names() -> tuple[str, ...]:
    return tuple(row.name for row in policies())


def searched_policies() -> tuple[str, ...]:
    """Names of the policies that are searched if the job leaves the policy open."""
    return tuple(row.name for row in policies() if row.is_searched)


def served_policies() -> tuple[str, ...]:
    """Names of the policies that are searched for a service if the job leaves the policy open."""
    return tuple(row.name for row in policies()
                 if row.is_searched or (row.formula is None and row.forecast == CAP))


def able_policies(asked: FixedSchedule) -> tuple[Policy, ...]:
    """The policies asked for (else all searched ones) that have every variable which the job fixes:
    a variable that only some policies have chooses among these. A variable fixed to 0 counts as
    not fixed."""
    given = {variable.name for row in policies() for variable in row.variables
             if asked.value_of(variable.name)}
    return tuple(row for row in map(policy, asked.policies or searched_policies())
                 if given <= {*row.variable_names})


def changeable_policy(asked: FixedSchedule) -> str | None:
    """Name of the first of `able_policies` whose control variables may change while a job runs;
    None if there is none."""
    return next((row.name for row in able_policies(asked) if row.is_changeable), None)


def replanned_policies() -> tuple[str, ...]:
    """Names of the policies whose schedule may be replanned while a job runs, which static batches
    do not allow."""
    return tuple(row.name for row in policies() if row.is_searched and not row.is_baseline)
