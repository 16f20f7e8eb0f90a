"""The section `schedule` of a job file: control variables that the user fixes, and how requests are
adjusted, admitted and forecast."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, make_dataclass, replace
from functools import cache
from typing import Annotated, Any

from pydantic import Field

from xgpt.core.controls import (
    ADMISSION_RULES,
    ARRIVAL_ROUTINGS,
    AT_CAPS,
    CAP,
    CLASS,
    FORECAST_KINDS,
    FORECAST_VALUES,
    FORECASTS_GROUP,
    LEAST_QUERIES,
    LEAST_TOKENS,
    ORDERS,
    ROUTINGS,
    SHARING_ORDERS,
    Adjustment,
    Admission,
    AdmissionRule,
    FixedSchedule,
    Forecasting,
    ForecastValue,
)
from xgpt.core.engines import OWN_ENGINE, SHARING_ENGINES, rows_of_others
from xgpt.core.errors import nearest
from xgpt.core.lengths import MAX_LENGTH_TOKENS
from xgpt.core.model import ModelSpec
from xgpt.core.placement import AskedPlacement
from xgpt.core.policies import (
    Policy,
    able_policies,
    policies,
    policy,
    policy_names,
    searched_policies,
)
from xgpt.core.systems import STATIC
from xgpt.core.units import parse_count, parse_share
from xgpt.job import batches_section, placement_section
from xgpt.job.job import Job
from xgpt.job.typed import (
    CONFIG,
    Flag,
    Of,
    OrMapping,
    Reading,
    amount,
    choice,
    is_one_of,
    number,
    read,
    that,
    whole,
)

# Limits of control variables: no device holds more, and each micro-batch is a step of its own in
# every estimate.
MOST, MOST_PARTS = 1_000_000, 4096  # chosen
AUTO, OFF = "auto", "off"
_PARTS = ("decode_micro_batches", "encode_micro_batches")
_OF_ADJUSTMENT = {"steer", "adjustment", "routing", "shuffle", "order", "window", "admission",
                  "forecast", "batches", "system", "prefixes", "placement"}
WHOLE_JOB = "job"
SPLIT_KEYS = ("ep_degree", "attention_dp")  # how a mixture's layer is divided in a group
_RULES = (AUTO, *ADMISSION_RULES)


def _forecast_kinds() -> tuple[str, ...]:
    return (*FORECAST_KINDS, *rows_of_others(FORECASTS_GROUP))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Forecast:
    """Keys of `schedule.forecast`."""

    kind: Annotated[str, choice(_forecast_kinds)]
    bins: Annotated[int, whole(1, MOST_PARTS)] = AT_CAPS.bins
    width: Annotated[int, whole(1, MAX_LENGTH_TOKENS)] = AT_CAPS.width
    accuracy: Annotated[float, number("above 0 and at most 1", gt=0, le=1)] = AT_CAPS.accuracy
    use: Annotated[ForecastValue, choice(FORECAST_VALUES)] = AT_CAPS.use


@dataclass(frozen=True, slots=True, kw_only=True)
class _Admission:
    """Keys of `schedule.admission`."""

    rule: Annotated[AdmissionRule, choice(ADMISSION_RULES)]
    after_free: Flag = False


def section_kind() -> Any:
    """A dataclass of the keys of the section `schedule`: control variables of every policy, also of
    other packages, and the workload adjustment."""
    return _kind_for(policies())


@cache
def _kind_for(rows: tuple[Policy, ...]) -> Any:
    variables = {one.name: whole(one.least, MOST_PARTS if one.name in _PARTS else MOST)
                 for row in rows for one in row.variables}
    names = [row.name for row in rows]
    return make_dataclass("ScheduleSection", [
        ("policies", Annotated[tuple[str, ...], Field(alias="policy"), Of(_policies, anyOf=[
            {"enum": [AUTO, *names]},
            {"type": "array", "minItems": 1, "items": {"enum": names}}])], ()),
        # None: the best number
        ("replicas", Annotated[int | None, that(
            lambda value: value == AUTO or (
                is_one_of(parse_count(value), int) and 1 <= parse_count(value) <= MOST_PARTS),
            f"auto, or a whole number of replicas from 1 to {MOST_PARTS}",
            lambda value: None if value == AUTO else parse_count(value))], None),
        ("tp_degree", Annotated[int, whole(1, MOST_PARTS)] | None, None),
        ("tp_gpus", Annotated[int, whole(0, MOST)] | None, None),  # 0: no groups
        *((key, Annotated[int, whole(1, MOST_PARTS)] | None, None) for key in SPLIT_KEYS),
        *((name, Annotated[int, range_] | None, None) for name, range_ in variables.items()),
        ("steer", Flag | None, None),
        ("adjustment", Annotated[float | None, amount(
            parse_share, lambda x: 0 <= x < 1,
            "a share of an encode batch's mean input tokens, '10%' or 0.1; 0 for none")], None),
        ("routing", Annotated[str | None, choice(ARRIVAL_ROUTINGS)], None),
        ("order", Annotated[str, choice((AUTO, *ORDERS))], AUTO),
        ("window", Annotated[int | None, that(
            lambda value: value == WHOLE_JOB or (
                is_one_of(parse_count(value), int) and 1 <= parse_count(value) <= MOST),
            f"{WHOLE_JOB}, or the requests of a window, 1 to {MOST}",
            lambda value: 0 if value == WHOLE_JOB else parse_count(value))], None),
        ("shuffle", Annotated[bool | int | None, that(
            lambda value: isinstance(value, bool) or (
                isinstance(value, int) and 2 <= value <= MOST),
            f"true, false, or the requests of a window, 2 to {MOST}")], None),
        ("admission", Annotated[Any, OrMapping(
            _Admission, choice(_RULES), f"{', '.join(_RULES)}, or a mapping")], AUTO),
        ("forecast", Annotated[Any, OrMapping(
            _Forecast, choice(_forecast_kinds), lambda: f"{', '.join(_forecast_kinds())}, or a "
            "mapping")], CAP),
        ("prefixes", Annotated[str, that(
            lambda value: value in (AUTO, OFF), f"{AUTO} or {OFF}", enum=[AUTO, OFF])], AUTO),
        *batches_section.FIELDS,
        *placement_section.FIELDS,
    ], frozen=True, kw_only=True, namespace={"__pydantic_config__": CONFIG})


def _policies(value: Any) -> tuple[str, ...]:
    """The policy names given, each once; () if the choice is left open. Raises ValueError."""
    names = policy_names()
    if value == AUTO:
        return ()
    given = value if isinstance(value, list) else [value]
    wrong = [one for one in given if not isinstance(one, str) or one not in names]
    if given and not wrong:
        return tuple(dict.fromkeys(given))
    shown = wrong[0] if wrong and isinstance(wrong[0], str) else ""
    which = f", where {shown!r} is none" if shown.isidentifier() else ""
    raise ValueError(nearest(shown, (AUTO, *names)).replace("known:", "allowed:") + (
        f", or several of these in a list{which}" if isinstance(value, list) else ""))


def schedule_of(reading: Reading, elsewhere: Callable[[], Mapping[str, str]]) -> tuple[
        FixedSchedule, Adjustment]:
    """The control variables that the section `schedule` fixes, and its workload adjustment.
    `elsewhere`: as for xgpt.job.typed.read."""
    node, arrive = reading.at("schedule"), reading.has("workload.arrivals")
    # arriving requests run in this order, and share no prefixes
    kept: dict[str, Any] = {"order": "input", "prefixes": OFF} if arrive else {}
    routing = LEAST_QUERIES if arrive else LEAST_TOKENS
    if node is None or not isinstance(node.value, dict):
        return FixedSchedule(), Adjustment(routing=routing, **kept)
    own = read(section_kind(), node, "schedule.", reading.mistakes, elsewhere)
    names = {field.name for field in fields(FixedSchedule)} - {"others", "placement"}
    schedule = FixedSchedule(
        **{name: getattr(own, name) for name in names},
        placement=own.placement and AskedPlacement(**vars(own.placement)),
        others=tuple((name, value) for name, value in vars(own).items() if value is not None
                     and name not in names | _OF_ADJUSTMENT))
    batches = batches_section.batches_of(reading, own)
    if own.system is not None:
        schedule = replace(schedule, policies=(STATIC,))
    degree, gpus = schedule.tp_degree, schedule.tp_gpus
    if degree is not None and gpus is not None and gpus % degree:
        reading.reject("schedule.tp_gpus", f"must be a multiple of tp_degree = {degree}")
    for key in SPLIT_KEYS:
        if (parts := getattr(schedule, key)) is not None and degree is not None and degree % parts:
            reading.reject(f"schedule.{key}", f"must be a divisor of tp_degree = {degree}")
    rows = _check_controls(reading, schedule)
    for key in ("adjustment", "steer"):
        if reading.has(f"schedule.{key}") and not any(row.has_even_batches for row in rows):
            even = [each.name for each in policies() if each.has_even_batches]
            reading.reject(f"schedule.{key}", f"of {', '.join(even)} alone")
    if own.steer and own.adjustment == 0:
        reading.reject("schedule.steer", "needs an adjustment above 0")
    admission = _admission_of(own, reading, rows)
    if not arrive and own.routing not in (None, *ROUTINGS):
        reading.reject("schedule.routing", f"{', '.join(ROUTINGS)} in a batch job; "
                       f"{own.routing} needs workload.arrivals")
    return _with_evicting(reading, schedule, rows, admission), Adjustment(
        share=own.adjustment, steers=own.steer, routing=own.routing or routing,
        admission=admission, batches=batches,
        **{"prefixes": own.prefixes, **_order_of(reading, own), **kept})


def _admission_of(own: Any, reading: Reading, rows: Sequence[Policy]) -> Admission:
    """How requests are admitted and forecast. `own`: the section, as read. `rows`: the policies to
    choose from, of which one may ask for a kind of forecast."""
    rule = own.admission.rule if isinstance(own.admission, _Admission) else own.admission
    after_free = isinstance(own.admission, _Admission) and own.admission.after_free
    if after_free and rule != "reserve-dynamic":
        reading.reject("schedule.admission.after_free", "of `rule: reserve-dynamic` alone")
    asked = own.forecast if isinstance(own.forecast, _Forecast) else _Forecast(kind=own.forecast)
    for key in ("width", "accuracy"):
        if reading.has(f"schedule.forecast.{key}") and asked.kind != CLASS:
            reading.reject(f"schedule.forecast.{key}", f"of `kind: {CLASS}` alone")
    engine = reading.at("run.engine")
    for key, value, usual in (("admission", rule, AUTO), ("forecast", asked.kind, CAP)):
        if engine is not None and engine.value != OWN_ENGINE and value != usual:
            reading.reject(f"schedule.{key}", f"{usual} (or left out) with run.engine "
                           f"{engine.value}: that engine admits requests itself, and evicts none")
    if not reading.has("schedule.forecast"):
        asked = replace(asked, kind=next(
            (row.forecast for row in rows if row.forecast != CAP), CAP))
    return Admission(rule=None if rule == AUTO else rule, forecast=Forecasting(**asdict(asked)),
                     after_free=after_free)


def _with_evicting(reading: Reading, schedule: FixedSchedule, rows: Sequence[Policy],
                   admission: Admission) -> FixedSchedule:
    """`schedule` without the policies that cannot evict, if the job leaves the policy open and
    requests may outgrow what `admission` takes. `rows`: the policies that have its variables."""
    if admission.rule is None:
        return schedule
    able = [row for row in rows if row.admits]
    if not able:
        reading.reject("schedule.admission", f"{AUTO} (or left out) with "
                       f"{', '.join(row.name for row in rows)}: batches of a fixed size")
    # those of two pools cannot: a request that was handed over is not encoded again
    fixed = [row.name for row in able if len(row.pools) > 1 and admission.may_overflow]
    if fixed and schedule.policies:
        reading.reject("schedule.admission", f"reserve, or future-peak with `forecast: {CAP}`, "
                       f"with {', '.join(fixed)}: no request can be evicted there")
    return replace(schedule, policies=tuple(
        row.name for row in rows if row.name not in fixed)) if fixed else schedule


def _order_of(reading: Reading, own: Any) -> dict[str, Any]:
    """The order of requests and its window; `shuffle` is another name of `order: random`."""
    if own.shuffle is None:
        if own.order == "input" and own.window is not None:
            reading.reject("schedule.window", "only with an order other than `input`")
        return {"order": own.order, "window": own.window}
    for key in ("order", "window"):
        if reading.has(f"schedule.{key}"):
            reading.reject(f"schedule.{key}", "left out beside `shuffle`")
    return {"order": "random" if own.shuffle else "input",
            "window": None if isinstance(own.shuffle, bool) else own.shuffle}


def wrong_split(schedule: FixedSchedule, model: ModelSpec) -> Iterator[tuple[str, str]]:
    """Yields (key, what is allowed) for each way to divide a layer that the model has not."""
    experts = model.decoder.experts
    for key in SPLIT_KEYS:
        parts = getattr(schedule, key) or 1
        if parts > 1 and experts is None:
            yield key, (f"1 (or left out) for {model.name}, which is no mixture of experts: "
                        "schedule.replicas divides requests")
        elif key == "ep_degree" and experts is not None and experts.count % parts:
            yield key, f"a divisor of the {experts.count} experts of {model.name}"


def check_sharing(job: Job, reading: Reading) -> None:
    """Records what keeps an order by shared prefixes from sharing any."""
    order, rows = job.adjustment.order, able_policies(job.schedule)
    if order not in SHARING_ORDERS:
        return
    for is_so, what in (
            (job.adjustment.prefixes == OFF, f"schedule.prefixes: {OFF}"),
            (rows and not any(row.shares_prefixes for row in rows),
             " or ".join(row.name for row in rows)),
            (job.run.engine not in SHARING_ENGINES, f"run.engine: {job.run.engine}"),
            (job.run.kv_layout == "rows", "run.kv_layout: rows")):
        if is_so:
            reading.reject("schedule.order", f"another than {order} with {what}: no prefix is "
                           "shared there")


def _check_controls(reading: Reading, schedule: FixedSchedule) -> tuple[Policy, ...]:
    """The policies (of those named, or else searched) that have every variable given. If none has,
    each variable that the nearest one lacks is recorded as a mistake."""
    wanted = [policy(name) for name in schedule.policies or searched_policies()]
    rows = able_policies(schedule)
    given = [name for name in sorted({name for row in policies() for name in row.variable_names})
             if schedule.value_of(name) is not None]
    if not rows:
        nearest_row = max(wanted, key=lambda row: len({*given} & {*row.variable_names}))
        for name in [name for name in given if name not in nearest_row.variable_names]:
            others = [each.name for each in policies() if name in each.variable_names]
            reading.reject(f"schedule.{name}", f"a variable of {', '.join(others)}; "
                           f"{nearest_row.name} has {', '.join(nearest_row.variable_names)}")
    parts, groups = schedule.encode_micro_batches, schedule.decode_micro_batches
    if rows and parts and groups and parts % groups:
        reading.reject("schedule.encode_micro_batches",
                       f"must be a multiple of decode_micro_batches = {groups}")
    return rows or tuple(wanted)
