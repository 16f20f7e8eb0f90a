"""Rows of the catalog's engines by release (`vllm-0.12.0`), and what each was compared with; for
everybody. A release is two numbers; what follows is left out."""

import re
from functools import cache
from typing import Any

from xgpt.core import catalog
from xgpt.core.errors import nearest

_NAMED = re.compile(r"(.+?)-v?([0-9]{1,4}\.[0-9]{1,3})([.a-z+-].*)?")
# (part of a run, what was left out of the fit for it); operators alone say nothing of the host.
_RUNS = (("request", "shape"), ("static batch", ""), ("prompt", ""), ("decode step", ""))


def engine_rows() -> list[dict[str, Any]]:
    """The engines: name, releases, date, source, `cases`: published runs or parts of them that each
    was compared with, `error`: their mean error where constants were fitted without their shape,
    if any were fitted to runs (None: no case)."""
    found = []
    for row in map(catalog.engine, catalog.names("engine")):
        judged = [case for case in catalog.accuracy()["rows"] if case["engine"] == row.name and (
            case["operator"], case["left_out"]) in _RUNS]
        cases = sum(case["cases"] for case in judged)
        error = sum(case["cases"] * case["mean"] for case in judged) / cases if cases else None
        found.append({"engine": row.name, "releases": list(row.releases), "date": row.date,
                      "source": row.source, "cases": cases, "error": error})
    return found


@cache
def row_named(text: str) -> str:
    """The name of the row for an engine, or for one of its releases, such as `vllm-0.12.0`. Raises
    ValueError, in words, for a release that nobody measured, and for another name."""
    known, named = catalog.names("engine"), _NAMED.fullmatch(text)
    if text in known:
        return text
    if named is None or named[1] not in known:
        raise ValueError(nearest(text, known).replace("known:", "allowed:"))
    rows = [row for row in engine_rows() if f"{row['engine']}-".startswith(f"{named[1]}-")]
    releases = sorted(((release, row) for row in rows for release in row["releases"]),
                      key=lambda one: _number(one[0]))
    asked = _number(named[2])
    for release, row in releases:
        if asked == _number(release) or release.endswith("+") and asked > _number(release):
            return str(row["engine"])
    allowed = ", ".join(release for release, _ in releases).replace("+", " and later") or named[1]
    measured = [(release, row) for release, row in releases if row["cases"]]
    if not measured:
        raise ValueError(f"nobody measured a release of {named[1]}; allowed: {allowed}")
    release, row = min(reversed(measured), key=lambda one: abs(_number(one[0]) - asked))
    error = catalog.accuracy()["levels"]["neighbour"]["mean"]
    raise ValueError(
        f"nobody measured this release; the nearest measured one is {release} (plan.engine: "
        f"{row['engine']}; {row['cases']} published cases, {row['error']:.0%} off in the mean; of "
        f"another release: neighbour, typical error {error:.0%}); allowed: {allowed}")


def _number(release: str) -> int:
    major, minor = release.removesuffix("+").split(".")
    return 1000 * int(major) + int(minor)
