"""Safety margins: the uncertainties that they cover, and their sentences."""

import math
from dataclasses import replace

import numpy as np
import pytest
from problems import CONFIG, doubts_of, estimate_of, observed, roofline_of, toy_problem
from profiles import metadata

from xgpt.core import catalog
from xgpt.core.cluster import Cluster
from xgpt.core.constraint import latency_constraint
from xgpt.core.controls import FixedSchedule
from xgpt.core.deployment import StageAssignment
from xgpt.core.errors import InfeasibleError
from xgpt.core.lengths import joint_empirical, truncated_normal, with_output_moments
from xgpt.core.problem import Problem, QueryLengths
from xgpt.core.schedule import Estimate
from xprofiler.profile import Profile, Sample, TableKey
from xprofiler.profile_timing import ProfileTiming, TableError
from xprofiler.roofline import Roofline
from xscheduler.evaluator import Evaluator
from xscheduler.job_sample import quantile_levels
from xscheduler.margin import Margins, doubt_of_estimate, upper_limit
from xscheduler.planner import plan
from xsimulator.replay.job import planned_queries, replay_job
from xsimulator.rough.formulas import fixed_estimate

SIZES = (1.0, 4.0, 16.0, 64.0, 256.0, 1024.0)


def margin_of(problem: Problem, estimate: Estimate | None = None, **constraint: float):
    problem = replace(problem, constraint=replace(problem.constraint, **constraint))
    return doubts_of(problem).margin(estimate or estimate_of(problem, **CONFIG))


# --- what is covered, and what is not ---------------------------------------------------------


def test_nothing_uncertain_costs_nothing():
    found = margin_of(toy_problem(latency_s=0.1), estimate_of(toy_problem(), **CONFIG))
    assert (found.factor, found.timing, found.lengths, found.drift) == (1, 1, 1, 1)
    assert "not covered" in found.sentence and "given" in found.sentence
    found = margin_of(observed(toy_problem(), 50), drift=0.2)
    assert found.factor == 1 and "no latency limit" in found.sentence


def computed_margin(engine: str, confidence: float = 0.9):
    problem = toy_problem(latency_s=0.1)
    problem = replace(problem, constraint=replace(problem.constraint, confidence=confidence))
    device = replace(problem.cluster.device, generation="hopper")
    timing = Roofline(problem.model, device, problem.dtype, engine=engine)
    return doubts_of(problem, timing).margin(estimate_of(problem, **CONFIG)), timing


def test_computed_times_have_the_margin_of_their_level_of_doubt():
    found, timing = computed_margin("vllm")
    stages = estimate_of(toy_problem(latency_s=0.1), **CONFIG).deployment.stages
    doubt = timing.doubt(1, len(stages))
    assert found.timing == found.factor == pytest.approx(doubt.factor(0.9)) and found.factor > 1
    assert f"for computed step times ({doubt.words})" in found.sentence
    assert "not covered" not in found.sentence


@pytest.mark.parametrize(("link", "nodes", "level"), [
    ("nvlink4", 1, "same cell"), ("pcie4-x16", 1, "far"), ("nvlink4", 2, "far")])
def test_a_group_over_a_link_that_no_run_had_is_far_from_all(link, nodes, level):
    """Published groups of ranks were in one node, over NVLink."""
    cluster = Cluster(name="own", device=catalog.device("H100"), num_nodes=nodes,
                      devices_per_node=8 // nodes, intra_link=catalog.link(link),
                      inter_link=catalog.link("ib-400g"))
    timing = Roofline(catalog.model("llama-3.1-8b"), cluster.device, "bfloat16",
                      engine="tensorrt-llm-1.0")
    stage = StageAssignment(index=0, ranks=tuple(range(8)), first_layer=0, num_layers=32)
    own = estimate_of(toy_problem(), **CONFIG)
    pool = replace(own.deployment.pools[0], stages=(stage,))
    estimate = replace(own, deployment=replace(own.deployment, pools=(pool,)))
    found = doubt_of_estimate(timing, estimate, cluster)
    assert found is not None and found.level == level
    assert ("this link between ranks" in found.why) == (level == "far")


