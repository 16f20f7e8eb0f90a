"""A self-contained page: a template, the charts' figures, and the scripts that its policy names.

Nothing is fetched. The Content-Security-Policy names each script by its hash and forbids `eval`;
what is put into a template is escaped."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xgpt.core.errors import MissingExtraError
from xgpt.core.units import format_bytes, format_seconds
from xgpt.core.whole_file import write_atomically
from xgpt.report import words
from xgpt.report.chart import Chart
from xgpt.report.chart_table import data_table
from xgpt.report.figures import percent, plain
from xgpt.report.plotly_figure import figures_json, library

if TYPE_CHECKING:
    import jinja2

_FOLDER = Path(__file__).parent


def render_page(template: str, page: str, drawn: Sequence[Chart], **context: Any) -> str:
    """The HTML of `template`, whose macros draw `drawn`. Raises MissingExtraError, for the file
    `page`, without jinja2."""
    own = (_FOLDER / "page_script.js").read_text(encoding="utf-8")
    scripts = [library(), own] if drawn else [own]
    return _templates(page).get_template(template).render(
        scripts=scripts, script_hashes=[_hash(script) for script in scripts],
        figures_json=figures_json(drawn), **context)


def write_chart_page(charts: Sequence[Chart], path: Path, name: str) -> None:
    """Writes a page of charts alone."""
    write_atomically(path, render_page("charts.html.j2", path.name, charts, name=name,
                                       charts=charts))


def _templates(page: str) -> jinja2.Environment:
    try:
        import jinja2
    except ImportError:
        raise MissingExtraError("jinja2", "run", f"writing {page}") from None
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER), autoescape=True,
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(clean=lambda text: words.clean(str(text)), percent=percent,
                               tight=words.tight, bytes=format_bytes, seconds=format_seconds,
                               plain=plain, data_table=data_table)
    return environment


def _hash(script: str) -> str:
    """What a Content-Security-Policy calls an inline script, in its quotes."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
