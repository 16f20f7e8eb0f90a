"""Tables of a Profile: every figure beside its floor, what is doubtful marked."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from screens import check_screen

from xgpt.core import catalog
from xgpt.report.profile_table import profile_tables
from xgpt.report.table import WIDTH
from xprofiler.profile import Peaks, Profile, ProfileMetadata, Sample, TableKey
from xprofiler.roofline import floor_s, work
from xprofiler.timing import Operator

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
    """A model of two degrees on a small CPU: floors, an efficiency, and a launch each."""
    rng = random.Random(3)
    tables: dict[TableKey, tuple[Sample, ...]] = {}

    def add(operator: Operator, degree: int, places: list[tuple[int, int]],
            share: Callable[[float], float], noisy: tuple[int, int] | None = None) -> None:
        points = []
        for x, y in places:
            needed = work(MODEL, operator, x, y, tp_degree=degree, item_bytes=4)
            seconds = float(floor_s(needed, PEAKS)) / share(x) + 12e-6
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
    ("profile of int8", {"metadata": replace(METADATA, dtype="int8")})])
def test_a_profile_is_shown_as_its_screen(name, change):
    """Noisy points are marked; of a long table the first, middle and last y are shown; without a
    floor there are no shares, and a line says why."""
    text = profile_tables(replace(PROFILE, **change))
    if change:
        head, *tables = text.split("\n\n")
        text = "\n\n".join([head, *tables[:1]])
    check_screen(Path(__file__).with_name("screens.txt"), name, text)


def test_no_line_is_wider_than_the_terminal_and_foreign_texts_are_harmless():
    hostile = replace(METADATA, device="x" * 200 + "\x1b[31m\N{SNOWMAN}", libraries="a\nb " * 40)
    tables = {TableKey("transfer", 1, "link\x1b" * 30): PROFILE.table("transfer", 1, LINK)}
    text = profile_tables(replace(PROFILE, metadata=hostile, tables={**PROFILE.tables, **tables}))
    assert max(len(line) for line in text.splitlines()) <= WIDTH
    assert text.isascii() and "\x1b" not in text