def test_a_refusal_says_what_takes_a_smaller_margin_of_computed_times():
    own = computed_margin("xgpt", 0.95)[0]
    at_less = computed_margin("xgpt", 0.8)[0].timing - 1
    assert "plan.engine" in own.remedy and "xgpt calibrate" in own.remedy
    assert f"{at_less:.0%} at 0.8" in own.remedy and "none at 0.5" in own.remedy


def test_more_observations_leave_a_smaller_margin():
    factors = [margin_of(observed(toy_problem(latency_s=0.1), n)).lengths
               for n in (60, 6000, 600_000)]
    assert factors == sorted(factors, reverse=True)
    assert factors[0] > 1.05 > 1.01 > factors[-1] >= 1


@pytest.mark.parametrize("spread", [0.0, 0.03])
def test_limits_rise_with_confidence(spread):
    logs = np.random.default_rng(0).normal(0.01, 0.1, 40)
    limits = [upper_limit(logs, spread, c) for c in (0.5, 0.8, 0.9, 0.95, 0.97, 0.98, 0.999)]
    assert limits == sorted(limits) and limits[0] < limits[-1]
    assert upper_limit(np.zeros(1), 0.02, 0.95) == pytest.approx(0.02 * 1.6449, rel=1e-3)


def test_margins_rise_with_confidence_and_repeat_exactly():
    problem = observed(toy_problem(latency_s=0.1), 100)
    factors = [margin_of(problem, confidence=c).factor for c in (0.6, 0.95, 0.99)]
    assert factors == sorted(factors) and factors[0] < factors[-1]
    assert margin_of(problem) == margin_of(problem)
    factors = [computed_margin("xgpt", confidence)[0].factor for confidence in (0.5, 0.8, 0.95)]
    assert factors[0] == 1 < factors[1] < factors[2], "as likely as not takes times as they are"


def test_drift_is_the_worst_of_the_drifted_latencies():
    problem = toy_problem(latency_s=0.1)
    found = margin_of(problem, drift=0.2)
    assert found.drift == found.factor > 1.1
    assert "20%" in found.sentence
    assert margin_of(problem, drift=0.1).factor < found.factor


def test_layers_stay_where_the_schedule_has_them():
    """Other lengths would move them."""
    problem = toy_problem(latency_s=0.1)
    other = replace(problem, lengths=replace(
        problem.lengths, outputs=truncated_normal(60, 10, 100)))
    estimate = estimate_of(problem, "waa-c", encode_batch=4, decode_micro_batches=2)
    assert estimate_of(other, "waa-c", encode_batch=4, decode_micro_batches=2
                       ).deployment.stages != estimate.deployment.stages
    drifted = with_output_moments(problem.lengths, mean_factor=1.2)
    expected = Evaluator(replace(problem, lengths=drifted), roofline_of(problem)).seconds(
        estimate, "latency") / Evaluator(problem, roofline_of(problem)).seconds(estimate, "latency")
    assert margin_of(problem, estimate, drift=0.2).drift == pytest.approx(expected)


