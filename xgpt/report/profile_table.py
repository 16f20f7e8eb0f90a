"""Formats a Profile for the terminal: its conditions, quality and tables."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from xgpt.core.units import format_bytes, format_seconds
from xgpt.report.table import fact, paragraph, table
from xgpt.report.words import clean, counted
from xprofiler.points import SPREAD_LIMIT, judge, skipped_points
from xprofiler.profile import DISTURBED_LIMIT, STEP_OVERHEAD, Profile, Sample, TableKey
from xprofiler.profile_file import AXES
from xprofiler.profile_timing import learned_factors

MAX_ROWS = 15  # chosen: points shown of a table
_NOISY = "*"
_T = TypeVar("_T")


def profile_tables(profile: Profile) -> str:
    """Text of a profile: facts and quality, then a table per operator, degree and link."""
    head = "\n".join(fact(label, value) for label, value in profile_facts(profile))
    order = {name: place for place, name in enumerate(AXES)}  # operators first, messages after them
    keys = sorted((key for key, points in profile.tables.items() if points),
                  key=lambda key: (order.get(key.name, len(order)), key.tp_degree, key.link))
    tables = [_table_of(profile, key) for key in keys]
    legend = ("time: median of the samples; spread: between its quartiles, over the median "
              f"({_NOISY} over {SPREAD_LIMIT:.0%})")
    return "\n\n".join([head, *tables, paragraph(legend)])


def profile_facts(profile: Profile) -> list[tuple[str, str]]:
    """Pairs (label, text) of everything but the tables."""
    m, peaks = profile.metadata, profile.peaks
    measured = f"in {format_seconds(profile.spent_s)}" if profile.spent_s else ""
    on = ", ".join(part for part in (
        m.date, m.clock, f"commit {m.commit}" if m.commit else "") if part)
    facts = [
        ("model", _model(profile)),
        ("device", f"{m.device}, {m.dtype}"),
        ("ranks", f"{counted(m.ranks, 'rank')} x {counted(m.threads_per_rank, 'thread')}"),
        ("libraries", m.libraries),
        ("kernels", f"{m.kernels}, {m.sampling} sampling, "
                    f"{'padded' if m.is_padded else 'exact'} decode attention"),
        ("origin", " ".join(part for part in (m.origin, measured) if part)),
        ("date", on),
        ("verdict", judge(profile).sentence),
        ("extent", _extent(profile)),
        ("disturbed", _disturbed(profile)),
        *((f"runs, {kind}", words) for kind, words in _learned(profile)),
        ("copies", "" if profile.serial_share is None else
         f"beside computing: {profile.serial_share:.0%} of the shorter one is not hidden"),
        ("degrees", ", ".join(str(d) for d in profile.tp_degrees) or "none"),
        *((f"refused {degree}", reason) for degree, reason in profile.refused.items()),
        ("peaks", "" if peaks is None else
         f"{_rate(peaks.flops_per_s)}FLOP/s, {_rate(peaks.bandwidth_bytes_per_s)}B/s a rank "
         f"({peaks.source})"),
    ]
    return [(label, clean(text)) for label, text in facts if text]


def _extent(profile: Profile) -> str:
    """Words for the points that a quick profile lacks; "" for a complete one."""
    count = sum(len(skipped_points(profile, degree)) for degree in profile.tp_degrees)
    return "" if not count else (
        f"measured briefly, at one job's sizes; {counted(count, 'point')} between them are "
        "missing, which `xgpt profile JOB.yaml` adds")


def _disturbed(profile: Profile) -> str:
    """Words for the tables with points that other programs disturbed; "" for none."""
    by_table = {str(key): [p.missing for p in points if p.is_disturbed]
                for key, points in profile.tables.items()}
    named = [f"{len(shares)} of {name} (up to {max(shares):.0%})"
             for name, shares in by_table.items() if shares]
    return "" if not named else (
        f"other programs used more than {DISTURBED_LIMIT:.0%} of the machine: "
        + ", ".join(named) + "; measured again by the next run")


def _learned(profile: Profile) -> list[tuple[str, str]]:
    """Pairs (kind of step, words) for the measured times of later runs against the profile's."""
    return [(kind, f"x {factor.factor:.3f} at about {factor.rows:.0f} rows; " + ", ".join(
        f"{own.date} x {own.factor:.3f} (quartiles {own.spread:.0%} apart, {own.steps:,} steps)"
        for own in profile.learned if own.kind == kind))
        for kind, factor in learned_factors(profile).items()]


