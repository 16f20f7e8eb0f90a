"""RRA's rule driven without a model."""

from xrunner.rules.rra import RraRule
from xrunner.rules.steps import Step, StepKind


def drive(rule: RraRule, outputs: dict[int, int]) -> list[Step]:
    """Runs the rule to its end; query q needs outputs[q] tokens, the first from its encoding."""
    steps: list[Step] = []
    left = dict(outputs)
    active: list[list[int]] = [[] for _ in range(rule.num_groups)]
    while (group := rule.next_group()) is not None:
        for query in [q for q in active[group] if left[q] == 0]:
            active[group].remove(query)
            rule.finish(query)
        step = rule.decide()
        if step is None:
            continue
        steps.append(step)
        active[group] += step.joined
        for query in step.joined if step.kind is StepKind.ENCODE else active[group]:
            left[query] -= 1  # who joins gets the first token, whoever decodes another
        assert len(active[group]) <= rule.group_max_active
        assert len(steps) < 100_000
    assert not any(left.values())
    return steps
