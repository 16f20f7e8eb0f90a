"""The runner's own engine (xrunner.worker): every policy, every layout."""

from __future__ import annotations

from dataclasses import replace

from xgpt.core.engines import OWN_ENGINE
from xgpt.core.errors import InputError
from xgpt.core.job import Job
from xgpt.core.policies import policies
from xgpt.core.policies import policy as row_of
from xgpt.core.problem import Problem
from xgpt.core.schedule import Schedule
from xrunner.engines.engine import Engine, mistake


def _restricted(job: Job, problem: Problem, schedule: Schedule | None) -> Problem:
    """Every policy that its own kind of model allows, every layout."""
    fixed = problem.fixed
    policy = fixed.policy if schedule is None else schedule.estimate.policy
    if policy is not None and row_of(policy).is_decoder_only and problem.model.is_encoder_decoder:
        able = [row.name for row in policies() if not row.is_decoder_only]
        raise InputError([mistake(
            job, "schedule.policy", policy,
            f"one of {', '.join(able)} for an encoder-decoder model: {policy} encodes "
            "queries beside decoding others, or again with what they generated, in one pass "
            "through the same layers")])
    fixed = replace(fixed, policy=policy)
    if schedule is not None:
        fixed = replace(fixed, tp_degree=schedule.estimate.deployment.tp_degree,
                        tp_gpus=schedule.estimate.deployment.tp_gpus)
    elif fixed.tp_degree == 1 or fixed.tp_gpus == 0:
        fixed = replace(fixed, tp_degree=1, tp_gpus=0)
    return replace(problem, fixed=fixed)


ENGINE = Engine(name=OWN_ENGINE, worker="xrunner.worker", restricted=_restricted,
                is_predicted=True, is_changeable=True)
