"""KV tokens that admission counts, by the formula, beside an account kept token by token."""

import numpy as np
import pytest
from problems import problem_of

from xgpt.core import catalog
from xgpt.core.controls import Admission, Forecasting
from xgpt.core.lengths import JointLengths, empirical, truncated_normal
from xsimulator.rough.workload import Workload

TASK, BUDGET, REQUESTS = catalog.task("T"), 43_437, 4000
CLASSES = Forecasting(kind="class", width=200)
KNOWN = Forecasting(kind="known")
CAPS = Forecasting()
LENGTHS = {
    "task S": catalog.task("S"), "task G": catalog.task("G"),
    "long tail": JointLengths(inputs=truncated_normal(64, 20, 100),
                              outputs=empirical([1] * 50 + [20] * 40 + [900] * 10)),
    "one token": JointLengths(inputs=truncated_normal(64, 20, 100), outputs=empirical([1])),
    "two lengths": JointLengths(inputs=empirical([10, 500]), outputs=empirical([2, 300]))}


def peak(held, left):
    """Most tokens that lie in the cache until all are done, if none is added: an end at a time."""
    order = np.argsort(left)
    behind = np.cumsum(held[order][::-1])[::-1]
    return (behind + np.arange(len(held), 0, -1) * left[order]).max()


def mean_at_a_time(admission):
    """Requests at work, an iteration after the other, while others wait."""
    inputs, outputs = TASK.sample(REQUESTS, np.random.default_rng(1))
    width = {"cap": 320, "class": 200, "known": 1}[admission.forecast.kind]
    forecasts = np.minimum(-(-outputs // width) * width, 320)
    rows, written, counts, begun = np.empty(0, int), np.zeros(REQUESTS, int), [], 0
    while begun < REQUESTS:
        while begun < REQUESTS:
            more = np.append(rows, begun)
            held, left = (inputs + written)[more], (forecasts - written)[more]
            most = (held + left).sum() if admission.rule == "reserve" else peak(held, left)
            if most > BUDGET:
                break
            rows, begun = more, begun + 1
        written[rows] += 1
        counts.append(len(rows))
        rows = rows[written[rows] < outputs[rows]]
    return np.mean(counts[len(counts) // 5:])


@pytest.mark.parametrize(("admission", "at_a_time"), [
    (Admission(rule="reserve"), 97), (Admission(rule="future-peak"), 136),
    (Admission(rule="future-peak", forecast=CLASSES), 172),
    (Admission(rule="future-peak", forecast=KNOWN), 205)])
def test_as_many_are_at_work_as_in_an_account_of_every_token(admission, at_a_time):
    work = Workload(problem_of("opt-13b", "a40-4", TASK), admission)
    seen = mean_at_a_time(admission)
    assert seen == pytest.approx(at_a_time, rel=0.02)
    assert BUDGET / work.tokens_at_work == pytest.approx(seen, rel=0.03)


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("model", ["opt-13b", "t5-11b"])
def test_a_peak_lies_between_the_present_and_what_is_reserved(name, model):
    problem = problem_of(model, "a40-4", LENGTHS[name])

    def counted(rule, forecast=CAPS):
        work = Workload(problem, Admission(rule=rule, forecast=forecast))
        return np.array([work.tokens_at_work, *(work.phase(own).counted for own in (1, 7, 400))])

    rising = [counted("greedy"), counted("future-peak", KNOWN), counted("future-peak", CLASSES),
              counted("future-peak"), counted("reserve")]
    assert (np.diff(rising, axis=0) >= -1e-3).all(), rising


@pytest.mark.parametrize("name", LENGTHS)
def test_with_caps_reserve_static_is_reserve(name):
    """At the moment after an encoding, by any number of iterations between two."""
    problem = problem_of("opt-13b", "a40-4", LENGTHS[name])
    static, whole = (Workload(problem, Admission(rule=rule)) for rule in
                     ("reserve-static", "reserve"))
    for iterations in (1, 7, 400):
        assert static.phase(iterations).counted == pytest.approx(whole.phase(iterations).counted)
        assert static.phase(iterations).counted_variance == pytest.approx(
            whole.phase(iterations).counted_variance, abs=1e-3)
