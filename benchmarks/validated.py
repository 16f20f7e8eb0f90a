"""Writes the committed page of `xgpt validate`, and the means that tests compare with.

    python benchmarks/validated.py [--data ../shared/data] [--check]

The page's words above the table are kept from the page that is there. `--check` writes nothing: it
fails where a group's mean error is worse than the committed one by more than a tenth of it, and
says so where there is nothing to compare with."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from xgpt.cli.main import cli
from xgpt.core.whole_file import write_atomically

RESULTS = Path(__file__).resolve().parent / "results"
NAMED = ("source", "model", "gpu", "engine", "operator", "half")
DATA = RESULTS.parents[2] / "shared" / "data"


WORSE = 0.1  # of a group's error: so much more fails
SLACK = 1e-4  # for rounding


def means_of(found: Mapping[str, Any]) -> dict[str, float]:
    """Mean errors by group, of `xgpt validate --json`."""
    return {" | ".join(group[key] for key in NAMED): round(group["mean"], 5)
            for group in found["groups"] if group["cases"]}


def worse(means: Mapping[str, float], committed: Mapping[str, float]) -> list[str]:
    """A sentence for each group that is predicted worse than it was, or was not there."""
    return [f"{name}: {mean:.1%} off, {committed[name]:.1%} on the committed page"
            if name in committed else f"{name}: not on the committed page"
            for name, mean in means.items()
            if mean > (1 + WORSE) * committed.get(name, -1.0) + SLACK]


def check(data: Path, baseline: Path) -> int:
    """0 where all is as good as the committed page, or there are no measurements."""
    if not data.is_dir():
        print(f"(NOT COMPARED: no measurements under {data})")
        return 0
    means = means_of(json.loads(_printed(data, "--json").stdout))
    found = worse(means, dict(json.loads(baseline.read_text(encoding="utf-8"))))
    print("\n".join(found) or f"{len(means)} groups are predicted as well as on the committed page")
    return int(bool(found))


def _printed(data: Path, *flags: str) -> Result:
    with contextlib.chdir(RESULTS.parent):
        done = CliRunner().invoke(cli, ["validate", str(data), *flags])
    assert done.exit_code == 0, done.output
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    page = RESULTS / "validate.md"
    if arguments.check:
        raise SystemExit(check(arguments.data.resolve(), page.with_suffix(".json")))
    head = page.read_text(encoding="utf-8").split("```")[0]
    words, values = _printed(arguments.data), _printed(arguments.data, "--json")
    means = [json.dumps(pair) for pair in means_of(json.loads(values.stdout)).items()]
    write_atomically(page, f"{head}```\n{words.stdout.strip()}\n```\n")
    write_atomically(page.with_suffix(".json"), "[\n" + ",\n".join(means) + "\n]\n")
    print(page)


if __name__ == "__main__":
    main()
