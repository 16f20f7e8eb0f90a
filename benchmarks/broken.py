"""Does each promise have a test that fails where the code breaks it? `python benchmarks/broken.py
[--only WORD] [--slow] [--rows FILE] [--out DIR]` breaks a copy of the tree in one place, the way it
was broken once or would be, runs the test that is to see it, and takes the place back. A test that
passes on broken code, or that fails on sound code, is a failure of this script.

Recorded: benchmarks/results/. The table itself is benchmarks/broken_places.py; a test holds that
every place and every test in it is there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from broken_places import PLACES, Place
from runner import options, today, write

ROOT = Path(__file__).resolve().parent.parent
_COPIED = ("xgpt", "xprofiler", "xrunner", "xscheduler", "xsimulator", "tests", "benchmarks",
           "csrc", "docs", "jobs", "pyproject.toml", "setup.cfg", "README.md", "LICENSE")
_LIMIT_S = 400


_PASSED, _FAILED = 0, 1  # of pytest's exit codes


def run(tree: Path, test: str) -> tuple[int, str]:
    """(pytest's exit code for the test in the tree, the last line that it printed.)"""
    # what is slow is chosen by its name, not by its mark
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-x", "-p", "no:cacheprovider",
               "-m", "", test]
    try:
        done = subprocess.run(command, cwd=tree, text=True, capture_output=True, timeout=_LIMIT_S,
                              env={**os.environ, "PYTHONPATH": str(tree)})
    except subprocess.TimeoutExpired:
        return _FAILED, f"no end within {_LIMIT_S} s"
    said = [line for line in done.stdout.splitlines() if line.strip()]
    return done.returncode, said[-1] if said else done.stderr[-200:]


def copied(folder: Path) -> Path:
    tree = folder / "tree"
    tree.mkdir()
    for name in _COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.is_file():
            shutil.copy(source, tree / name)
    return tree


def tried(tree: Path, place: Place) -> dict[str, str]:
    """What came of one place; `trouble` empty where its test sees it."""
    path = tree / place.file
    sound = path.read_text(encoding="utf-8")
    code, last = run(tree, place.test)
    if code != _PASSED:
        return {"trouble": f"fails on sound code: {last}"}
    try:
        path.write_text(sound.replace(place.sound, place.broken), encoding="utf-8")
        code, last = run(tree, place.test)
    finally:
        path.write_text(sound, encoding="utf-8")
    if code != _FAILED:
        return {"trouble": f"on broken code: {last}"}
    return {"trouble": ""}


def page(rows: Mapping[str, Mapping[str, str]]) -> str:
    """The table of all places, those that were not tried said so."""
    seen = [place for place in PLACES if rows.get(place.name, {}).get("trouble") == ""]
    lines = [
        "# What each promise's test sees", "", f"{today()}.", "",
        f"`python benchmarks/broken.py --slow`: of {len(PLACES)} places that were broken on "
        f"purpose, one by one, {len(seen)} were seen by the test named; each test passed on the "
        f"sound code before. {sum(place.name not in rows for place in PLACES)} were not tried.",
        "",
        "| promise | what was broken | test | seen |", "|---|---|---|---|"]
    for place in PLACES:
        row = rows.get(place.name)
        found = "not tried" if row is None else row["trouble"] or "yes"
        test = place.test.replace("tests/", "", 1)
        lines.append(f"| {place.item} | {place.name} | `{test}` | {found} |")
    return "\n".join(lines) + "\n"


def read_rows(path: Path | None) -> dict[str, dict[str, str]]:
    lines = () if path is None or not path.is_file() else path.read_text().splitlines()
    return {row.pop("name"): row for row in map(json.loads, lines)}


def main(arguments: Sequence[str]) -> int:
    parser = options(__doc__)
    parser.add_argument("--only", default="", help="part of an item or name")
    parser.add_argument("--slow", action="store_true", help="those, too, whose tests start ranks")
    parser.add_argument("--rows", type=Path, help="outcomes, a line each; those seen stay")
    asked = parser.parse_args(arguments)
    rows = read_rows(asked.rows)
    due = [place for place in PLACES if asked.only in f"{place.item} {place.name}" and (
        asked.slow or not place.is_slow) and rows.get(place.name, {}).get("trouble") != ""]
    with tempfile.TemporaryDirectory(prefix="xgpt-broken-") as folder:
        tree = copied(Path(folder)) if due else Path(folder)
        for place in due:
            rows[place.name] = tried(tree, place)
            said = rows[place.name]["trouble"] or "seen"
            print(f"{place.item}: {place.name}: {said}", flush=True)
            if asked.rows is not None:
                with asked.rows.open("a") as file:
                    file.write(json.dumps({"name": place.name, **rows[place.name]}) + "\n")
    write("broken", page(rows), asked.out)
    return int(any(row["trouble"] for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
