"""The section `schedule` of a job file: control variables that the user fixed, and adjustment."""

from collections.abc import Sequence
from dataclasses import fields

from xgpt.core.errors import nearest
from xgpt.core.job import LEAST_TOKENS, ROUTINGS, Adjustment, FixedSchedule
from xgpt.core.policies import (
    Policy,
    able_policies,
    policies,
    policy,
    policy_names,
    searched_policies,
)
from xgpt.core.sections import Section, is_one_of
from xgpt.core.units import parse_share

# More no device holds; and each part of a batch is a step of its own in every estimate.
MOST, MOST_PARTS = 1_000_000, 4096
AUTO = "auto"
_MAY_BE_0 = ("tp_gpus", "encode_chunk")  # no groups; no limit


def read_schedule(top: Section) -> tuple[FixedSchedule, Adjustment]:
    field = top.get("schedule")
    if field is None or field.value == AUTO:
        return FixedSchedule(), Adjustment()
    section = top.section("schedule", "auto, or a mapping of control variables")
    if section is None:
        return FixedSchedule(), Adjustment()
    schedule = FixedSchedule(
        policies=_read_policies(section), replicas=_read_replicas(section),
        **{name: section.integer(name, None, int(name not in _MAY_BE_0), most) for name, most in (
            ("encode_batch", MOST), ("decode_iterations", MOST), ("max_active", MOST),
            ("decode_micro_batches", MOST_PARTS), ("encode_micro_batches", MOST_PARTS),
            ("encode_chunk", MOST), ("token_budget", MOST), ("tp_degree", MOST_PARTS),
            ("tp_gpus", MOST))},
        others=_read_others(section))
    degree, gpus = schedule.tp_degree, schedule.tp_gpus
    if degree is not None and gpus is not None and gpus % degree:
        section.reject("tp_gpus", f"must be a multiple of tp_degree = {degree}")
    rows = _check_controls(section, schedule)
    adjustment = _read_adjustment(section, rows)
    section.finish()
    return schedule, adjustment


def _read_replicas(section: Section) -> int | None:
    """Copies of the model; None for as many as are best."""
    field = section.get("replicas")
    if field is None or field.value == "auto":
        return None
    return section.read(
        "replicas", None, lambda value: value if is_one_of(value, int) and 1 <= value <= MOST_PARTS
        else None, f"auto, or a whole number of copies from 1 to {MOST_PARTS}")


def _read_policies(section: Section) -> tuple[str, ...]:
    """The names given, each once; () where the choice is left open."""
    field, names = section.get("policy"), policy_names()
    if field is None or not isinstance(field.value, list):
        name = section.choice("policy", AUTO, (AUTO, *names))
        return () if name == AUTO else (name,)
    given = [each.value for each in field.value]
    known = [name for name in given if isinstance(name, str) and name in names]
    if given and known == given:
        return tuple(dict.fromkeys(known))
    wrong = next((name for name in given if name not in known), None)
    shown = wrong if isinstance(wrong, str) else ""
    which = f", where {shown!r} is none" if shown.isidentifier() else ""
    section.reject("policy", f"{nearest(shown, (AUTO, *names))}, or several of these in a list"
                             f"{which}".replace("known:", "allowed:"))
    return ()


def _read_others(section: Section) -> tuple[tuple[str, int], ...]:
    """Control variables that only policies of other packages have."""
    own = {field.name for field in fields(FixedSchedule)}
    least = {variable.name: variable.least for row in policies() for variable in row.variables
             if variable.name not in own}
    values = [(name, section.integer(name, None, minimum, MOST)) for name, minimum in least.items()]
    return tuple((name, value) for name, value in values if value is not None)


def _read_adjustment(section: Section, rows: Sequence[Policy]) -> Adjustment:
    steers = section.flag("steer", False) if section.has("steer") else None
    share = section.amount("adjustment", None, parse_share, lambda x: 0 <= x < 1,
                           "a share of an encode batch's mean input tokens, '10%' or 0.1; 0 for "
                           "none")
    for key in ("adjustment", "steer"):
        if section.has(key) and not any(row.has_even_batches for row in rows):
            even = [each.name for each in policies() if each.has_even_batches]
            section.reject(key, f"of {', '.join(even)} alone")
    if steers and share == 0:
        section.reject("steer", "needs an adjustment above 0")
    routing = section.choice("routing", LEAST_TOKENS, ROUTINGS)
    field = section.get("shuffle")
    shuffle = field is not None and field.value
    if isinstance(shuffle, bool) or (isinstance(shuffle, int) and 2 <= shuffle <= MOST):
        return Adjustment(share=share, steers=steers, shuffle=shuffle, routing=routing)
    section.reject_type("shuffle", f"true, false, or the queries of a window, 2 to {MOST}")
    return Adjustment()


def _check_controls(section: Section, schedule: FixedSchedule) -> tuple[Policy, ...]:
    """The policies that are left, of those that the job names or that a search looks at: the ones
    that have every variable given. Where none has, each variable that the nearest lacks is a
    mistake."""
    wanted = [policy(name) for name in schedule.policies or searched_policies()]
    rows = able_policies(schedule)
    given = [name for name in sorted({name for row in policies() for name in row.variable_names})
             if schedule.value_of(name) is not None]
    if not rows:
        nearest_row = max(wanted, key=lambda row: len({*given} & {*row.variable_names}))
        for name in [name for name in given if name not in nearest_row.variable_names]:
            others = [each.name for each in policies() if name in each.variable_names]
            section.reject(name, f"a variable of {', '.join(others)}; {nearest_row.name} has "
                                 f"{', '.join(nearest_row.variable_names)}")
    parts, groups = schedule.encode_micro_batches, schedule.decode_micro_batches
    if rows and parts and groups and parts % groups:
        section.reject("encode_micro_batches",
                       f"must be a multiple of decode_micro_batches = {groups}")
    return rows or tuple(wanted)
