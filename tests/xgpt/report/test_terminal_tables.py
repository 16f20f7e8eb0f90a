"""The terminal's tables as committed screens (screens.txt): 80 columns, ASCII, whole words."""

import json
import math
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from fake_run import fake_schedule
from screens import check_screen

from xgpt.core import catalog, policies
from xgpt.core.constraint import Prospect
from xgpt.core.controls import ContinuousControls, StaticControls, WaaControls
from xgpt.core.deployment import StageAssignment
from xgpt.core.errors import InputError
from xgpt.core.schedule import Margin, Rejected, Status
from xgpt.report.profile_table import profile_tables
from xgpt.report.sweep_rows import COLUMNS, read_sweep, sweep_text
from xgpt.report.sweep_served import served_text
from xgpt.report.table import WIDTH, choice_table, schedule_table, stage_table, summary_table
from xgpt.report.words import (
    controls_cell,
    controls_line,
    margin_words,
    policy_sentence,
    pruned_words,
)
from xprofiler.profile import (
    STREAMED,
    STREAMED_PARTS,
    Peaks,
    Profile,
    ProfileMetadata,
    Sample,
    TableKey,
)
from xprofiler.timing import Operator

SCREENS = Path(__file__).with_name("screens.txt")
METRICS = {"queries": 72, "errors": 1, "status": "done",
           "throughput_qps": {"measured": 1.8, "predicted": 2.0},
           "latency_p99_s": {"measured": 28.0, "predicted": 20.0},
           "load_s": {"measured": 1.5, "predicted": None}}
LOADED = {"loaded_bytes": 2.7e8}
ALTERNATIVES = (
    ("tp_degree", "2", "encode_batch 4, tp_degree 2, tp_gpus 4", 1.155),
    ("policy", "rra", "encode_batch 4, tp_degree 1, tp_gpus 0", 2.31),
    ("without a latency bound", "", "rra, encode_batch 9", 4.62),
    ("without a margin", "", "waa-m", 3.0))
WIDE = {"status": "within gap", "gap": 1.2, "bound_qps": 33.0, "bare_qps": 30.0}
REASON = ("no schedule satisfies the bound of 10 ms for a query of 63 output tokens (quantile "
          "0.99); latency binds. The tightest that can be met is 1.226 s, by policy rra")


def schedule(**changes):
    return schedule_table(fake_schedule().changed(**changes))


def huge():
    stages = tuple(StageAssignment(
        index=i, ranks=tuple(range(8 * i, 8 * i + 8, 2)), first_layer=6 * i, num_layers=6,
        first_encoder_layer=100 * i, num_encoder_layers=100) for i in range(16))
    return fake_schedule().changed(
        policy="waa-m", stages=stages, tp_degree=8, tp_gpus=128, encode_batch=10**6,
        memory_bytes=tuple(10**10 + i for i in range(128)), throughput_qps=123456.7)


def choice(*rows, **changes):
    rejected = tuple(Rejected(kind=kind, subject=subject, words=words, throughput_qps=qps,
                              latency_s=3.0, reason="the reason",
                              is_unsure=kind == "policy" and (qps or 0) > 2.9)
                     for kind, subject, words, qps in rows)
    return choice_table(fake_schedule(rejected=rejected, explanation=(), **changes))


def point(policy, bound, qps, **more):
    known = {"scenario": "opt-13b, a40-4, S", "policy": policy, "bound": bound, "bound_s": 5.0,
             "status": "ok", "chosen": policy, "throughput_qps": qps, "latency_s": 4.5,
             "controls": "RRA: encode 4 together, then 12 decode iterations", "tp_degree": 2,
             "tp_gpus": 4, "margin": 1.0}
    if qps is None:
        known |= {"status": "infeasible", "reason": REASON, "chosen": None, "latency_s": None}
    return {column.name: None for column in COLUMNS} | known | more


def service(scenario, deployment, qps, worth, **more):
    return point("sarathi", "inf", qps, **{
        "status": "ok", "reason": None, "scenario": scenario, "deployment": deployment,
        "capacity_qps": qps, "capacity_per_price": worth, "ttft_p90_s": 1.4, "tpot_p99_s": 0.12}
        | more)


