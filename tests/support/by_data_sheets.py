"""`xgpt` as a command that plans by data sheets, and measures nothing: for jobs of whose plans
nobody asks whether they are good. `python by_data_sheets.py submit JOB.yaml`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

COMMAND = [sys.executable, str(Path(__file__))]


def main() -> None:
    from xgpt.app import timing
    from xgpt.cli.main import main as command

    def why(kind: str) -> str:
        return "these plans need not be good"

    replaced: Callable[..., str | None] = why
    timing.why_no_torch = replaced
    command()


if __name__ == "__main__":
    main()
