"""What `xgpt doctor` found, for the terminal."""

from collections.abc import Mapping

from xgpt.report.figures import percent
from xgpt.report.table import fact, table


def doctor_table(found: Mapping[str, str]) -> str:
    """A line, or a few, for each thing that was looked for."""
    return "\n".join(fact(label, words) for label, words in found.items())


def gpu_table(card: str, num_cases: int, shares: Mapping[str, float], file: str,
              differing: tuple[str, ...]) -> str:
    """Every operator: does it agree with torch, and its best share of the card's copy rate."""
    rows = [(name, "no" if name in differing else "yes", percent(share))
            for name, share in shares.items()]
    return "\n".join([
        table(("operator", "agrees", "of copy rate"), rows, right=(2,)), "",
        fact("card", f"{card}: {num_cases} cases compared with torch"),
        fact("written to", f"{file}; please send it to the project: it is how kernels get known "
                           "to work on a card")])
