"""Tables and paragraphs for the terminal: ASCII, at most 80 columns."""

import math
import os
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from xgpt.core.constraint import Bound, Constraint
from xgpt.core.placement import StepTerms
from xgpt.core.schedule import Estimate, Rejected, Schedule, Status
from xgpt.core.units import format_bytes, format_seconds
from xgpt.report import service_words, words
from xgpt.report.figures import JOB_FIGURES, comparisons, lost_to_bound, percent, plain, rates
from xgpt.report.output import text_at
from xgpt.report.words import controls_line
from xscheduler.layouts import LAYOUT_NOTE
from xsimulator.replay.prediction import JobPrediction

WIDTH = 80  # columns in a file or a pipe, and the most on a terminal
_LEAST_WIDTH = 40
_GAP = "  "
_LEAST_WRAPPED, _LEAST_CELL = 20, 8  # chosen: least width of a last column of words, of others
_LEFT_OF_FACTS = 13  # columns of the labels of `schedule_table`
COPIES = ("up", "down", "read", "write")  # terms of a placed step that copy
OF_JOB = ", start and end included"
_NO_PLAN = ", tp_degree 1, tp_gpus 0"


def schedule_table(schedule: Schedule) -> str:
    """Text with the facts of a schedule, a line each."""
    return _lines(schedule_facts(schedule))


def schedule_details(schedule: Schedule, job: Mapping[str, Any] | None = None) -> str:
    """All tables of a schedule: facts, choice and stages. job: figures of a JobPrediction, which
    stand first."""
    expected = [] if job is None or schedule.served else [
        ("time", format_seconds(job["wall_s"])),
        ("throughput", rates(job["throughput_qps"], job["output_tokens_per_s"]) + OF_JOB)]
    return "\n".join(filter(None, (_lines(expected), schedule_table(schedule),
                                   choice_table(schedule), stage_table(schedule),
                                   placement_tables(schedule), *service_tables(schedule))))


def service_tables(schedule: Schedule) -> list[str]:
    """Tables of a service's percentiles and of its replicas; [] of a batch job."""
    return [] if (served := schedule.served) is None else [
        table(service_words.PERCENTILES, service_words.percentile_rows(served, schedule.bounds),
              right=range(1, 8)),
        table(service_words.REPLICAS, service_words.replica_cells(served.replicas),
              right=range(10))]


def schedule_facts(schedule: Schedule) -> list[tuple[str, str]]:
    """Pairs (label, text) about a schedule: configuration, predicted throughput and latency, cost
    of limit and margin, memory, and the search's proof."""
    e, proof = schedule.estimate, schedule.proof
    if schedule.served is not None:
        return [("chosen", controls_line(e)), ("placement", words.placement(e)),
                *service_words.service_facts(schedule), ("memory", memory_words(e))]
    is_for_job = proof.status == Status.JOB and schedule.explanation
    cost = [(words.PROSPECTS[one.metric], words.prospect_words(one)) for one in schedule.prospects]
    if is_for_job:
        cost.append(("this job", schedule.explanation[0]))
    elif math.isfinite(schedule.bound.limit_s):
        cost.append(("the limit", _limit_cost(schedule)))
    is_of_others = math.isinf(schedule.bound.limit_s) and schedule.prospects  # with their margins
    if schedule.margin.note and not is_of_others:
        cost.append(("margin", words.margin_words(schedule)))
    counted = words.counted(proof.nodes, "configuration")
    search = [*words.placement_facts(schedule), (
        "search", f"{_status(schedule)}, {counted} in {format_seconds(proof.seconds)}")]
    if len(proof.policy_bounds) > 1:
        search.append(("at most", words.bounds_words(schedule)))
    if proof.covers:
        search.append(("proved of", proof.covers))
    # a throughput above the limit shows that the measured peak rates are too low
    most, own = proof.hardware_qps, schedule.figures.throughput_qps
    if most and own <= most:
        search.append(("devices", f"{percent(own / most, 0)} of the roofline limit ({plain(most)} "
                       "requests/s: peak FLOP/s and peak memory bandwidth)"))
    if proof.pruned:
        search.append(("pruned", words.pruned_words(schedule)))
    return _facts("chosen", e, schedule.bound, cost, search)


def estimate_table(estimate: Estimate, constraint: Constraint) -> str:
    """Text with the facts of an Estimate, a line each."""
    return _lines(_facts("simulated", estimate, constraint.latency))


