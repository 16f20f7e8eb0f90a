"""Words and tables for a schedule whose bytes lie partly below its devices."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from xgpt.core.placement import Placement, StepTerms
from xgpt.core.problem import Problem
from xgpt.core.schedule import Schedule
from xgpt.core.units import format_bytes, format_seconds
from xgpt.report.figures import percent, plain
from xgpt.report.output import number, text_at
from xgpt.report.table import table

_ON = ("the device", "the host", "disk")
_COPIES = ("up", "down", "read", "write")


def placement_facts(schedule: Schedule, problem: Problem) -> Iterator[tuple[str, str]]:
    """Pairs (label, text): what does not fit, where it lies, how a block is worked, and limits;
    nothing of a schedule without a placement."""
    placed, own = schedule.placed, schedule.deployment.decoding.placement
    if placed is None or own is None:
        return
    usable = format_bytes(schedule.figures.memory_capacity_bytes)
    needs = (f"{problem.model.name} needs {format_bytes(placed.needed_bytes)} on its fullest "
             f"device, of which {usable} can be used: " if placed.needed_bytes else
             f"{usable} of the fullest device can be used: ")
    yield "memory", (f"{needs}its weights lie {_where(own.weights)}, its KV cache "
                     f"{_where(own.kv)}, its hidden states {_where(own.hidden)}")
    yield "block", block_words(own, placed.block)
    diagonal = f"; diagonal blocks, not executed, would have {placed.diagonal_block:,} requests"
    yield "limits", (
        f"{plain(placed.any_order_qps)} requests/s in any order of work, "
        f"{plain(placed.program_qps)} by the linear program of {placed.tried:,} blocks"
        f"{diagonal * bool(placed.diagonal_block)}")


def block_words(placement: Placement, requests: int) -> str:
    """`128 requests in device batches of 64, zig-zag; ...`."""
    order = "zig-zag" if placement.order == "zigzag" else "row by row"
    words = [f"{requests:,} requests in device batches of {placement.device_batch:,}, {order}"]
    words += [f"{what} in 4 bits below the device" for what, bits in (
        ("weights", placement.weight_bits), ("KV cache", placement.kv_bits)) if bits == 4]
    if placement.host_attention:
        words.append("decode attention on the host")
    return ", ".join(words + ["copies not beside computing"] * (not placement.overlap))


def _where(shares: tuple[float, float, float]) -> str:
    """`20 % on the device, 80 % on the host`."""
    whole = [name for share, name in zip(shares, _ON, strict=True) if share == 1]
    return f"on {whole[0]}" if whole else " and ".join(
        f"{percent(share, 0)} on {name}" for share, name in zip(shares, _ON, strict=True) if share)


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
        table(("step", *_COPIES, "compute", "in all", "longest"), steps, right=range(1, 7))))


def _step_rows(step: StepTerms) -> Iterator[tuple[str, ...]]:
    """A row of seconds, and one of bytes."""
    yield (step.kind, *(_seconds(getattr(step, f"{term}_s")) for term in (*_COPIES, "compute")),
           _seconds(step.seconds), step.binds)
    yield ("", *(format_bytes(held) if (held := getattr(step, f"{term}_bytes")) else "-"
                 for term in _COPIES), "", "", "")


def _seconds(seconds: float) -> str:
    return format_seconds(seconds) if seconds else "-"


def offload_rows(metrics: Mapping[str, Any]) -> list[dict[str, str]]:
    """Cells of each term of a run below its devices, by column; empty for a run in memory. A cell
    of two figures is measured / predicted."""
    def pair(row: Mapping[str, Any], unit: str, words: Callable[[float], str]) -> str:
        found = [number(row, f"{of}_{unit}") for of in ("measured", "predicted")]
        return " / ".join(words(one) for one in found if one is not None) if any(found) else "-"

    offload = metrics.get("offload")
    terms = offload.get("terms") if isinstance(offload, Mapping) else None
    return [{"term": text_at(row, "term") or "", "time": pair(row, "s", format_seconds),
             "bytes": pair(row, "bytes", format_bytes)}
            for row in terms or () if isinstance(row, Mapping)]


def offload_words(metrics: Mapping[str, Any]) -> str:
    """`up 3.2 s, read 8.1 s / 7.9 s, ...; peaks ...`; "" for a run in memory."""
    rows = offload_rows(metrics)
    if not rows:
        return ""
    tiers = [f"{row['tier']} {format_bytes(row['peak_bytes'])} of "
             f"{format_bytes(row['planned_bytes'])}" for row in metrics["offload"]["tiers"]
             if row["planned_bytes"]]
    return "; ".join((", ".join(f"{row['term']} {row['time']}" for row in rows
                                if row["time"] != "-") + " (measured / predicted)",
                      f"peaks: {', '.join(tiers)}", metrics["offload"]["io"]))
