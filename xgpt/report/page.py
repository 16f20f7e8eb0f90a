"""`report.html`: one self-contained page of one run, done or interrupted.

Prompts, answers and error texts are untrusted: they pass through the template's autoescaping, and
the page's own policy lets no script run but the one whose hash it names.
"""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from xgpt.core import catalog
from xgpt.core.engines import OWN_ENGINE
from xgpt.core.errors import MissingExtraError
from xgpt.core.lengths import Lengths, truncated_normal
from xgpt.core.schedule import Rejected, Schedule
from xgpt.core.units import format_bytes, format_seconds
from xgpt.core.whole_file import write_atomically
from xgpt.report import plots, words
from xgpt.report.changes import change_rows
from xgpt.report.figures import (
    BoundCheck,
    busy_shares,
    check_bound,
    comparisons,
    lost_to,
    metrics_so_far,
    middle_window,
    percent,
    plain,
    quantity,
)
from xgpt.report.output import ALONE, Answer, Output, number, read_output, text_at
from xgpt.report.policy_words import row_of, schedule_sentences

REPORT_NAME = "report.html"
MAX_ANSWERS = 100
MAX_ERRORS = 100
_MAX_FACTS = 24
_TEMPLATES = Path(__file__).parent


def write_report(output_dir: Path) -> Path:
    """Write `report.html` into `output_dir` from what a run left there, and return its path.

    Works on a run that was cut off. Raises InputError if `output_dir` is no folder, and
    MissingExtraError without jinja2; without matplotlib the page has no plots and says so.
    """
    page = render(read_output(output_dir, MAX_ANSWERS))
    path = output_dir / REPORT_NAME
    write_atomically(path, page)
    return path


def render(output: Output) -> str:
    """The page's HTML."""
    try:
        import jinja2
    except ImportError:
        raise MissingExtraError("jinja2", "run", "writing report.html") from None
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES), autoescape=True,
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(clean=lambda text: words.clean(str(text)),
                               tight=words.tight, bytes=format_bytes, seconds=format_seconds,
                               plain=plain)
    script = environment.get_template("script.html.j2").render()
    return environment.get_template("report.html.j2").render(
        script_hash=_script_hash(script), **_context(output))


def _context(output: Output) -> dict[str, Any]:
    metrics = dict(output.metrics or metrics_so_far(output.queries, len(output.errors)))
    check = check_bound(output)
    return {
        "name": text_at(output.job, "name") or output.directory.name,
        "headline": words.headline(output, metrics),
        "check": check,
        "banner": words.banner(output),
        "is_done": output.metrics is not None and text_at(output.metrics, "status") != "stopped",
        "tiles": _tiles(metrics, check),
        "comparisons": comparisons(metrics),
        "attribution": text_at(metrics, "attribution", "sentence"),
        "schedule": output.schedule,
        "schedule_facts": _schedule_facts(output.schedule),
        "schedule_sentences": () if output.schedule is None else schedule_sentences(
            output.schedule.estimate),
        "lost_to": lambda row: _lost_to(row, output.schedule),
        "words": words,
        "plots": _plots(output, metrics),
        "can_plot": plots.can_plot(),
        "timeline": _timeline(output),
        "changes": change_rows(metrics),
        "expected_timeline": output.expected_timeline,
        "run_facts": _run_facts(output, metrics),
        "profile_facts": _profile_facts(output.profile or {}),
        "answers": output.answers,
        "answers_shown": _answers_shown(output),
        "answer_rows": [_answer_row(answer) for answer in output.answers],
        "errors": output.errors[:MAX_ERRORS],
        "num_errors": len(output.errors),
        "remarks": output.remarks,
    }


def _tiles(metrics: Mapping[str, Any], check: BoundCheck) -> list[dict[str, str]]:
    """The four figures people look for first, each with its prediction."""
    tiles = []
    for key, label, unit in (("throughput_qps", "Throughput", "queries/s"),
                             ("output_tokens_per_s", "Output", "tokens/s"),
                             ("latency_p50_s", "Latency P50", "s"),
                             ("latency_p99_s", "Latency P99", "s")):
        measured, predicted = number(metrics, key, "measured"), number(metrics, key, "predicted")
        value, _, shown_unit = quantity(measured, unit).partition(" ")
        note = "" if predicted is None else f"predicted {quantity(predicted, unit)}"
        is_bad = key == "latency_p99_s" and check.is_kept is False
        tiles.append({"label": label, "value": value, "unit": shown_unit, "note": note,
                      "state": "bad" if is_bad else ""})
    return tiles


