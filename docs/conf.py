"""The site made of the documents: `sphinx-build -W -b html -c docs . FOLDER`.

Sphinx because it is the best kept of its kind, and takes the pages as they are (Markdown, by MyST).
The source is the whole tree: pages link results of benchmarks, and files, which become downloads.
Nothing is fetched, neither when the site is built nor when it is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

project = "xgpt"
html_title = "xgpt"
root_doc = "docs/index"
extensions = ["myst_parser"]
include_patterns = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/*.md",
                    "docs/first-hour/*.md",
                    "docs/schema/README.md", "benchmarks/README.md", "benchmarks/results/*.md",
                    "jobs/README.md", "csrc/README.md"]
exclude_patterns = ["**/__pycache__", ".*", "build", "dist", "out", "tests", "x*"]
nitpicky = True  # a link that leads nowhere is a warning, and by -W an error
myst_heading_anchors = 4  # headings are targets of links, by the names that GitHub gives them
highlight_language = "none"
html_theme = "furo"
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False


def setup(app: Any) -> None:
    app.connect("source-read", _keep_off_the_sidebar)
    app.connect("build-finished", _lead_to_the_first_page)


def _keep_off_the_sidebar(app: Any, name: str, source: list[str]) -> None:
    """Makes the README, transcripts and pages of results orphans: docs/results.md lists these."""
    if name == "README" or name.startswith(("benchmarks/", "docs/first-hour/")):
        source[0] = f"---\norphan: true\n---\n{source[0]}"


def _lead_to_the_first_page(app: Any, failure: Exception | None) -> None:
    if failure is None and app.builder.name == "html":
        (Path(app.outdir) / "index.html").write_text(
            f'<!doctype html><meta http-equiv="refresh" content="0; url={root_doc}.html">\n')