def summary_table(metrics: Mapping[str, Any], notes: Sequence[str] = ()) -> str:
    """Text with the `notes` of a run, and predicted beside measured figures with their ratio."""
    heads = [paragraph(text) for text in notes]
    body = [(row.label, row.predicted, row.measured, row.ratio_text, row.verdict_text)
            for row in comparisons(metrics)]
    if not body:
        return "\n".join(heads)
    remarks = [words.loading_words(metrics), words.operators_words(metrics),
               words.agreement_words(metrics),
               text_at(metrics, "attribution", "sentence")]
    return "\n".join([*heads, table(("", "predicted", "measured", "ratio", ""), body,
                                    right=(1, 2, 3)),
                      *(paragraph(text) for text in remarks if text)])


def figures_of(prediction: JobPrediction | None) -> dict[str, Any] | None:
    """{name: figure} of a job's prediction, as `--json` has it under `job`; None without one."""
    return None if prediction is None else {
        name: getattr(prediction, name) for name in JOB_FIGURES}


def choice_table(schedule: Schedule) -> str:
    """Text with the reasons for the choice, and a table of the alternatives."""
    why = _lines([("why" if index == 0 else "", sentence)
                  for index, sentence in enumerate(schedule.explanation)])
    rows, rate = alternative_rows(schedule), "capacity" if schedule.served else "steady rate"
    others = table(("alternative", rate, "at most", "latency", "configuration"), rows,
                   right=(1, 2, 3)) if rows else ""
    return "\n".join(filter(None, (why, others)))


def alternative_rows(schedule: Schedule) -> list[tuple[str, str, str, str, str]]:
    """Cells of each alternative: name, requests/s found, upper bound, latency, configuration; of a
    service also each number of replicas that was examined."""
    own = schedule.deployment.replicas, schedule.deployment.devices_per_replica
    copies = [(f"{words.counted(one.replicas, 'replica')} x {one.devices_per_replica}",
               "-" if one.throughput_qps is None else plain(one.throughput_qps),
               plain(one.bound_qps) if math.isfinite(one.bound_qps) else "-", "-",
               "chosen" if (one.replicas, one.devices_per_replica) == own else one.words)
              for one in schedule.over_copies if schedule.served]
    return [(row.name, *alternative_cells(row, schedule), _configuration(row))
            for row in schedule.rejected] + copies


def alternative_cells(row: Rejected, schedule: Schedule) -> tuple[str, str, str]:
    """Cells of an alternative: requests/s found, upper bound and latency. There is no percentage of
    the chosen schedule's throughput, for the alternative's search ended early."""
    bounds = dict(schedule.proof.policy_bounds)
    return ("-" if row.throughput_qps is None else plain(row.throughput_qps),
            plain(bounds[row.subject]) if row.subject in bounds else "-",
            "-" if row.latency_s is None else format_seconds(row.latency_s))


def _configuration(row: Rejected) -> str:
    """Cell of an alternative's configuration, with the reason if there is none or it is unfit."""
    if not row.words:
        return row.reason
    point = row.words.removesuffix(_NO_PLAN)
    return point if row.throughput_qps is not None and not row.is_unsure else (
        f"{row.reason} ({point})")


def stage_table(schedule: Schedule) -> str:
    """A table of the stages: ranks, layers, phase and memory."""
    body, memory_bytes = [], schedule.figures.memory_bytes
    for pool in schedule.deployment.pools:
        phase = "encode, decode" if pool.role == "both" else pool.role
        for stage in pool.stages:
            held = [memory_bytes[rank] for rank in stage.ranks if rank < len(memory_bytes)]
            body.append((str(stage.index), words.ranks_of(stage), words.layers_of(stage), phase,
                         format_bytes(max(held)) if held else "-"))
    return table(("stage", "ranks", "layers", "phase", "memory"), body, right=(0, 4))