def _schedule_facts(schedule: Schedule | None) -> list[tuple[str, str]]:
    if schedule is None:
        return []
    e = schedule.estimate
    of_latencies = ("of all latencies" if schedule.bound.kind == "queries"
                    else "of the output lengths")
    facts = [
        ("Policy", row_of(e).title),
        ("Encode batch", str(e.figures.encode_batch)),
        ("Decode batch", f"{e.figures.decode_batch:.1f} on average"),
        ("Decode iterations", str(e.figures.decode_iterations))
        if e.figures.decode_iterations else None,
        ("Micro-batches", str(e.deployment.num_groups)) if e.deployment.num_groups > 1 else None,
        ("Tensor parallel", f"degree {e.deployment.tp_degree} on {e.deployment.tp_gpus} devices")
        if e.deployment.tp_degree > 1 and e.deployment.tp_gpus else None,
        ("Predicted throughput", f"{plain(e.figures.throughput_qps)} queries/s, "
                                 f"{plain(e.figures.output_tokens_per_s)} tokens/s"),
        ("Predicted latency", format_seconds(e.figures.latency_s)),
        ("Latency bound", "none" if math.isinf(schedule.bound.limit_s) else
         f"{format_seconds(schedule.bound.limit_s)} for {schedule.bound.quantile * 100:g} % "
         f"{of_latencies}"),
        ("One period", format_seconds(e.figures.period_s)) if e.figures.decode_iterations else None,
        ("Encoding", format_seconds(e.figures.encode_s)),
        ("Decode iteration", format_seconds(e.figures.decode_iteration_s)),
        ("KV reserved", f"{e.deployment.kv_tokens:,} tokens at most"),
        ("Margin", f"{percent(schedule.margin.factor - 1, digits=1)} of the latency, costs "
                   f"{percent(schedule.margin.cost, digits=1)} of the throughput")
        if schedule.margin.factor > 1 else None,
        ("Search", schedule.proof.status),
        ("Proved at most", f"{plain(schedule.proof.bound_qps)} queries/s")
        if math.isfinite(schedule.proof.bound_qps) else None,
        ("Gap", percent(schedule.proof.gap, digits=2))
        if math.isfinite(schedule.proof.gap) else None,
        ("Configurations", f"{schedule.proof.nodes:,} evaluated"),
    ]
    return [fact for fact in facts if fact is not None]


def _lost_to(row: Rejected, schedule: Schedule | None) -> str:
    share = None if schedule is None else lost_to(row, schedule)
    return "-" if share is None else percent(share, digits=1)


def _plots(output: Output, metrics: Mapping[str, Any]) -> list[dict[str, str]]:
    """Captioned plots; empty without matplotlib or without results."""
    if not plots.can_plot():
        return []
    bound_s = (output.schedule.bound.limit_s if output.schedule
               else number(output.job, "constraint", "latency_s"))
    is_own = text_at(metrics, "engine") in (None, OWN_ENGINE)  # else nothing was predicted
    predicted_qps = (output.schedule.estimate.figures.throughput_qps
                     if output.schedule and is_own else None)
    expected = expected_output_lengths(output.job)
    note = "" if expected is None else f" Expected: {expected.note}."
    latency = plots.latency_histogram(output.queries, bound_s,
                                      number(metrics, "latency_p50_s", "measured"),
                                      number(metrics, "latency_p99_s", "measured"))
    drawn = (
        ("Latency of the queries", latency,
         "From the start of a query's encoding to its last token."),
        ("Queries done", plots.done_curve(output.queries, predicted_qps),
         "The predicted pace is that of the steady state, between filling up and running empty."),
        ("Output lengths", plots.output_lengths(output.queries, expected),
         f"Tokens the model wrote per query.{note}"),
    )
    return [{"title": title, "svg": svg, "caption": caption}
            for title, svg, caption in drawn if svg is not None]


def _timeline(output: Output) -> dict[str, Any] | None:
    """The middle of the run, a few periods long, stage by stage."""
    period_s = output.schedule.estimate.figures.period_s if output.schedule else None
    window = middle_window(output.steps, 3 * period_s if period_s else None)
    if window is None:
        return None
    start_s, end_s = window
    origin_s = min(step.start_s for step in output.steps)
    busy = busy_shares(output.steps, start_s, end_s)
    pools = {step.stage: f" ({step.pool})" for step in output.steps if step.pool != ALONE}
    return {"svg": plots.timeline(output.steps, start_s, end_s, origin_s),
            "length": format_seconds(end_s - start_s),
            "busy": [f"stage {stage}{pools.get(stage, '')} works {percent(share)} of the time"
                     for stage, share in busy.items()]}