def many_points():
    rates = {"rra": 12.0, "ft": 9.0, "waa-c": 13.0, "orca": None}
    return [point(policy, f"{bound} s", rate, scenario=scenario, bound_s=float(bound))
            for scenario in ("small, S", "large, S") for policy, rate in rates.items()
            for bound in range(5, 10)]


def otherwise_bounded():
    free = fake_schedule(latency_bound_s=math.inf)
    return replace(free, margin=replace(free.margin, note="there is no bound"), prospects=(
        Prospect(metric="tpot", limit_s=0.02, expected_s=0.003, with_margin_s=0.005),))


TABLES = {
    "schedule": lambda: schedule_table(fake_schedule()),
    "schedule, huge": lambda: schedule_table(huge()),
    "schedule, over its bound": lambda: schedule(limit_s=20.0),
    "schedule, over its memory": lambda: schedule(fits=False),
    "schedule, no bound": lambda: schedule_table(fake_schedule(latency_bound_s=math.inf)),
    "schedule, other bounds": lambda: schedule_table(otherwise_bounded()),
    "schedule, no gap": lambda: schedule_table(fake_schedule(gap=math.inf, bound_qps=math.inf)),
    "schedule, stopped": lambda: schedule_table(
        fake_schedule(status="stopped at the limit of nodes " * 6)),
    "schedule, within a gap": lambda: schedule(status="within gap", margin=Margin(factor=1.065)),
    "schedule, gap to no margin": lambda: schedule(status="within gap"),
    "schedule, wide gap": lambda: schedule(**WIDE),
    "schedule, one query's times": lambda: schedule(ttft_s=1.5, tpot_s=0.02),
    "schedule, one query's first token": lambda: schedule(ttft_s=1.5, tpot_s=0.0),
    "schedule, nothing to explain": lambda: schedule_table(fake_schedule(
        margin_note="", pruned=(), rejected=(), explanation=())),
    "stages": lambda: stage_table(fake_schedule()), "stages, huge": lambda: stage_table(huge()),
    "choice": lambda: choice_table(fake_schedule(explanation=("word " * 60, "second", "third"))),
    "choice, what each would lose": lambda: choice(*ALTERNATIVES),
    "choice, why it is none": lambda: choice(("highest in steady state", "", "encode 64", None)),
    "choice, seen": lambda: choice(("policy", "rra", "encode_batch 4", 2.0),
                                   policy_bounds=(("rra", 2.3),)),
    "choice, quicker": lambda: choice(("policy", "rra", "encode_batch 4", 3.0)),
    "summary": lambda: summary_table(METRICS),
    "summary, loaded": lambda: summary_table(METRICS | LOADED),
    "summary, made": lambda: summary_table(
        METRICS | LOADED | {"weights": "random"}),
    "summary, torch's operators": lambda: summary_table(METRICS | {
        "operators": "native operators: none, torch's serve: no C++ compiler (g++) is there"}),
    "summary, no step captured": lambda: summary_table(METRICS | {
        "operators": "CUDA operators: ours; no CUDA graphs: experts are told by the host"}),
    "sweep": lambda: sweep_text([
        point("rra", "5 s", None, bound_s=0.01), point("rra", "50%", 12.345),
        point("ft", "inf", 9.0, bound_s="inf"),
        point("vllm", "5 s", None, status="refused", reason="an encoder-decoder")]),
    "sweep, measured": lambda: sweep_text([
        point("rra", "5 s", 12.0, margin=1.05, measured_status="done", measured_qps=11.0),
        point("ft", "5 s", 9.0, measured_status="failed")]),
    "sweep, of jobs": lambda: sweep_text([
        point("rra", "5 s", 12.0, job_throughput_qps=8.0),
        point("ft", "5 s", 9.0, job_throughput_qps=8.5)]),
    "sweep of services": lambda: served_text([
        service("papers", "tp 2, slots 64", 4.3, 0.063),
        service("papers", "tp 4, slots 32", 3.9, 0.057),
        service("books", "tp 2, slots 64", 1.2, 0.018),
        service("books", "tp 4, slots 32", 2.0, 0.029),
        service("books", "tp 1", None, None, status="given up", reason="its bound is too low")]),
    "sweep, many points": lambda: sweep_text(many_points())}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_as_its_screen_ascii_and_fits_eighty_columns(name):
    text, (first, _, variant) = TABLES[name](), name.partition(", ")
    lines = text.splitlines()
    assert text.isascii() and max(map(len, lines), default=0) <= WIDTH and "..." not in text
    assert not any(line != line.rstrip() for line in lines)
    usual = TABLES[first]().splitlines() if variant else []
    shown = ["(as the first, but:)"] * bool(usual) + [own for own in lines if own not in usual]
    check_screen(SCREENS, name, "\n".join(shown))