def _facts(label: str, e: Estimate, bound: Bound, cost: Sequence[tuple[str, str]] = (),
           search: Sequence[tuple[str, str]] = ()) -> list[tuple[str, str]]:
    """Pairs (label, text) about an estimate, with those of its `cost` and `search` between."""
    figures = e.figures
    return [
        (label, f"{controls_line(e)}; {figures.decode_batch:.1f} requests decode at once"
                f"{' in each replica' * (e.deployment.replicas > 1)}"),
        ("placement", words.placement(e)),
        *(("beside", _beside(other, count)) for other, count in Counter(e.others).items()),
        *(("layout", note.removeprefix(LAYOUT_NOTE)) for note in e.notes
          if note.startswith(LAYOUT_NOTE)),
        ("steady rate", rates(figures.throughput_qps, figures.output_tokens_per_s)),
        ("latency", _latency(figures.latency_s, bound)),
        *cost,
        ("step times", f"encode {format_seconds(figures.encode_s)}, decode iteration "
                       f"{format_seconds(figures.decode_iteration_s)}, period "
                       f"{format_seconds(figures.period_s)}"),
        *_request_times(e, bound),
        ("memory", memory_words(e)),
        *search,
        # where its times are from stands above the table
        *(("note", note) for note in e.notes if not note.startswith(("times: ", LAYOUT_NOTE)))]


def _lines(facts: Sequence[tuple[str, str]]) -> str:
    return "\n".join(fact(label, text) for label, text in facts)


def _request_times(e: Estimate, bound: Bound) -> list[tuple[str, str]]:
    """The row with TTFT and TPOT of a request with the limit's output length; none if unknown."""
    first_s, each_s = e.figures.ttft_s, e.figures.tpot_s
    if first_s is None or not math.isfinite(first_s):
        return []
    then = f", TPOT {format_seconds(each_s)}" if each_s else ""
    return [("one request", f"TTFT {format_seconds(first_s)} from the start of prefill{then} "
                            f"(output length P{bound.quantile * 100:g})")]


def _beside(other: Estimate, count: int) -> str:
    """A line about replicas of another shape. `count`: nodes that have them."""
    nodes = f"on each of {count} nodes " if count > 1 else ""
    return (f"{nodes}{words.placement(other)}: {controls_line(other)}; "
            f"{plain(count * other.figures.throughput_qps)} of the requests/s, latency "
            f"{format_seconds(other.figures.latency_s)}")


def _latency(latency_s: float, bound: Bound) -> str:
    of = f"{bound.quantile * 100:g} % of all requests" if bound.kind == "queries" else (
        f"a request of P{bound.quantile * 100:g} output length")
    text = f"{format_seconds(latency_s)} for {of}"
    if math.isinf(bound.limit_s):
        return f"{text}; no limit"
    verb = "within" if latency_s <= bound.limit_s else "OVER"
    return f"{text}, {verb} the limit of {format_seconds(bound.limit_s)}"


def _limit_cost(schedule: Schedule) -> str:
    lost, free = lost_to_bound(schedule), schedule.proof.unbounded_qps
    if lost is None or free is None:
        return "its cost was not computed"
    if not lost:
        return "costs nothing"
    return f"costs {percent(lost, 1)} of the throughput ({plain(free)} requests/s without it)"


def _status(schedule: Schedule) -> str:
    proof = schedule.proof
    if proof.status == Status.JOB:
        return proof.status if math.isinf(proof.bound_qps) else (
            f"{proof.status} (the steady state gives at most {plain(proof.bound_qps)} requests/s)")
    if not math.isfinite(proof.gap):
        return f"{proof.status}, no gap proved"
    if proof.status != Status.WITHIN_GAP:
        return f"{proof.status}, gap {percent(proof.gap, 2)}"
    # with a margin it is not plain what the gap is to
    against = f" ({words.bare_gap(schedule)})" if schedule.margin.cost > 0 else ""
    return f"within gap {percent(proof.gap, 2)}{against}"


def memory_words(e: Estimate) -> str:
    """Memory of each rank against what it has, and whether it fits."""
    sizes = e.figures.memory_bytes
    if not sizes:
        return "-"
    least, most = format_bytes(min(sizes)), format_bytes(max(sizes))
    spread = most if least == most else f"{least} to {most}"
    fits = "" if e.figures.fits else ": DOES NOT FIT"
    return f"{spread} of {format_bytes(e.figures.memory_capacity_bytes)} per rank{fits}"


