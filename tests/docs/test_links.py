"""Every link from a page to another file of this repository leads to one that is there."""

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# written by a run, an installation or a linter, none of them ours to keep
_NOT_OURS = {"node_modules", "out", "build"}
_LINK = re.compile(r"\]\(([^)\s#]+)(?:#[^)\s]*)?\)")


def pages() -> Iterator[Path]:
    for page in sorted(ROOT.rglob("*.md")):
        within = page.relative_to(ROOT).parts
        if not any(part.startswith(".") or part in _NOT_OURS for part in within):
            yield page


def test_every_link_to_a_file_leads_to_one() -> None:
    seen, dead = 0, []
    for page in pages():
        for target in _LINK.findall(page.read_text(encoding="utf-8")):
            if "://" in target or target.startswith("mailto:"):
                continue
            seen += 1
            if not (page.parent / target).exists():
                dead.append(f"{page.relative_to(ROOT)}: {target}")
    assert seen > 50
    assert not dead, dead
