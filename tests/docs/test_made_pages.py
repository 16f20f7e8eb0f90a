"""The README's generated parts and the page of commands are as their scripts make them; cells of
the job file's tables are short; the package carries its documents."""

import json
import re
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs"))

import cli as cli_page  # noqa: E402
import readme  # noqa: E402

README = readme.README.read_text(encoding="utf-8")
MOST_CELL = 160  # chosen: a line of a table that a screen shows


@pytest.mark.parametrize("page", readme.PAGES, ids=lambda page: page.name)
def test_a_page_is_as_its_command_makes_it(page):
    text = page.read_text(encoding="utf-8")
    assert readme.rewritten(text, readme.PAGES[page]()) == text, "python docs/readme.py"


def test_a_row_of_the_results_has_a_date_a_machine_and_a_page():
    table = readme.blocks()["results"].splitlines()[2:]
    assert len(table) == 8
    for row in table:
        first, xgpt, _, _, machine, date = (cell.strip() for cell in row.strip("|").split("|"))
        (page,) = re.findall(r"\]\((.+)\)", first)
        assert (ROOT / page).is_file() and xgpt and machine
        assert re.fullmatch(r"2026-\d\d-\d\d", date), row


def test_the_page_of_a_result_has_its_figures():
    rows = json.loads((ROOT / "docs" / "readme.json").read_text("utf-8"))["results"]
    for row in rows:
        page = (ROOT / "benchmarks" / "results" / f"{row['page']}.md").read_text("utf-8")
        assert row["proof"] and not [part for part in row["proof"] if part not in page], row


def test_a_part_of_the_readme_without_its_markers_is_found():
    with pytest.raises(SystemExit, match="results"):
        readme.rewritten(README.replace("<!-- results -->", ""), readme.blocks())


def test_the_readme_s_python_is_an_example_that_is_run():
    (code,) = re.findall(r"```python\nimport xgpt\n\n(.*?)```", README, re.S)
    assert code in (ROOT / "docs" / "python.md").read_text("utf-8")  # test_library.py runs these


def test_the_page_of_commands_is_as_its_command_makes_it():
    assert cli_page.page() == cli_page.PAGE.read_text("utf-8"), "python docs/cli.py"


def test_cells_of_the_job_file_s_tables_are_short():
    page = (ROOT / "docs" / "job-file.md").read_text(encoding="utf-8")
    cells = [cell.strip() for line in page.splitlines() if line.startswith("|")
             for cell in re.split(r"(?<!\\)\|", line)]
    shown = [re.sub(r"\]\([^)]*\)", "]", cell) for cell in cells]
    assert len(shown) > 200 and not [cell for cell in shown if len(cell) > MOST_CELL]


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_a_how_to_is_short(page):
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    how_to = index.partition(":caption: How-to")[2].partition("```")[0].split()
    if page.stem in how_to:
        assert len(page.read_text("utf-8").splitlines()) <= 60


def test_the_citation_names_the_paper_and_the_version_has_its_licence():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cited["preferred-citation"]["doi"] == "10.1145/3620665.3640383"
    assert cited["license"] == "Apache-2.0"
