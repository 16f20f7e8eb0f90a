"""Writes the committed page of `xgpt validate`, and the means that tests compare with.

    python benchmarks/validated.py [--data ../shared/data] [--date 2026-11-23]

The page's words above the table are kept from the page that is there."""

from __future__ import annotations

import argparse
import contextlib
import json
from pathlib import Path

from click.testing import CliRunner

from xgpt.cli.main import cli
from xgpt.core.whole_file import write_atomically

RESULTS = Path(__file__).resolve().parent / "results"
NAMED = ("source", "model", "gpu", "engine", "operator", "half")
DATA = RESULTS.parents[2] / "shared" / "data"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--date", default="2026-11-23")
    arguments = parser.parse_args()
    page = RESULTS / f"validate-{arguments.date}.md"
    head = page.read_text(encoding="utf-8").split("```")[0]
    with contextlib.chdir(RESULTS.parent):
        words, values = (CliRunner().invoke(cli, ["validate", str(arguments.data), *flags])
                         for flags in ((), ("--json",)))
    assert words.exit_code == values.exit_code == 0, (words.output, values.output)
    groups = json.loads(values.stdout)["groups"]
    means = [json.dumps([" | ".join(group[key] for key in NAMED), round(group["mean"], 5)])
             for group in groups if group["cases"]]
    write_atomically(page, f"{head}```\n{words.stdout.strip()}\n```\n")
    write_atomically(page.with_suffix(".json"), "[\n" + ",\n".join(means) + "\n]\n")
    print(page)


if __name__ == "__main__":
    main()