def shown(path: Path) -> str:
    """The path as a user would type it here."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def shown_width() -> int:
    """Width of the output in columns: 80, or that of a narrower terminal (or of COLUMNS)."""
    if not (sys.stdout.isatty() or sys.stderr.isatty() or os.environ.get("COLUMNS")):
        return WIDTH
    return max(min(shutil.get_terminal_size((WIDTH, 24)).columns, WIDTH), _LEAST_WIDTH)


def paragraph(text: str, width: int | None = None) -> str:
    """The text in lines of at most `width` columns (default: `shown_width`)."""
    return textwrap.fill(_ascii(text), width or shown_width(), break_on_hyphens=False)


def fact(label: str, value: str, width: int | None = None) -> str:
    """The value beside its label, in lines of `width` columns; None: as wide as is shown. A path is
    never broken."""
    return textwrap.fill(_ascii(value), width or shown_width(),
                         initial_indent=f"{label} ".ljust(_LEFT_OF_FACTS),
                         subsequent_indent=" " * _LEFT_OF_FACTS, break_on_hyphens=False,
                         break_long_words="/" not in value)


def table(header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int]) -> str:
    """Aligned columns; where they exceed the width, a last column of words goes on in lines of its
    own, or else every column of words does; what then is still too wide is shortened."""
    cells = [[_ascii(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    excess = sum(widths) + len(_GAP) * (len(widths) - 1) - shown_width()
    last = len(header) - 1
    if excess > 0 and last not in right and widths[last] - excess >= _LEAST_WRAPPED:
        widths[last] -= excess
    elif excess > 0:
        words_of = [[len(word) for row in cells for word in row[i].split()]
                    for i in range(len(header))]
        least = [max(_LEAST_CELL, min(max(own, default=0), _LEAST_WRAPPED)) for own in words_of]
        excess = _narrowed(widths, least, [i for i in range(len(header)) if i not in right], excess)
    head = len(_wrapped(cells[0], widths, right))
    cells = [line for row in cells for line in _wrapped(row, widths, right)]
    if excess > 0 and sum(widths) + len(_GAP) * last > shown_width():
        widest = widths.index(max(widths))
        widths[widest] = max(widths[widest] - excess, 4)
    lines = [_line(row, widths, right) for row in cells]
    lines.insert(head, "-" * (sum(widths) + len(_GAP) * (len(widths) - 1)))
    return "\n".join(lines)


def _narrowed(widths: list[int], least: Sequence[int], columns: Sequence[int], excess: int) -> int:
    """Narrows the widest columns step by step down to their `least`; returns the excess left."""
    while excess > 0 and (over := [i for i in columns if widths[i] > least[i]]):
        widths[max(over, key=lambda column: widths[column])] -= 1
        excess -= 1
    return excess


def _wrapped(row: Sequence[str], widths: Sequence[int], right: Sequence[int]) -> list[list[str]]:
    """The row as lines, as many as its cells of words need."""
    parts = [[cell] if i in right or len(cell) <= widths[i] else
             textwrap.wrap(cell, widths[i], break_on_hyphens=False) for i, cell in enumerate(row)]
    return [list(line) for line in zip_longest(*parts, fillvalue="")]


def _line(row: Sequence[str], widths: Sequence[int], right: Sequence[int]) -> str:
    shown = [cell if len(cell) <= width else cell[: width - 3] + "..."
             for cell, width in zip(row, widths, strict=True)]
    return _GAP.join(cell.rjust(width) if i in right else cell.ljust(width)
                     for i, (cell, width) in enumerate(zip(shown, widths, strict=True))).rstrip()


def _ascii(text: str) -> str:
    return text.encode("ascii", "backslashreplace").decode("ascii")


def placement_tables(schedule: Schedule) -> str:
    """Bytes by tier with prices of memory, and seconds and bytes of each term of a step; "" for a
    schedule without a placement."""
    if schedule.placed is None:
        return ""
    tiers = [(one.name, *(format_bytes(held) if held else "-" for held in (
        one.weights, one.kv, one.hidden, one.work)), format_bytes(one.free),
        f"+{percent(one.price, 1)}" if one.price else "-")
        for one in schedule.placed.tiers]
    steps = [row for step in schedule.placed.steps for row in _step_rows(step)]
    return "\n\n".join((
        table(("tier", "weights", "KV cache", "hidden", "work", "free", "1 GiB more"), tiers,
              right=range(1, 7)),
        table(("step", *COPIES, "compute", "in all", "longest"), steps, right=range(1, 7))))


def _step_rows(step: StepTerms) -> Iterator[tuple[str, ...]]:
    """A row of seconds, and one of bytes."""
    yield (step.kind, *(_seconds(getattr(step, f"{term}_s")) for term in (*COPIES, "compute")),
           _seconds(step.seconds), step.binds)
    yield ("", *(format_bytes(held) if (held := getattr(step, f"{term}_bytes")) else "-"
                 for term in COPIES), "", "", "")


def _seconds(seconds: float) -> str:
    return format_seconds(seconds) if seconds else "-"
