"""A chart's data as an HTML table, in a fold of its own: the page can be read without scripts."""

import html
from itertools import islice

from xgpt.report.chart import Chart
from xgpt.report.words import clean

MOST_ROWS = 2000


def data_table(chart: Chart) -> str:
    """`<details>` with all that the chart shows, at most `MOST_ROWS` of it."""
    rows = list(islice(chart.rows(), MOST_ROWS + 1))
    has_notes = any(row[-1] for row in rows)
    shown = [row if has_notes else row[:-1] for row in rows[:MOST_ROWS]]
    header = chart.header() if has_notes else chart.header()[:-1]
    head = "".join(f'<th scope="col">{_cell(cell)}</th>' for cell in header)
    body = "\n".join("<tr>" + "".join(f"<td>{_cell(cell)}</td>" for cell in row) + "</tr>"
                     for row in shown)
    more = (f'<p class="quiet">The first {MOST_ROWS:,} rows.</p>' if len(rows) > MOST_ROWS else "")
    return (f'<details class="data"><summary>Data</summary><div class="scroll"><table>'
            f"<thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>{more}"
            f"</details>")


def _cell(text: str) -> str:
    return html.escape(clean(text))
