"""Which rules execute an Estimate, by its policy."""

from __future__ import annotations

from collections.abc import Callable

from xgpt.core.errors import UnknownNameError
from xgpt.core.schedule import Estimate
from xrunner.rules.iteration import orca_rule
from xrunner.rules.paged import sarathi_rule, vllm_rule
from xrunner.rules.rra import rra_rule
from xrunner.rules.static import static_rule
from xrunner.rules.steps import BatchingRule
from xrunner.rules.waa import waa_rules

# what the runner's ranks execute
EXECUTED = ("rra", "waa-c", "waa-m", "ft", "dsi", "orca", "vllm", "sarathi")
TWO_POOLS = ("waa-c", "waa-m")
# One pass encodes some queries beside decoding others, or encodes a query again with what it has
# generated: an encoder-decoder model would need two passes, through different layers.
DECODER_ONLY = ("orca", "vllm", "sarathi")

_RULES: dict[str, Callable[[Estimate], tuple[BatchingRule, ...]]] = {
    "rra": lambda estimate: (rra_rule(estimate),),
    "waa-c": waa_rules,
    "waa-m": waa_rules,
    "ft": lambda estimate: (static_rule(estimate),),
    "dsi": lambda estimate: (static_rule(estimate),),
    "orca": lambda estimate: (orca_rule(estimate),),
    "vllm": lambda estimate: (vllm_rule(estimate),),
    "sarathi": lambda estimate: (sarathi_rule(estimate),),
}


def rules_for(estimate: Estimate) -> tuple[BatchingRule, ...]:
    """One per pool, in the order of their stages."""
    if estimate.policy not in _RULES:
        raise UnknownNameError("policy", estimate.policy, _RULES)
    return _RULES[estimate.policy](estimate)
