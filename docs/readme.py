"""Rewrites README.md's commands, screen and results, and the picture of docs/accuracy.md.

    python docs/readme.py [--screen]

The text between `<!-- NAME -->` and `<!-- /NAME -->` comes from docs/readme.json and
docs/pictures/accuracy.json; benchmarks/validated.py writes the latter. `proof` of a result: texts
of its page, which a test looks for. `--screen` first runs the quickstart for the screen in
readme.json: on a quiet machine."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "pictures"))

import accuracy  # noqa: E402

README, GIVEN = HERE.parent / "README.md", HERE / "readme.json"
TITLES = ("", "xgpt", "compared with", "", "machine", "date")


def blocks() -> dict[str, str]:
    """Markdown of each generated part of the README, by the name of its markers."""
    given = json.loads(GIVEN.read_text(encoding="utf-8"))
    return {"readers": "\n".join(map(reader, given["readers"])),
            "install": f"    {given['install']}", "tests": f"    {given['tests']}",
            "screen": "\n".join(f"    {line}".rstrip() for line in given["screen"]),
            "results": results([*given["results"], *published(given["published"])])}


def reader(row: dict[str, str]) -> str:
    """A bullet: who reads this, what the command gives, and the command."""
    return f"- **{row['who']}** {row['words']}\n\n      {row['command']}\n"


def published(common: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows on runs of other engines that others published, each predicted by constants fitted
    without runs of its shape."""
    points = json.loads(accuracy.POINTS.read_text(encoding="utf-8"))
    errors = accuracy.errors(points["requests"])
    (chosen,) = (row for row in points["choosers"] if (row["left_out"], row["margin"]) == (
        "shape", "none"))
    kept = dict(points["kept"]["shape"])[0.95]
    return [
        {"what": "request time, published runs", "xgpt": f"{percent(errors.mean())} off (mean)",
         "against": f"{len(errors)} runs, shape left out",
         "factor": f"worst {percent(errors.max())}", **common},
        {"what": "best configuration within a limit, published runs",
         "xgpt": f"chosen in {percent(chosen['exact'])}",
         "against": f"{chosen['cases']} choices, shape left out",
         "factor": f"{percent(chosen['regret'])} throughput lost", **common},
        {"what": "a limit promised with 95 %, published runs", "xgpt": f"kept in {percent(kept)}",
         "against": f"{len(errors)} runs, shape left out", "factor": "", **common}]


def percent(share: float) -> str:
    """`share` in per cent, with a decimal below 10."""
    return f"{100 * share:.1f} %" if share < 0.1 else f"{100 * share:.0f} %"


def results(rows: list[dict[str, Any]]) -> str:
    """A Markdown table, a row for each result; its first cell links the page of the result."""
    lines = [TITLES, ("---",) * len(TITLES), *(
        (f"[{row['what']}](benchmarks/results/{row['page']}.md)", f"**{row['xgpt']}**",
         row["against"], row["factor"], row["machine"], row["date"]) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |".replace("|  |", "| |") for line in lines)


def rewritten(text: str) -> str:
    """`text` of the README with its generated parts as they should be."""
    for name, block in blocks().items():
        text, count = re.subn(rf"(<!-- {name} -->\n)(?:.*?\n)??(<!-- /{name} -->)",
                              lambda found, block=block: f"{found[1]}{block}\n{found[2]}", text,
                              flags=re.S)
        if count != 1:
            raise SystemExit(f"README.md has {count} parts between <!-- {name} --> markers")
    return text


def screen() -> list[str]:
    """Lines that the quickstart leaves on a terminal of 80 columns, run from its beginning."""
    done = subprocess.run(
        [sys.executable, "-m", "xgpt", "submit", "jobs/quickstart.yaml", "--again"], check=True,
        cwd=HERE.parent, env={**os.environ, "COLUMNS": "80"}, capture_output=True, text=True)
    lines = (done.stdout + done.stderr).splitlines()
    first = next(place for place, line in enumerate(lines) if line.startswith("time  "))
    return [line for line in lines[first:] if not line.startswith("running")]


def as_text(given: dict[str, Any]) -> str:
    """readme.json's text: a line for each entry of a list."""
    parts = [json.dumps(key) + ": " + (json.dumps(value) if not isinstance(value, list) else
             "[\n    " + ",\n    ".join(map(json.dumps, value)) + "\n  ]")
             for key, value in given.items()]
    return "{\n  " + ",\n  ".join(parts) + "\n}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--screen", action="store_true", help="run the quickstart for its screen")
    if parser.parse_args().screen:
        given = json.loads(GIVEN.read_text(encoding="utf-8"))
        GIVEN.write_text(as_text({**given, "screen": screen()}), encoding="utf-8")
    README.write_text(rewritten(README.read_text(encoding="utf-8")), encoding="utf-8")
    accuracy.main()
    print("README.md")


if __name__ == "__main__":
    main()