def test_pairs_are_resampled_together():
    rng = np.random.default_rng(3)
    inputs = rng.integers(5, 80, 300)
    pairs = np.stack([inputs, np.clip(inputs // 5 + rng.integers(-1, 2, 300), 1, 20)], axis=1)
    problem = replace(toy_problem(latency_s=0.1), lengths=joint_empirical(pairs))
    found = margin_of(problem)
    assert 1 < found.factor < 1.6 and "300 samples" in found.sentence


# --- profiles ---------------------------------------------------------------------------------


def profile_timing(noisy: str = "", scatter: float = 0.0, bend: float = 0.0) -> ProfileTiming:
    """Times that grow with a line's exactness. `noisy`: the table whose samples scatter, or whose
    second point lies off the line by `bend`."""
    rates = {"layer_rest": 1e-6, "embed": 1e-8, "head": 1e-7, "encode_attention": 2e-7,
             "decode_attention": 1e-7}
    tables = {}
    for name, rate in rates.items():
        points = []
        for y in (16.0, 64.0, 256.0) if "attention" in name else (0.0,):
            for place, x in enumerate(SIZES):
                seconds = rate * x * (y / 16 if name == "decode_attention" else 1.0)
                wide = scatter if name == noisy else 0.0
                if name == noisy and place == 2:
                    seconds *= 1 + bend
                points.append(Sample(x=x, y=y, samples_s=tuple(
                    seconds * (1 + wide * k) for k in (-2, -1, 0, 1, 2))))
        tables[TableKey(name)] = tuple(points)
    return ProfileTiming(Profile(tables=tables, metadata=metadata(
        device="toy", dtype="float16", ranks=4, is_padded=False)), roofline_of(toy_problem()))


def profile_margin(timing: ProfileTiming):
    problem = toy_problem(latency_s=1.0)
    estimate = fixed_estimate("rra", problem, timing, FixedSchedule(
        encode_batch=12, decode_iterations=6))
    return doubts_of(problem, timing).margin(estimate)


def test_a_profile_without_noise_on_lines_needs_no_margin():
    found = profile_margin(profile_timing())
    assert found.factor == pytest.approx(1, abs=1e-6)
    assert "not covered" in found.sentence  # the messages are the roofline's


def test_planted_noise_is_found_and_weighed_by_its_share():
    errors = profile_timing("layer_rest", scatter=0.05).table_errors()
    quartiles = 0.1  # of samples at -10, -5, 0, 5, 10 %: 5 % on either side
    assert errors[TableKey("layer_rest")].noise == pytest.approx(
        1.25 * quartiles / 1.35 / math.sqrt(5), rel=1e-6)
    assert errors[TableKey("head")].relative == pytest.approx(0, abs=1e-12)
    rest = profile_margin(profile_timing("layer_rest", scatter=0.05)).factor
    attention = profile_margin(profile_timing("encode_attention", scatter=0.05)).factor
    head = profile_margin(profile_timing("head", scatter=0.05)).factor
    assert 1 <= head < rest and 1 < attention < rest, "the head is not on the slowest stage"
    assert rest < math.exp(1.645 * errors[TableKey("layer_rest")].noise) * 1.001
    assert rest > 1 + 0.15 * 1.645 * errors[TableKey("layer_rest")].noise
    assert profile_margin(profile_timing("layer_rest", scatter=0.1)).factor > rest


def test_a_planted_bend_is_an_error_between_points():
    timing = profile_timing()
    bare = replace(timing.profile, tables={  # too few samples tell no noise
        key: tuple(replace(p, samples_s=p.samples_s[:1]) for p in points)
        for key, points in timing.profile.tables.items()})
    found = ProfileTiming(bare, roofline_of(toy_problem()))
    assert all(error.unknown == 1 and error.noise == 0 for error in found.table_errors().values())
    assert "too few samples" in profile_margin(found).sentence
    straight, bent = (profile_timing("layer_rest", bend=b).table_errors()[TableKey("layer_rest")]
                      for b in (0.0, 0.2))
    assert straight.interpolation == pytest.approx(0, abs=1e-9)
    # the bent point and its two neighbours are missed by other lines
    assert 0.2 / 1.2 / 4 / math.sqrt(3) < bent.interpolation < 0.2


def test_a_profile_that_was_measured_briefly_has_a_least_error_and_says_so():
    whole = profile_timing()
    with_model = ProfileTiming(replace(whole.profile, model=toy_problem().model),
                               roofline_of(toy_problem()))  # whose points its skeleton lacks
    for name, least in (("layer_rest", 0.05), ("decode_attention", 0.06), ("head", 0.04)):
        key = TableKey(name)
        assert whole.table_errors()[key].interpolation == pytest.approx(0, abs=1e-9)
        assert with_model.table_errors()[key] == TableError(least, 0.0, 0.0, is_brief=True)
    found = profile_margin(with_model)
    assert 1.01 < found.factor < 1.1
    assert "(measured briefly, at few sizes)" in found.sentence
    assert "briefly" not in profile_margin(whole).sentence


def test_errors_of_tables_add_as_squares(monkeypatch):
    def factor(rest: float, attention: float) -> float:
        errors = {TableKey("layer_rest"): TableError(rest, 0.0, 0.0),
                  TableKey("decode_attention"): TableError(attention, 0.0, 0.0)}
        monkeypatch.setattr(ProfileTiming, "table_errors", lambda self: errors)
        return math.log(profile_margin(profile_timing()).factor)

    first, second = factor(0.02, 0.0), factor(0.0, 0.1)
    assert min(first, second) > 0.001
    assert factor(0.02, 0.1) == pytest.approx(math.hypot(first, second), rel=0.02)


# --- a job as a sample ------------------------------------------------------------------------


BOUND_S = 0.16


def job_of(count: int | None, *, kind: str = "queries", quantile: float = 0.99,
           latency_s: float = 0.1, **changes: object) -> Problem:
    return replace(toy_problem(), num_queries=count, constraint=latency_constraint(
        latency_s, kind=kind, quantile=quantile), **changes)  # type: ignore[arg-type]


def test_the_slowest_of_few_queries_has_to_keep_the_bound_of_nearly_all():
    """P(all of 32 are below level u) = u^32."""
    levels = quantile_levels(job_of(32))
    for place, level in enumerate(levels):
        assert level == pytest.approx(((place + 0.5) / len(levels)) ** (1 / 32), rel=1e-9)
    near = quantile_levels(job_of(200_000))
    assert near[0] > 0.989 and near[-1] < 0.991


def test_replicas_share_one_limit():
    one, copy = quantile_levels(job_of(64)), quantile_levels(job_of(16, copies=4))
    assert one == pytest.approx(copy)


@pytest.mark.parametrize("problem", [
    job_of(None), job_of(32, kind="sequence"), job_of(32, latency_s=math.inf)])
def test_other_limits_have_no_sampling_error(problem):
    assert not len(quantile_levels(problem))
    assert doubts_of(problem).margin(estimate_of(problem, **CONFIG)).factor == 1


@pytest.mark.parametrize(("lengths", "level"), [
    ([20] * 31 + [60], 60), ([20] * 32, 20), ([1] + [40] * 31, 40)])
def test_known_outputs_have_one_level(lengths, level):
    outputs = truncated_normal(32, 15, 80)
    problem = job_of(32, queries=QueryLengths(
        inputs=np.full(32, 8), most_outputs=np.array(lengths), outputs=np.array(lengths)))
    problem = replace(problem, lengths=replace(problem.lengths, outputs=outputs))
    (found,) = quantile_levels(problem)
    assert outputs.quantile(found) == level


def test_the_sampling_margin_keeps_the_limit_of_the_promised_share_of_jobs():
    """Random jobs of 200 requests, of which 95 % must keep the limit with a confidence of 0.9. More
    than that do; fewer do if the quantile of all requests is planned for."""
    of_all = replace(
        toy_problem(per_node=1, outputs=(60, 30, 200), memory=3e9,
                    fixed=FixedSchedule(policies=("sarathi",))),
        constraint=latency_constraint(BOUND_S, kind="queries", quantile=0.95, confidence=0.9))
    timing = roofline_of(of_all)
    kept = []
    for problem in (replace(of_all, num_queries=200), of_all):
        schedule, is_kept = plan(problem, timing), 0
        for seed in range(40):
            drawn = of_all.lengths.sample(200, np.random.default_rng(seed))
            replayed = replay_job(of_all, timing, schedule.estimate,
                                  planned_queries(of_all, *drawn))
            is_kept += int((replayed.times.latency_s > BOUND_S).sum()) <= 10
        kept.append(is_kept)
    assert kept[0] >= 36 and kept[1] < kept[0]


def test_the_rest_of_a_job_has_no_sampling_error():
    problem = job_of(32)
    estimate = estimate_of(problem, **CONFIG)
    whole = doubts_of(problem)
    left = Margins(problem, whole.evaluator, is_of_job=False)
    assert left.margin(estimate).factor == 1 < whole.margin(estimate).factor
    assert "sample" in whole.margin(estimate).sentence


@pytest.mark.parametrize(("limit_s", "by_margin"), [(0.001, False), (None, True)])
def test_a_refusal_blames_the_margin_only_where_nothing_else_exceeds_the_limit(limit_s, by_margin):
    problem = toy_problem(latency_s=1e-3)
    timing = Roofline(problem.model, problem.cluster.device, problem.dtype)
    with pytest.raises(InfeasibleError) as caught:
        plan(problem, roofline_of(problem))
    limit_s = limit_s or 1.01 * caught.value.tightest_s
    with pytest.raises(InfeasibleError) as caught:
        plan(toy_problem(latency_s=limit_s), timing)
    assert ("Only the margin exceeds the limit" in str(caught.value)) == by_margin
