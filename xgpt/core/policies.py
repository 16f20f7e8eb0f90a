"""The scheduling policies: one row each. Whoever wants to know something of a policy asks its row.

A row says in words what the policy is, which control variables it has, what pools of stages it
needs, what it is able to do, and where its parts are. A package outside of xgpt adds a row through
the entry point group `xgpt.policies`: an object of type Policy under the policy's name."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

from xgpt.core.controls import FixedSchedule
from xgpt.core.engines import load_row, rows_of_others
from xgpt.core.errors import UnknownNameError

Role = Literal["both", "encode", "decode"]
GROUP = "xgpt.policies"  # of entry points


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """A control variable that a job may fix: what it counts, in words, its range, and its value
    where a job that fixes others says nothing of it (None: it has to)."""

    name: str
    words: str
    least: int = 1
    most: int = 1 << 16
    otherwise: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """One policy. `pools` are the phases that its pools of stages work, in the order of the ranks.

    The parts are named as "module:attribute" and imported on demand:
    controls: dataclass of its control variables, as a schedule holds them.
    rules: function from an Estimate to its batching rule, or one rule a pool (torch-free).
    formula: made of (name, problem, timing, plans of its stages, workload), says roughly what the
        policy does (xsimulator.rough.figures.Formula). By default what is known of any rule of one
        pool: how many queries it takes at a time."""

    name: str
    title: str
    words: str
    variables: tuple[Variable, ...]
    controls: str
    rules: str
    formula: str = "xsimulator.rough.any_rule:AnyRule"
    pools: tuple[Role, ...] = ("both",)
    is_searched: bool = False  # where the job leaves the policy open
    turn: int = 1  # at which a search over several looks at it: likely winners first
    is_papers: bool = False  # one of those that the paper proposes
    is_baseline: bool = False  # what gains are measured against, whoever else has chosen it
    has_even_batches: bool = False  # encode batches are kept even while a job runs
    is_changeable: bool = False  # control variables may change while a job runs
    # function from an Estimate to what its rule takes up while it runs, within the caches there
    # are, where steps take other times; None: nothing (RRA has its own, xrunner.rules.changes)
    limits: str | None = None
    # One pass encodes some queries beside decoding others, or encodes a query again with what it
    # has generated: an encoder-decoder model would need two passes, through different layers.
    is_decoder_only: bool = False

    @property
    def variable_names(self) -> tuple[str, ...]:
        return tuple(variable.name for variable in self.variables)

    def load(self, part: Literal["controls", "rules", "formula", "limits"]) -> Any:
        """One of its parts, imported; None for a policy that has none."""
        where: str | None = getattr(self, part)
        if where is None:
            return None
        return load_row(where)


_ENCODE_BATCH = Variable(name="encode_batch", words="queries encoded together")
_ITERATIONS = Variable(name="decode_iterations", words="decode iterations between two encodings")
_GROUPS = Variable(name="decode_micro_batches", words="groups the decode batch is split into")
_GROUP_A_STAGE = replace(_GROUPS, otherwise=0)
_ONE_GROUP = replace(_GROUPS, otherwise=1)
_PARTS = Variable(name="encode_micro_batches", words="steps in which a batch is encoded",
                  otherwise=1)
_ACTIVE = Variable(name="max_active", words="queries at a time, over all groups")
_BUDGET = Variable(name="token_budget", words="tokens of a step", otherwise=0)
_CHUNK = Variable(name="encode_chunk", least=0, otherwise=0,
                  words="tokens that a group's step encodes beside decoding")

def _waa(name: str, title: str, words: str) -> Policy:
    return Policy(
        name=name, title=title, words=words, variables=(_ENCODE_BATCH, _ONE_GROUP, _CHUNK),
        controls="xgpt.core.controls:WaaControls", rules="xrunner.rules.waa:waa_rules",
        formula="xsimulator.rough.two_pools:TwoPools",
        limits="xrunner.rules.waa:system_limits",
        pools=("encode", "decode"), is_searched=True, is_papers=True, has_even_batches=True)


def _static(name: str, title: str, words: str, *more: Variable, turn: int) -> Policy:
    return Policy(
        name=name, title=title, words=words, variables=(_ENCODE_BATCH, _GROUPS, *more),
        controls="xgpt.core.controls:StaticControls", rules="xrunner.rules.static:static_rule",
        formula="xsimulator.rough.static:Static", is_searched=True, is_baseline=True, turn=turn)


def _continuous(name: str, title: str, words: str, rules: str, *more: Variable,
                turn: int = 2) -> Policy:
    return Policy(
        name=name, title=title, words=words, variables=(_ACTIVE, *more),
        controls="xgpt.core.controls:ContinuousControls", rules=f"xrunner.rules.{rules}",
        formula="xsimulator.rough.one_pool:Continuous", is_searched=True, turn=turn,
        limits="xrunner.rules.iteration:step_limits",
        is_decoder_only=True)


_ROWS = (
    Policy(name="rra", title="RRA",
           words="round-robin allocation: all devices encode a batch, then decode for some "
                 "iterations",
           variables=(_ENCODE_BATCH, _ITERATIONS, _GROUP_A_STAGE, _CHUNK),
           controls="xgpt.core.controls:RraControls", rules="xrunner.rules.rra:rra_rule",
           formula="xsimulator.rough.one_pool:Rra", is_searched=True, is_papers=True,
           has_even_batches=True, is_changeable=True),
    _waa("waa-c", "WAA-C", "workload-aware allocation: some devices encode, the others decode, "
         "divided by computing time"),
    _waa("waa-m", "WAA-M", "workload-aware allocation: some devices encode, the others decode, "
         "divided by memory"),
    _static("ft", "FT", "FasterTransformer: static batches, each until its longest query is done",
            turn=3),
    _static("dsi", "DSI", "DeepSpeed-Inference: static batches, encoded in smaller micro-batches "
            "than they are decoded in", _PARTS, turn=4),
    _continuous("orca", "Orca", "iteration-level scheduling: a query joins as soon as one leaves",
                "iteration:orca_rule"),
    _continuous("vllm", "prefill-first", "iteration-level scheduling as in vLLM of 2023: paged "
                "memory; a step encodes or decodes", "paged:vllm_rule", _BUDGET),
    _continuous("sarathi", "Sarathi", "every step decodes and encodes chunks beside it, "
                "within a budget of tokens", "paged:sarathi_rule", _BUDGET, turn=0),
)
_OWN: Mapping[str, Policy] = {row.name: row for row in _ROWS}


@cache
def _rows() -> Mapping[str, Policy]:
    """Own rows first; another package cannot replace one."""
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
    """Names of those that a search looks at where the job leaves the policy open."""
    return tuple(row.name for row in policies() if row.is_searched)


def able_policies(asked: FixedSchedule) -> tuple[Policy, ...]:
    """The policies asked for, or else those that are searched, that have every variable which is
    given a value: a variable that some alone have is a wish for one of them (0 of it is none)."""
    given = {variable.name for row in policies() for variable in row.variables
             if asked.value_of(variable.name)}
    return tuple(row for row in map(policy, asked.policies or searched_policies())
                 if given <= {*row.variable_names})


def changeable_policy(asked: FixedSchedule) -> str | None:
    """The first of these whose control variables may change while a job runs, if there is one."""
    return next((row.name for row in able_policies(asked) if row.is_changeable), None)


def replanned_policies() -> tuple[str, ...]:
    """Names of those whose schedule may be found anew while a job runs: static batches begin and
    end together, as they were planned."""
    return tuple(row.name for row in policies() if row.is_searched and not row.is_baseline)
