"""Rewrites README.md's results, screen and first commands, and the picture of docs/accuracy.md.

    python docs/readme.py

The text between `<!-- NAME -->` and `<!-- /NAME -->` comes from docs/readme.json and
docs/pictures/accuracy.json; benchmarks/validated.py writes the latter."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "pictures"))

import accuracy  # noqa: E402

README = HERE.parent / "README.md"
TITLES = ("", "xgpt", "compared with", "", "machine", "date")


def blocks() -> dict[str, str]:
    """Markdown of each generated part of the README, by the name of its markers."""
    given = json.loads((HERE / "readme.json").read_text(encoding="utf-8"))
    return {"plan": f"      {given['plan']['command']}\n\n  It tells {given['plan']['answer']}.",
            "screen": "\n".join(f"    {line}".rstrip() for line in given["screen"]),
            "results": results([*given["results"], *published(given["published"])])}


def published(common: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows on runs of other engines that others published, from the held-out half of them."""
    points = json.loads(accuracy.POINTS.read_text(encoding="utf-8"))
    held_out = accuracy.errors(points["requests"], "test")
    (chosen,) = (row for row in points["choosers"] if (row["half"], row["margin"]) == (
        "test", "none"))
    kept = dict(points["kept"])[0.95]
    return [
        {"what": "request time, published runs", "xgpt": f"{held_out.mean():.1%} off (mean)",
         "against": f"{len(held_out)} held-out runs", "factor": f"worst {held_out.max():.0%}",
         **common},
        {"what": "best of their configurations within a limit",
         "xgpt": f"chosen in {chosen['exact']:.0%}",
         "against": f"{chosen['cases']} held-out choices",
         "factor": f"{chosen['regret']:.1%} throughput lost", **common},
        {"what": "a limit promised with 95 %", "xgpt": f"kept in {kept:.0%}",
         "against": f"{len(held_out)} held-out runs", "factor": "", **common}]


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


def main() -> None:
    README.write_text(rewritten(README.read_text(encoding="utf-8")), encoding="utf-8")
    accuracy.main()
    print("README.md")


if __name__ == "__main__":
    main()
