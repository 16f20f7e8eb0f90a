"""`xgpt validate` as its user runs it, on a small folder of measurements."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from xgpt.cli.main import cli
from xgpt.core.errors import InputError
from xsimulator.compared_runs import own_points, predicted

HEADER = ("model,device,engine,weight_dtype,tp_degree,concurrency,input_tokens,output_tokens,"
          "ttft_ms,tpot_ms\n")
ROW = "llama-3.1-8b,H100,vllm,{weights},{degree},{batch},512,64,{ttft},{tpot}\n"


def validated(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["validate", *map(str, arguments)])


def exact(folder: Path) -> Path:
    """A file of eight loops that took just as long as they are predicted to."""
    rows = [{"weights": weights, "degree": degree, "batch": batch, "ttft": 100, "tpot": 10}
            for weights in ("", "fp8") for degree in (1, 2) for batch in (4, 16)]
    path = folder / "measurements-mine.csv"
    path.write_text(HEADER + "".join(ROW.format(**row) for row in rows), encoding="utf-8")
    for row, point in zip(rows, own_points(path), strict=True):
        found = predicted(point)
        row |= {"ttft": found.ttft_s * 1e3, "tpot": found.tpot_s * 1e3}
    path.write_text(HEADER + "".join(ROW.format(**row) for row in rows), encoding="utf-8")
    return path


def test_loops_that_took_as_long_as_predicted_are_no_error_and_chosen_without_regret(
        tmp_path: Path) -> None:
    exact(tmp_path)
    told = json.loads(validated(tmp_path, "--json").stdout)
    assert sum(group["cases"] for group in told["groups"]) == 3 * 8
    assert all(group["worst"] < 1e-6 for group in told["groups"])
    assert {group["half"] for group in told["groups"]} <= {"fit", "test"}
    everything = next(c for c in told["choosers"] if c["half"] == "all")
    assert everything["cases"] == 10 and everything["exact"] == 1
    assert everything["none"] == everything["broken"] == everything["regret"] == 0


def test_the_table_fits_a_terminal_and_says_what_a_row_is_of(tmp_path: Path) -> None:
    shown = validated("--measured", exact(tmp_path), "--source", "serving", tmp_path)
    assert shown.exit_code == 0
    lines = shown.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert any("TPOT" in line and "H100, vllm" in line for line in lines)
    assert any(line.startswith("as a chooser") for line in lines)


def test_the_page_draws_every_point_beside_the_diagonal(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    shown = validated("--measured", exact(tmp_path), tmp_path, "--html", page)
    assert shown.exit_code == 0 and "as a chooser" in shown.stdout
    text = page.read_text(encoding="utf-8")
    found = re.search(r'<script[^>]*application/json[^>]*>(.*?)</script>', text, re.DOTALL)
    assert found is not None
    figures = json.loads(found.group(1))
    plots = [figure for name, figure in figures.items() if name.startswith("compared")]
    dots = [trace for plot in plots for trace in plot["data"] if trace.get("mode") == "markers"]
    assert sum(len(trace["x"]) for trace in dots) == 2 * 3 * 8  # the file is read twice
    assert all(trace["x"] == pytest.approx(trace["y"], rel=1e-4) for trace in dots)
    assert "H100, vllm" in text and "calibration" in figures and "choosers" in figures


def test_a_narrow_terminal_has_fewer_columns_and_whole_words(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    shown = validated("--measured", exact(tmp_path), "--source", "serving", tmp_path).stdout
    table = shown.split("as a chooser")[0]
    assert max(map(len, table.splitlines())) <= 50 and "..." not in table
    assert "request, test" in table and "median" not in table


def test_every_mistake_of_a_users_file_is_told_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(HEADER + ROW.format(weights="", degree="two", batch=1, ttft=1, tpot=1)
                    + "gpt-9,H100,vlm,,1,1,1,1,1,1\nllama-3.1-8b,H100,vllm,int3,1,0,512,64,nan\n",
                    encoding="utf-8")
    with pytest.raises(InputError) as caught:
        own_points(path)
    told = [(m.line, m.key) for m in caught.value.mistakes]
    assert told == [(2, "tp_degree"), (3, "model"), (3, "engine"), (4, "weight_dtype"),
                    (4, "concurrency"), (4, "ttft_ms"), (4, "tpot_ms")]


def test_too_few_loops_to_choose_among_are_no_chooser(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(HEADER + ROW.format(weights="", degree=1, batch=1, ttft=30, tpot=8),
                    encoding="utf-8")
    shown = validated("--measured", path, "--source", "serving", tmp_path, "--html",
                      tmp_path / "page.html")
    assert shown.exit_code == 0 and "request" in shown.stdout
    assert "as a chooser" not in shown.stdout


def test_a_folder_without_measurements_says_what_is_looked_for(tmp_path: Path) -> None:
    done = validated(tmp_path)
    assert isinstance(done.exception, InputError) and "serving_points.csv" in str(done.exception)
    done = validated(tmp_path / "nowhere")
    assert isinstance(done.exception, InputError) and "--measured" in str(done.exception)