def test_what_is_proved_ruled_out_and_kept_back_is_as_its_screen():
    plain, free = fake_schedule(), fake_schedule(margin_cost=0.0)
    of_job = fake_schedule(margin_cost=0.0, status=Status.JOB)  # its time is not compared
    sure = fake_schedule(margin=1.0, margin_note="no margin: lengths are given and taken as true")
    check_screen(SCREENS, "sentences", "\n".join([
        *map(margin_words, (plain, free, of_job, sure)), pruned_words(plain),
        pruned_words(fake_schedule(pruned=(("so it is", 1),)))]))


def test_no_share_of_the_hardware_is_above_one():
    qps = fake_schedule().figures.throughput_qps
    assert "roofline limit" in schedule(hardware_qps=4.0 * qps)
    assert "roofline limit" not in schedule(hardware_qps=0.5 * qps)


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnControls:
    """Those of a policy that is not ours."""

    policy: str = "turns"
    encode_batch: int = 3
    turns: int = 5


def test_every_policy_is_shown_by_what_its_row_has_a_strange_one_too(monkeypatch):
    ft = policies.policy("ft")
    monkeypatch.setattr(policies, "_OWN", {**policies._OWN, "turns": replace(
        ft, name="turns", title="Turns", words="each in its turn", variables=(
            ft.variables[0], policies.Variable(name="turns", words="turns")))})
    shown = []
    for controls in (
            fake_schedule().estimate.controls,
            WaaControls(policy="waa-m", encode_batch=16, decode_micro_batches=2, max_in_system=90),
            StaticControls(policy="dsi", encode_batch=16, decode_micro_batches=2,
                           encode_micro_batches=4), ContinuousControls(policy="orca", max_active=1),
            ContinuousControls(policy="vllm", max_active=30, token_budget=512), TurnControls()):
        estimate = replace(fake_schedule().estimate, controls=controls)
        shown += [controls_line(estimate), controls_cell(estimate), policy_sentence(estimate)]
    check_screen(SCREENS, "policies", "\n".join(shown))