def expected_output_lengths(job: Mapping[str, Any]) -> Lengths | None:
    """The job's own expectation of output lengths, where it states one as a distribution."""
    task = text_at(job, "workload", "output_tokens", "task")
    if task is not None:
        return catalog.task(task).outputs if task in catalog.names("task") else None
    mean, std, maximum = (number(job, "workload", "output_tokens", key)
                          for key in ("mean", "std", "maximum"))
    if mean is None or std is None or maximum is None or not 0 < mean <= maximum or std < 0:
        return None
    return truncated_normal(mean, std, int(maximum))


def _run_facts(output: Output, metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
    facts = [("Job", text_at(output.job, "name")), ("Model", text_at(output.job, "model")),
             ("Weights", text_at(metrics, "model_source")),
             ("Loading", words.loading_words(metrics)),
             ("Engine", text_at(metrics, "engine")),
             ("Ranks", _as_text(metrics.get("ranks"))), ("Dtype", text_at(metrics, "dtype")),
             ("Requests", text_at(output.job, "workload", "requests")),
             ("Date", text_at(metrics, "date")), ("Status", text_at(metrics, "status"))]
    machine = metrics.get("machine")
    known = [(label, value) for label, value in facts if value is not None]
    return known + (_facts(machine) if isinstance(machine, Mapping) else [])


def _profile_facts(profile: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What was measured where, how good it is, and how many points each operator has, of a file of
    any version, whole or not (xprofiler.profile_file)."""
    facts = [(label.removeprefix("metadata: "), text) for label, text in _facts(
        {"metadata": profile.get("metadata"), "verdict": profile.get("verdict")}) if text]
    refused, tables = profile.get("refused"), profile.get("tables")
    if isinstance(refused, Mapping):
        facts += [(f"refused: degree {degree}", str(why)) for degree, why in refused.items()]
    if (spent_s := number(profile, "spent_s")) is not None:
        facts.append(("measured in", format_seconds(spent_s)))
    by_name: dict[str, list[tuple[str, int]]] = {}
    for key, points in tables.items() if isinstance(tables, Mapping) else ():
        name, _, rest = key.partition(" ")  # "layer_rest tp=2", in version 1 "layer_rest"
        if isinstance(points, list):
            by_name.setdefault(name, []).append((rest, len(points)))
    return facts + [(f"timed: {name.replace('_', ' ')}", _points_text(counts))
                    for name, counts in by_name.items()][:_MAX_FACTS]


def _points_text(tables: Sequence[tuple[str, int]]) -> str:
    """`25 points`, of several tables with how they differ: `14 points (tp=1), 11 points (tp=2)`."""
    counts = [(rest, words.counted(count, "point")) for rest, count in tables]
    if len(counts) == 1:
        return counts[0][1]
    return ", ".join(f"{count} ({rest})" if rest else count for rest, count in counts)


def _facts(source: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """The plain values of `source`, one level of nesting deep; tables are only counted."""
    facts: list[tuple[str, str]] = []
    for key, value in source.items():
        label = f"{prefix}{key}".replace("_", " ")
        if isinstance(value, Mapping) and not prefix:
            facts += _facts(value, f"{key}: ")
        elif isinstance(value, (list, tuple, Mapping)):
            facts.append((label, f"{len(value)} entries"))
        elif (text := _as_text(value)) is not None:
            facts.append((label, text))
    return facts[:_MAX_FACTS]


def _as_text(value: object) -> str | None:
    if value is None:
        return None
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _answer_row(answer: Answer) -> dict[str, Any]:
    figures = answer.figures
    return {"id": answer.id, "prompt": answer.prompt, "text": answer.text,
            "reason": figures.finish_reason,
            "tokens": f"{figures.input_tokens:,} in, {figures.output_tokens:,} out",
            "latency": format_seconds(figures.latency_s)}


def _answers_shown(output: Output) -> str:
    shown, total = len(output.answers), len(output.queries)
    return f"all {total:,}" if shown == total else f"the first {shown:,} of {total:,}"


def _script_hash(script_element: str) -> str:
    """The content hash a Content-Security-Policy names for an inline script."""
    body = re.search(r"<script>(.*?)</script>", script_element, flags=re.S)
    assert body is not None, f"{script_element[:80] = }"
    digest = hashlib.sha256(body.group(1).encode()).digest()
    return "sha256-" + base64.b64encode(digest).decode()
