"""Tables and plots of a Profile: every figure beside its floor, what is doubtful marked."""

from __future__ import annotations

import random
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from fake_run import write_fake_run

from xgpt.core import catalog
from xgpt.core.errors import MissingExtraError
from xgpt.report import profile_table
from xgpt.report.chart import can_draw
from xgpt.report.page import write_report
from xgpt.report.profile_table import points_of, profile_tables, write_profile_plots
from xgpt.report.table import WIDTH
from xprofiler.profile import Peaks, Profile, ProfileMetadata, Sample, TableKey
from xprofiler.profile_file import load_profile, save_profile
from xprofiler.roofline import floor_s, work
from xprofiler.timing import Operator
from xprofiler.verdict import judge

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
VERDICT = judge(PROFILE).sentence
DRAWN = ["encode_attention", "decode_attention", "layer_rest", "embed", "head", "kv_compaction",
         "all_reduce", "transfer"]
needs_jinja2 = pytest.mark.skipif(find_spec("jinja2") is None, reason="jinja2 is not installed")
needs_both = pytest.mark.skipif(not can_draw() or find_spec("jinja2") is None,
                                reason="matplotlib or jinja2 is not installed")


def table_of(text: str, title: str) -> str:
    return next(part for part in text.split("\n\n") if part.startswith(title))


def rows_of(text: str, title: str) -> list[list[str]]:
    return [line.split() for line in table_of(text, title).split("---\n")[1].splitlines()]


def test_the_head_says_what_was_measured_on_what_and_how_good_it_is() -> None:
    head = " ".join(profile_tables(PROFILE).split("\n\n")[0].split())
    for text in ("opt-125m (opt, 12 layers, hidden size 768", "Xeon, 2 cores, float32",
                 "2 ranks x 1 thread", "torch 2.13.0+cpu, mpich 4.2", "2026-03-14T09:20:11",
                 VERDICT, "degrees 1, 2",
                 "refused 8 tp_degree 8 does not divide the model's 12 attention heads",
                 "measured in 34.2 s", "90 GFLOP/s, 11 GB/s a rank (measured: product, read)"):
        assert text in head


def test_a_row_has_time_spread_floor_share_and_what_bounds_it() -> None:
    rows = rows_of(profile_tables(PROFILE), "head, degree 2")
    point = points_of(PROFILE, TableKey("head", 2))[0]
    assert point.floor_s == pytest.approx(4 * 768 * (50272 / 2 + 1) / PEAKS.bandwidth_bytes_per_s)
    share = point.floor_s / point.sample.median_s
    assert rows[0][0] == "1" and rows[0][-2:] == [f"{share:.0%}", "memory"]
    assert rows[-1][0] == "130" and rows[-1][-1] == "compute"


def test_noisy_points_alone_are_marked() -> None:
    text = profile_tables(PROFILE)
    marked = [row for row in rows_of(text, "layer rest, degree 1") if "*" in " ".join(row)]
    assert [row[0] for row in marked] == ["18"]
    assert [row[0] for row in rows_of(text, "transfer over") if "%*" in " ".join(row)] == ["1"]


def test_a_long_table_shows_first_middle_and_last_y_and_says_what_it_leaves_out() -> None:
    text = table_of(profile_tables(PROFILE), "decode attention, degree 1")
    assert "(15 of 26 points, 1 of the others noisy)" in " ".join(text.split())
    rows = rows_of(text, "decode attention")
    assert [row[0] for row in rows if len(row) == 9] == ["17", "520", "1,500"]
    assert len(rows) == 15 and rows[-1][0] == "130"


def test_messages_have_bytes_and_rates_and_no_floor() -> None:
    text = table_of(profile_tables(PROFILE), f"all reduce over {LINK}, degree 2")
    assert "floor" not in text and "bound by" not in text
    sample = PROFILE.table("all_reduce", 2, LINK)[-1]
    assert rows_of(text, "all reduce")[-1][:2] == ["16", "MiB"]
    assert float(rows_of(text, "all reduce")[-1][-1]) == pytest.approx(
        2**24 / sample.median_s / 1e9, rel=0.01)


def test_no_line_is_wider_than_the_terminal_and_foreign_texts_are_harmless() -> None:
    hostile = replace(METADATA, device="x" * 200 + "\x1b[31m\N{SNOWMAN}", libraries="a\nb " * 40)
    tables = {TableKey("transfer", 1, "link\x1b" * 30): PROFILE.table("transfer", 1, LINK)}
    text = profile_tables(replace(PROFILE, metadata=hostile, tables={**PROFILE.tables, **tables}))
    assert max(len(line) for line in text.splitlines()) <= WIDTH
    assert text.isascii() and "\x1b" not in text


