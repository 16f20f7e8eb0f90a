"""The screen of a run: what will be done and how long it takes, then what was measured, what is
wrong, and what comes next, in at most 25 lines together."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from xgpt.core.problem import Problem
from xgpt.core.schedule import Schedule
from xgpt.core.units import format_bytes, format_seconds
from xgpt.report.figures import BoundCheck, comparisons, plain
from xgpt.report.offload_words import offload_words
from xgpt.report.output import number, text_at
from xgpt.report.replicas import replica_words
from xgpt.report.service_words import attainment_words
from xgpt.report.table import fact
from xgpt.report.words import controls_line, counted, placement, prospect_words
from xscheduler.admission_choice import room_words
from xsimulator.replay.prediction import JobPrediction

_MOST_LINES = 15  # chosen: with the ten before the run there are 25


def begin_screen(problem: Problem, schedule: Schedule, prediction: JobPrediction | str, *,
                 model: str, machine: str, times: str, sharing: Sequence[str] = ()) -> str:
    """The lines before a run. prediction: why there is none, if it is a text. model: its name and
    source. machine, times: in words. sharing: sentences on shared prefixes."""
    duration = f"not predicted: {prediction}" if isinstance(prediction, str) else duration_words(
        problem, prediction.wall_s, schedule.margin.factor) + (
            f", after {format_seconds(prediction.load_s)} of loading" if prediction.load_s else "")
    own = schedule.served
    rows = (("time", duration) if own is None else (
        "service", f"{plain(own.rate)} of at most {plain(own.capacity.qps)} requests/s; "
                   f"{attainment_words(own)}"), ("model", model), ("machine", machine),
            ("plan", f"{controls_line(schedule.estimate)}; {placement(schedule.estimate)}"),
            ("KV cache", room_words(schedule.estimate, problem)),
            *zip(("prefixes", ""), sharing, strict=False), ("times", times),
            *(("deadlines", prospect_words(one)) for one in schedule.prospects if one.share))
    return "\n".join(fact(label, text) for label, text in rows if text)


def duration_words(problem: Problem, seconds: float, margin: float) -> str:
    """`7.9 s for 72 requests, 9.2 s at 95 %`, and that answers are planned at their cap where that
    is so. margin: factor on the time with the constraint's confidence."""
    text = f"{format_seconds(seconds)} for {counted(problem.num_queries or 0, 'request')}"
    if margin > 1:
        text += f", {format_seconds(margin * seconds)} at {problem.constraint.confidence:.0%}"
    return text if not problem.observes else (
        f"at most {text}, if every answer has {problem.default_max_tokens:,} tokens (how long "
        "answers are is not known)")


def machine_words(problem: Problem, threads: int) -> str:
    """`2 CPU cores, 20 GiB`, or `1 x H200, 139 GiB`. threads: of each rank."""
    cluster = problem.cluster
    count, memory = cluster.num_devices, cluster.device.memory_bytes
    if cluster.device.kind == "cpu":
        return f"{counted(count * threads, 'CPU core')}, {format_bytes(count * memory)} free"
    return f"{count} x {cluster.device.name}, {format_bytes(memory)} each"


def end_screen(metrics: Mapping[str, Any], checks: Sequence[BoundCheck], notes: Sequence[str],
               files: Mapping[str, str]) -> str:
    """The lines after a run. notes: what is wrong, the worst first. files: what was written and
    what comes next, by label."""
    kept = "; ".join(check.sentence for check in checks if check.is_kept
                     and check.bound is not None and check.bound.metric != "latency")
    before = ["", _done(metrics), *_measured(metrics, checks), *(
        fact(label, text) for label, text in (("replicas", replica_words(metrics)),
                                              ("copies", offload_words(metrics)),
                                              ("limits", kept)) if text)]
    after = ["", *(fact(label, text) for label, text in files.items())]
    shown = [fact("note", text) for text in notes]
    most = _MOST_LINES - 3 * ("prefixes" in metrics)  # which the lines before the run tell of
    while shown[2:] and _lines([*before, *shown, *after]) > most:
        shown.pop()
    if (more := len(notes) - len(shown)) > 0:
        after.insert(0, fact("", f"{counted(more, 'more note')}: --verbose"))
    return "\n".join([*before, *shown, *after])


def _lines(parts: Sequence[str]) -> int:
    return sum(part.count("\n") + 1 for part in parts)


def _done(metrics: Mapping[str, Any]) -> str:
    count, before = (int(number(metrics, key) or 0) for key in ("queries", "queries_before"))
    failed = int((number(metrics, "failed") or 0) + (number(metrics, "errors") or 0))
    wall_s = number(metrics, "wall_s", "measured")
    text = counted(count - before, "request")
    text += f" (and {before:,} by earlier runs)" * bool(before)
    text += "" if wall_s is None else f" in {format_seconds(wall_s)}"
    text += f", {failed:,} of them without an answer" * bool(failed)
    return fact("stopped" if text_at(metrics, "status") == "stopped" else "done", text)


def _measured(metrics: Mapping[str, Any], checks: Sequence[BoundCheck]) -> Iterator[str]:
    """Measured beside predicted, and whether the latency limit was met."""
    rows = {row.label: row for row in comparisons(metrics)}
    limit = next((check for check in checks if check.bound is not None
                  and check.bound.metric == "latency" and not check.is_joint), None)
    kept = "" if limit is None or limit.is_kept is None or limit.bound is None else (
        f"limit {format_seconds(limit.bound.limit_s)} {'met' if limit.is_kept else 'MISSED'}")
    is_service = "served" in metrics
    asked = "".join(f"{check.bound.quantile * 100:g} % {'met' if check.is_kept else 'MISSED'}"
                    for check in checks if check.is_joint and check.bound)
    lines = [(name, row.measured.removesuffix(f" {unit}"), row.predicted.removesuffix(f" {unit}"),
              verdict if is_service else row.verdict_text if unit == "requests/s" else "")
             for label, name, unit, verdict in (
                 ("Throughput", "requests/s", "requests/s", "as they arrive"),
                 ("Output tokens", "output tokens/s", "tokens/s", ""),
                 ("Attainment", "attainment", "", asked))
             if (row := rows.get(label)) is not None]
    pairs = [("latency", "Latency", "P99", kept), ("TTFT", "TTFT", "P90", ""),
             ("TPOT", "TPOT", "P90", "")]
    for name, label, high, said in pairs if is_service else pairs[:1]:
        one, other = rows.get(f"{label} P50"), rows.get(f"{label} {high}")
        if one is not None and other is not None:
            lines.append((f"{name} P50 / {high}", f"{one.measured} / {other.measured}", "-" if (
                other.predicted == "-") else f"{one.predicted} / {other.predicted}", said))
    if not lines:
        return
    after = metrics.get("is_predicted_for_lengths") is True
    lines.insert(0, ("", "measured", "for these lengths" if after else "predicted", ""))
    if all(line[2] == "-" for line in lines[1:]):
        lines = [(line[0], line[1], "", line[3]) for line in lines]
    for name, measured, predicted, verdict in lines:
        yield f"  {name:<17} {measured:>17} {predicted:>17}  {verdict}".rstrip()