def _spread_out(items: Sequence[_T], most: int) -> list[_T]:
    """At most `most` of `items`: the first, the last, and others evenly between."""
    if len(items) <= most:
        return list(items)
    return [items[place] for place in
            sorted({round(i * (len(items) - 1) / (most - 1)) for i in range(most)})]


def title_of(key: TableKey) -> str:
    """Title of a table: the operator or message in words, its link, its degree if it matters."""
    degree = "" if key.name == STEP_OVERHEAD or (key.link and key.tp_degree == 1) else (
        f", degree {key.tp_degree}")
    return clean(key.name.replace("_", " ") + (f" over {key.link}" if key.link else "") + degree)


def _table_of(profile: Profile, key: TableKey) -> str:
    points = sorted(profile.tables[key], key=lambda p: (p.y, p.x))
    if key.name == STEP_OVERHEAD:
        return paragraph(f"{title_of(key)}: {format_seconds(points[0].median_s)} per "
                         f"micro-batch and stage, spread {_spread(points[0])}")
    shown, (x, y) = _spread_out(points, MAX_ROWS), AXES[key.name]
    is_2d = any(p.y for p in points)
    title = f"{title_of(key)}: x = {x}" + (f", y = {y}" if is_2d else "")
    if len(shown) < len(points):
        left_out = [p for p in points if p not in shown]
        noisy = sum(map(_is_noisy, left_out))
        title += f" ({len(shown)} of {counted(len(points), 'point')}"
        title += f", {noisy} of the others noisy)" if noisy else ")"
    return f"{paragraph(title)}\n{_rows(shown, x, is_2d)}"


def _rows(points: Sequence[Sample], x: str, is_2d: bool) -> str:
    """Rows with the columns y, x, time, spread and, for messages, GB/s."""
    columns: list[tuple[str, Callable[[Sample], str]]] = [("y", lambda p: _count(p.y))] * is_2d
    columns += [("bytes", lambda p: format_bytes(p.x)) if x == "bytes" else
                ("x", lambda p: _count(p.x)),
                ("time", lambda p: format_seconds(p.median_s)), ("spread ", _spread)]
    if x == "bytes":
        columns.append(("GB/s", lambda p: f"{p.x / p.median_s / 1e9:.3g}" if p.median_s else "-"))
    names = [name for name, _ in columns]
    return table(names, [[cell(point) for _, cell in columns] for point in points],
                 right=range(len(names)))


def _spread(point: Sample) -> str:
    return f"{point.spread:.1%}{_NOISY if _is_noisy(point) else ' '}"


def _is_noisy(point: Sample) -> bool:
    return point.spread > SPREAD_LIMIT


def _model(profile: Profile) -> str:
    m, model = profile.metadata, profile.model
    if model is None:
        return f"{m.model or 'not named'} (shape {m.model_shape})"
    layers = (f"{model.num_encoder_layers} encoder and {model.num_layers} decoder layers"
              if model.is_encoder_decoder else counted(model.num_layers, "layer"))
    return (f"{m.model or model.name} ({model.family}, {layers}, hidden size "
            f"{model.hidden_size:,}, {counted(model.num_heads, 'head')} of {model.head_dim}, "
            f"{model.kv_heads} of keys and values)")


def _count(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:,.4g}"


def _rate(per_s: float) -> str:
    """1.2e12 -> '1.2 T'."""
    for scale, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if per_s >= scale:
            return f"{per_s / scale:.3g} {prefix}"
    return f"{per_s:.3g} "
