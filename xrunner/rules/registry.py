"""Which rules execute an Estimate: its policy's row says."""

from __future__ import annotations

from xgpt.core.policies import policy
from xgpt.core.schedule import Estimate
from xrunner.rules.steps import BatchingRule


def rules_for(estimate: Estimate) -> tuple[BatchingRule, ...]:
    """One per pool, in the order of their stages. Raises UnknownNameError for a policy that no row
    describes."""
    rules = policy(estimate.policy).load("rules")(estimate)
    return rules if isinstance(rules, tuple) else (rules,)
