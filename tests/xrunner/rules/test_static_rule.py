"""Static batching: order of steps, nobody leaves early, and the KV share is kept."""

from collections import Counter, deque

from examples import examples
from holding import holding
from hypothesis import given
from hypothesis import strategies as st

from xrunner.rules.static import StaticRule
from xrunner.rules.steps import Step, StepKind


def rule_of(batch: int, groups: int, encodes: int | None = None, kv: int = 10_000) -> StaticRule:
    return StaticRule(encode_batch=batch, num_groups=groups, kv_tokens=kv,
                      encode_micro_batches=encodes or groups)


def drive(rule: StaticRule, outputs: dict[int, int]) -> list[Step]:
    """Runs the rule to its end; query q needs outputs[q] tokens, the first from its encoding. Rows
    that are done stay in their group until their batch is."""
    steps: list[Step] = []
    made: Counter[int] = Counter()
    rows: list[list[int]] = [[] for _ in range(rule.num_groups)]
    pending: list[deque[Step]] = [deque() for _ in range(rule.num_groups)]
    while (group := rule.next_group()) is not None:
        if rule.needs_tokens:
            while pending[group]:
                step = pending[group].popleft()
                if step.phase != steps[-1].phase:
                    continue  # superfluous steps of the last batch
                for query in step.joined or rows[group]:
                    made[query] += 1
                    if made[query] == outputs[query]:
                        rule.finish(query)
        step = rule.decide()
        if step is None:
            continue
        if not steps or step.phase != steps[-1].phase:
            rows = [[] for _ in range(rule.num_groups)]
        steps.append(step)
        pending[group].append(step)
        rows[group] += step.joined
        assert len(rows[group]) <= rule.group_max_active
        assert rule.reserved_tokens <= rule.group_kv_tokens * rule.num_groups
        assert len(steps) < 100_000
    assert all(made[query] >= wanted for query, wanted in outputs.items())
    return steps


def words(steps: list[Step]) -> str:
    return " ".join(f"{s.kind.value[0].upper()}{s.group}" for s in steps)


def test_ft_encodes_all_micro_batches_and_decodes_them_in_turn():
    rule = holding(rule_of(4, 2), 8, 10)
    steps = drive(rule, dict.fromkeys(range(8), 4))
    one = "E0 E1 D0 D1 D0 D1 D0 D1 D0"  # the last: group 1's last token is not there yet
    assert words(steps) == f"{one} {one}"
    assert [s.joined for s in steps if s.kind is StepKind.ENCODE] == [(0, 1), (2, 3), (4, 5),
                                                                      (6, 7)]
    assert [s.iteration for s in steps[:9]] == [0, 0, 1, 1, 2, 2, 3, 3, 4]
    assert {s.phase for s in steps[:9]} == {0} and {s.phase for s in steps[9:]} == {1}


def test_dsi_encodes_each_decode_group_in_parts_without_waiting():
    rule = holding(rule_of(8, 2, 4), 8, 10)
    for _ in range(4):
        assert rule.next_group() is not None and not rule.needs_tokens
        assert len(rule.decide().joined) == 2
    assert rule.next_group() == 0 and rule.needs_tokens

    rule = holding(rule_of(8, 2, 4), 8, 10)
    steps = drive(rule, dict.fromkeys(range(8), 3))
    assert words(steps) == "E0 E0 E1 E1 D0 D1 D0 D1 D0"


def test_every_row_reserves_the_batchs_longest_output():
    rule = rule_of(6, 2, kv=100)  # 50 a group
    assert not rule.submit(9, 51, 1), "can never fit: told at once"
    for query, (inputs, reserve) in enumerate([(5, 10), (5, 10), (5, 10), (5, 25), (5, 10)]):
        assert rule.submit(query, reserve, inputs)
    assert rule.next_group() == 0
    step = rule.decide()
    # with query 3's 20 tokens of output, the three before it would reserve 75: it has to wait
    assert step is not None and step.joined == (0, 1, 2)
    assert rule.reserved_tokens == 30


@examples(60)
@given(batch=st.integers(1, 20), groups=st.integers(1, 4), parts=st.integers(1, 4),
       kv=st.integers(40, 300), outputs=st.lists(st.integers(1, 20), min_size=1, max_size=40))
def test_every_query_is_encoded_once_and_ends_whatever_the_limits(
        batch, groups, parts, kv, outputs):
    rule = rule_of(batch, groups, groups * parts, kv)
    wanted = {q: n for q, n in enumerate(outputs) if rule.submit(q, n + q % 7, q % 7)}
    steps = drive(rule, wanted)
    order = [query for step in steps for query in step.joined]
    assert order == sorted(wanted), "each once, in the input's order"
    assert rule.next_group() is None and rule.reserved_tokens == 0
    for phase in {step.phase for step in steps}:
        of_batch = [step for step in steps if step.phase == phase]
        encodes = [step for step in of_batch if step.kind is StepKind.ENCODE]
        assert of_batch[:len(encodes)] == encodes and len(encodes) <= groups * parts
        assert sum(len(step.joined) for step in encodes) <= batch
        longest = max(wanted[query] for step in encodes for query in step.joined)
        assert max((step.iteration for step in of_batch), default=0) in (longest - 1, longest)