@pytest.mark.parametrize(("change", "reason"), [
    ({"model": None}, "does not carry the model's shape"),
    ({"peaks": None}, "does not carry the device's peaks"),
    ({"metadata": replace(METADATA, dtype="int8")}, "size of an element of int8 is not known")])
def test_without_a_floor_there_are_no_shares_and_a_line_says_why(
        change: dict[str, object], reason: str) -> None:
    text = profile_tables(replace(PROFILE, **change))  # type: ignore[arg-type]
    assert reason in " ".join(text.split())
    assert "bound by" not in text and "time  spread" in text


def test_an_empty_profile_is_a_head_without_tables() -> None:
    text = profile_tables(Profile(metadata=METADATA, tables={}))
    assert "degrees      none" in text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plots") / "new"
    names = [*(f"{name}.svg" for name in DRAWN), "profile.html"]
    assert write_profile_plots(PROFILE, folder) == [folder / name for name in names]
    return folder


@needs_both
def test_each_plot_is_a_file_of_its_own_with_axes_that_name_their_units(folder: Path) -> None:
    assert sorted(p.name for p in folder.iterdir()) == sorted(
        [*(f"{name}.svg" for name in DRAWN), "profile.html"])
    for name in DRAWN:
        root = ElementTree.parse(folder / f"{name}.svg").getroot()
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        texts = {"".join(t.itertext()).strip() for t in root.iter("{http://www.w3.org/2000/svg}text")}
        assert "time (median), seconds" in texts
        is_message = name in ("all_reduce", "transfer")
        assert ("bytes over time, GB/s" if is_message else "share of the roofline") in texts
    texts = (folder / "decode_attention.svg").read_text(encoding="utf-8")
    assert "decode attention, degree 1" in texts and "17 context tokens" in texts


@needs_both
def test_the_page_holds_every_plot_the_verdict_and_the_metadata(folder: Path) -> None:
    page = (folder / "profile.html").read_text(encoding="utf-8")
    named = re.findall(r'data-chart="([^"]+)"', page)
    assert len(named) == len(set(named)) and {n.partition("-")[0] for n in named} == set(DRAWN)
    assert VERDICT[1:] in page and "torch 2.13.0+cpu" in page
    assert "Noisy: 1 point whose quartiles" in page
    assert "Not drawn: 1 more value of context tokens" in page


@needs_both
def test_drawing_twice_gives_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    head = {key: points for key, points in PROFILE.tables.items() if key.name == "head"}
    path = write_profile_plots(replace(PROFILE, tables=head), tmp_path)[0]
    assert path.read_bytes() == (folder / "head.svg").read_bytes()


@needs_both
def test_hostile_metadata_are_no_elements_of_the_page(tmp_path: Path) -> None:
    hostile = replace(METADATA, model="<script>alert(1)</script>", device="<img src=x>")
    tables = {TableKey("transfer", 1, "<b>link"): PROFILE.table("transfer", 1, LINK)}
    svg, page = write_profile_plots(replace(PROFILE, metadata=hostile, tables=tables), tmp_path)
    assert ElementTree.parse(svg) is not None
    text = page.read_text(encoding="utf-8")
    assert "<script>alert" not in text and not re.search(r"<(img|b)\b", text.split("<script")[0])
    assert "&lt;img src=x&gt;" in text


@needs_both
def test_without_peaks_there_is_one_panel(tmp_path: Path) -> None:
    head = {key: points for key, points in PROFILE.tables.items() if key.name == "head"}
    svg, page = write_profile_plots(replace(PROFILE, tables=head, peaks=None), tmp_path)
    assert "share of the roofline" not in svg.read_text(encoding="utf-8")
    assert "does not carry the device&#39;s peaks" in page.read_text(encoding="utf-8")


def test_without_matplotlib_the_extra_is_named(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_table, "can_draw", lambda: False)
    with pytest.raises(MissingExtraError, match=r"matplotlib.*\[report\]"):
        write_profile_plots(PROFILE, tmp_path / "never")
    assert not (tmp_path / "never").exists()


@needs_jinja2
def test_the_report_of_a_run_reads_a_profile_of_this_version(tmp_path: Path) -> None:
    directory = write_fake_run(tmp_path / "out", num_queries=2)
    save_profile(PROFILE, directory / "profile.json")
    assert load_profile(directory / "profile.json").model == MODEL
    text = re.sub(r"<[^>]*>", " ", write_report(directory).read_text(encoding="utf-8"))
    text = " ".join(text.split())
    for fact in ("libraries torch 2.13.0+cpu", f"verdict {VERDICT}",
                 "measured in 34.2 s", "refused: degree 8 tp_degree 8 does not divide",
                 "timed: layer rest 11 points (tp=1), 11 points (tp=2)", "timed: embed 4 points",
                 "timed: step overhead 1 point"):
        assert fact in text