def test_tables_and_page_load_without_the_extras():
    code = ("import sys, xgpt.report.table, xgpt.report.page; "
            "print({'matplotlib', 'jinja2', 'torch', 'mpi4py'} & set(sys.modules))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_a_folder_that_is_no_sweep_is_refused(tmp_path):
    with pytest.raises(InputError, match="xgpt sweep"):
        read_sweep(tmp_path)
    (tmp_path / "sweep.json").write_text(json.dumps({"version": 9}))
    with pytest.raises(InputError, match="version"):
        read_sweep(tmp_path)


# Tables of a Profile: what is doubtful is marked.


MODEL = catalog.model("opt-125m")
PEAKS = Peaks(flops_per_s=9e10, bandwidth_bytes_per_s=1.1e10, source="measured: product, read")
METADATA = ProfileMetadata(
    model="opt-125m", model_shape="4f1d", device="Xeon, 2 cores", dtype="float32", ranks=2,
    threads_per_rank=1, kernels="77aa", libraries="torch 2.13.0+cpu, mpich 4.2",
    date="2026-03-14T09:20:11+00:00", commit="1a2b3c")
QUERIES, CONTEXTS = (1, 3, 9, 33, 130), (17, 130, 520, 900, 1500)
LINK = "shared-memory"


def samples(x: float, y: float, seconds: float, rng: random.Random,
            scatter: float = 0.01) -> Sample:
    return Sample(x=x, y=y, samples_s=tuple(
        seconds * (1 + rng.uniform(-scatter, scatter)) for _ in range(9)))


def fake_profile() -> Profile:
    """A model of two degrees on a small CPU: an efficiency, and a launch each."""
    rng = random.Random(3)
    tables: dict[TableKey, tuple[Sample, ...]] = {}

    def add(operator: Operator, degree: int, places: list[tuple[int, int]],
            share: Callable[[float], float], noisy: tuple[int, int] | None = None) -> None:
        points = []
        for x, y in places:
            seconds = 1e-6 * x * (1 + y / 100) / share(x) / degree + 12e-6
            points.append(samples(x, y, seconds, rng, 0.4 if (x, y) == noisy else 0.01))
        tables[TableKey(operator.value, degree)] = tuple(points)

    for degree in (1, 2):
        add(Operator.ENCODE_ATTENTION, degree,
            [(x, y) for y in (1, 4) for x in (5, 35, 135, 520)], lambda x: 0.2 + 0.3 * x / 600)
        add(Operator.DECODE_ATTENTION, degree,
            [(x, y) for y in CONTEXTS for x in QUERIES] + [(17, 281)], lambda x: 0.55,
            noisy=(9, 900))
        add(Operator.LAYER_REST, degree, [(x, 0) for x in (1, 3, 9, 18, 33, 66, 130, 300, 900,
                                                           1370, 2080)],
            lambda x: 0.8 if x < 40 else 0.7, noisy=(18, 0))
        add(Operator.HEAD, degree, [(x, 0) for x in QUERIES], lambda x: 0.85)
    add(Operator.EMBED, 1, [(x, 0) for x in (1, 33, 300, 2080)], lambda x: 1.6)
    add(Operator.KV_COMPACTION, 1, [(x, y) for x in (1, 5) for y in (17, 520)], lambda x: 0.4)
    sizes = [2**k for k in range(8, 25, 2)]
    for name, degree, rate in (("all_reduce", 2, 2e9), ("transfer", 1, 5e9)):
        tables[TableKey(name, degree, LINK)] = tuple(
            samples(size, 0, 25e-6 + size / rate, rng, 0.25 if size == 2**10 else 0.03)
            for size in sizes)
    tables[TableKey("step_overhead")] = (samples(0, 0, 180e-6, rng),)
    return Profile(metadata=METADATA, tables=tables, spent_s=34.2, model=MODEL, peaks=PEAKS,
                   refused={8: "tp_degree 8 does not divide the model's 12 attention heads"})


PROFILE = fake_profile()


@pytest.mark.parametrize(("name", "change"), [
    ("profile", {}), ("profile without its model", {"model": None}),
    ("profile without peaks", {"peaks": None}), ("profile without tables", {"tables": {}}),
    ("profile with copies", {"tables": {TableKey(STREAMED, link=part): (
        Sample(x=64, samples_s=(seconds,)),) for part, seconds in zip(
            STREAMED_PARTS, (0.106, 0.059, 0.114), strict=True)}})])
def test_a_profile_is_shown_as_its_screen(name, change):
    """Noisy points are marked; of a long table the first, middle and last y are shown."""
    text = profile_tables(replace(PROFILE, **change))
    if change:
        head, *tables = text.split("\n\n")
        text = "\n\n".join([head, *tables[:1]])
    check_screen(SCREENS, name, text)


def test_no_line_is_wider_than_the_terminal_and_foreign_texts_are_harmless():
    hostile = replace(METADATA, device="x" * 200 + "\x1b[31m\N{SNOWMAN}", libraries="a\nb " * 40)
    tables = {TableKey("transfer", 1, "link\x1b" * 30): PROFILE.table("transfer", 1, LINK)}
    text = profile_tables(replace(PROFILE, metadata=hostile, tables={**PROFILE.tables, **tables}))
    assert max(len(line) for line in text.splitlines()) <= WIDTH
    assert text.isascii() and "\x1b" not in text
