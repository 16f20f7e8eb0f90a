"""What the benchmarks share: their options, the machine and the date, and pages of results."""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_SETS = {"avx512f": "AVX-512", "avx512_bf16": "bf16", "amx_bf16": "AMX"}


def options(doc: str | None) -> argparse.ArgumentParser:
    """A parser whose description is the docstring's first line, with `--out`."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="folder of the page")
    return parser


def about(doc: str | None) -> str:
    """A module's docstring after its first line and its usage."""
    return (doc or "").split("\n\n", 2)[2].strip()


def today() -> str:
    """YYYY-MM-DD."""
    return datetime.date.today().isoformat()


def cpu() -> str:
    """The processor's name."""
    found = re.search(r"^model name\s*: (.*)$", _cpuinfo(), re.M)
    return found[1] if found else platform.machine()


def machine() -> str:
    """Number of cores, the processor's name, and the instruction sets that products depend on."""
    found = re.search(r"^flags\s*: (.*)$", _cpuinfo(), re.M)
    flags = set(found[1].split()) if found else set[str]()
    words = ", ".join([*(name for flag, name in _SETS.items() if flag in flags),
                       *(f"no {name}" for flag, name in _SETS.items() if flag not in flags)])
    cores = len(re.findall(r"^processor\s*:", _cpuinfo(), re.M))
    return f"{cores} cores of {cpu()} ({words})"


def table(header: Sequence[str]) -> list[str]:
    """The head of a table in Markdown, two lines."""
    return [f"| {' | '.join(header)} |", "|" + len(header) * "---|"]


def write(name: str, text: str, out: Path | None, figures: Any = None) -> None:
    """Prints the page and, if `out` is a folder, writes `name`.md there, with the figures in
    `name`.json."""
    print(text)
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.md").write_text(text.rstrip() + "\n", encoding="utf-8")
    if figures is not None:
        (out / f"{name}.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def _cpuinfo() -> str:
    path = Path("/proc/cpuinfo")
    return path.read_text(encoding="utf-8") if path.is_file() else ""
