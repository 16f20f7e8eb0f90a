"""Rewrites README.md's commands, screen and results, the tables of errors in docs/confidence.md and
docs/accuracy.md, and the latter's picture.

    python docs/readme.py [--screen]

The text between `<!-- NAME -->` and `<!-- /NAME -->` comes from docs/readme.json, from
docs/pictures/accuracy.json and the catalog's accuracy.yaml; benchmarks/validated.py writes these
two. `proof` of a result: texts of its page, which a test looks for. `--screen` first runs the
quickstart for the screen in readme.json: on a quiet machine."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "pictures"))

import accuracy  # noqa: E402

from xgpt.core import catalog  # noqa: E402

README, GIVEN = HERE.parent / "README.md", HERE / "readme.json"
TITLES = ("", "xgpt", "compared with", "", "machine", "date")
LEVELS = {"same cell": "runs of this cell",
          "neighbour": "runs of a cell that differs in one thing",
          "far": "neither; or pipelines, expert parallelism, other links, int8 weights, another "
                 "mixture of experts",
          "unknown engine": "no run of the engine"}


def blocks() -> dict[str, str]:
    """Markdown of each generated part of the README, by the name of its markers."""
    given = json.loads(GIVEN.read_text(encoding="utf-8"))
    return {"readers": "\n".join(map(reader, given["readers"])),
            "install": f"    {given['install']}", "tests": f"    {given['tests']}",
            "screen": "\n".join(f"    {line}".rstrip() for line in given["screen"]),
            "results": results([*given["results"], *published(given["published"])])}


def confidence_blocks() -> dict[str, str]:
    """Markdown of each generated table of docs/confidence.md."""
    found = catalog.accuracy()
    levels = []
    for name, measured in LEVELS.items():
        row = found["levels"][name]
        log_of = dict(row["quantiles"])
        levels.append((name, measured, f"{row['cases']}", whole(row["mean"]), *(
            whole(math.expm1(max(log_of[chance], 0.0))) for chance in (0.9, 0.95, 0.99))))
    chances = [whole(chance) for chance, _ in next(iter(found["kept"].values()))]
    return {"levels": markdown(("level", "what was measured", "predictions", "typical error",
                                "margin at 0.9", "at 0.95", "at 0.99"), levels),
            "kept": markdown(("left out", *chances), [
                (name, *(whole(share) for _, share in rows))
                for name, rows in found["kept"].items()])}


def accuracy_blocks() -> dict[str, str]:
    """Markdown of the generated table of docs/accuracy.md."""
    return {"choosers": markdown(
        ("margin", "no answer", "limit broken", "best one", "throughput missed"),
        [(row["margin"], *(percent(row[key]) for key in ("none", "broken", "exact", "regret")))
         for row in catalog.accuracy()["choosers"] if row["left_out"] == "shape"])}


def markdown(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    return "\n".join((f"| {' | '.join(titles)} |", "|---" * len(titles) + "|",
                      *(f"| {' | '.join(row)} |" for row in rows)))


def whole(share: float) -> str:
    """`share` in whole per cent."""
    return f"{100 * share:.0f} %"


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
         "against": "requests and decode steps, shape left out", "factor": "", **common}]


def percent(share: float) -> str:
    """`share` in per cent, with a decimal below 10."""
    return f"{100 * share:.1f} %" if share < 0.1 else f"{100 * share:.0f} %"


def results(rows: list[dict[str, Any]]) -> str:
    """A Markdown table, a row for each result; its first cell links the page of the result."""
    lines = [TITLES, ("---",) * len(TITLES), *(
        (f"[{row['what']}](benchmarks/results/{row['page']}.md)", f"**{row['xgpt']}**",
         row["against"], row["factor"], row["machine"], row["date"]) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |".replace("|  |", "| |") for line in lines)


def rewritten(text: str, parts: Mapping[str, str]) -> str:
    """`text` of a page with its generated parts as they should be."""
    for name, block in parts.items():
        text, count = re.subn(rf"(<!-- {name} -->\n)(?:.*?\n)??(<!-- /{name} -->)",
                              lambda found, block=block: f"{found[1]}{block}\n{found[2]}", text,
                              flags=re.S)
        if count != 1:
            raise SystemExit(f"the page has {count} parts between <!-- {name} --> markers")
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


PAGES = {README: blocks, HERE / "confidence.md": confidence_blocks,
         HERE / "accuracy.md": accuracy_blocks}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--screen", action="store_true", help="run the quickstart for its screen")
    if parser.parse_args().screen:
        given = json.loads(GIVEN.read_text(encoding="utf-8"))
        GIVEN.write_text(as_text({**given, "screen": screen()}), encoding="utf-8")
    for path, of in PAGES.items():
        path.write_text(rewritten(path.read_text(encoding="utf-8"), of()), encoding="utf-8")
        print(path.name)
    accuracy.main()


if __name__ == "__main__":
    main()
