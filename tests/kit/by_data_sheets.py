"""`xgpt` as a command that plans by data sheets, and measures nothing; its copies of the model take
all ranks between them, however slow a toy is on several: for jobs of whose plans nobody asks
whether they are good. `python by_data_sheets.py submit JOB.yaml`."""

import sys
from collections.abc import Callable
from pathlib import Path

COMMAND = [sys.executable, str(Path(__file__))]


def main() -> None:
    from xgpt.app import profile as timing
    from xgpt.cli.main import main as command
    from xgpt.core.problem import Problem
    from xscheduler import cells

    def why(kind: str) -> str:
        return "these plans need not be good"

    every = cells.parts_of

    def without_idle_ranks(problem: Problem, *, is_any: bool = False) -> list[Problem]:
        parts = every(problem, is_any=is_any)
        ranks = problem.cluster.num_devices
        return [one for one in parts if one.copies * one.cluster.num_devices == ranks] or parts

    replaced: Callable[..., str | None] = why
    timing.why_no_torch = replaced
    cells.parts_of = without_idle_ranks
    command()


if __name__ == "__main__":
    main()
