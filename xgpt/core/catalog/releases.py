"""Rows of the catalog's engines by release (`vllm-0.12.0`), and what each was compared with; for
everybody. A release is two numbers; a third one, or what follows, is left out."""

import re
from typing import Any, NamedTuple

from xgpt.core import catalog
from xgpt.core.errors import nearest

PATTERN = r"(?P<engine>.+?)-v?(?P<release>[0-9]{1,4}\.[0-9]{1,4})([.a-z+-].*)?"
# Parts of a run, in words; operators alone say nothing of an engine's own time.
_RUNS = ("request", "static batch", "prompt", "decode step")


class Compared(NamedTuple):
    """Published runs, or parts of runs, that a row was compared with: their number, and the mean
    error of those that no constant was fitted to (of all, where the source was not divided)."""

    cases: int
    error: float

    def __str__(self) -> str:
        return f"{self.cases} published cases, {self.error:.0%} off in the mean"


def compared(engine: str) -> Compared | None:
    """Comparisons of a row's computed times with whole runs; None where there was none."""
    rows = [row for row in catalog.accuracy()["rows"]
            if row["engine"] == engine and row["operator"] in _RUNS]
    judged = [row for row in rows if row["half"] != "fit"]
    if not judged:
        return None
    error = sum(row["cases"] * row["mean"] for row in judged) / sum(row["cases"] for row in judged)
    return Compared(sum(row["cases"] for row in rows), error)


def row_named(text: str) -> str:
    """The name of the row for `text`: an engine, or one of its releases, such as `vllm-0.12.0`.
    Raises ValueError, in words, for a release that nobody measured, and for another name."""
    if text in (known := catalog.names("engine")):
        return text
    named = re.fullmatch(PATTERN, text)
    if named is None or named["engine"] not in known:
        raise ValueError(nearest(text, known).replace("known:", "allowed:"))
    asked, rows = _numbers(named["release"]), releases_of(named["engine"])
    for release, row in rows.items():
        if asked == _numbers(release) or release.endswith("+") and asked > _numbers(release):
            return row
    allowed = f"allowed: {', '.join(rows) or known}".replace("+", " and later")
    measured = [release for release, row in rows.items() if catalog.engine(row).date]
    if not measured:
        raise ValueError(f"nobody measured a release of {named['engine']}; {allowed}")
    best = min(measured, key=lambda release: _distance(asked, _numbers(release)))
    raise ValueError(
        f"nobody measured this release; the nearest measured one is {best} (plan.engine: "
        f"{rows[best]}; {compared(rows[best]) or 'its kernels alone'}); {allowed}")


def releases_of(engine: str) -> dict[str, str]:
    """Release -> name of the row that rests on it, the oldest first."""
    rows = [catalog.engine(name) for name in catalog.names("engine")
            if name == engine or name.startswith(f"{engine}-")]
    found = {release: row.name for row in rows for release in row.releases}
    return {release: found[release] for release in sorted(found, key=_numbers)}


def engine_rows() -> list[dict[str, Any]]:
    """The engines as JSON: name, releases, date, source, the number of published cases that each
    was compared with, and the mean error (None: no case)."""
    found = []
    for row in map(catalog.engine, catalog.names("engine")):
        of = compared(row.name)
        found.append({"engine": row.name, "releases": list(row.releases), "date": row.date,
                      "source": row.source, "cases": of.cases if of else 0,
                      "error": of.error if of else None})
    return found


def _numbers(release: str) -> tuple[int, int]:
    major, minor = release.removesuffix("+").split(".")
    return int(major), int(minor)


def _distance(asked: tuple[int, int], known: tuple[int, int]) -> tuple[int, int, int]:
    """Order of nearness: by major number, then by minor one, then the newer release first. Of an
    older major number the last release is nearest, of a newer one the first."""
    majors = known[0] - asked[0]
    minors = abs(known[1] - asked[1]) if not majors else known[1] if majors > 0 else -known[1]
    return abs(majors), minors, -known[1]
