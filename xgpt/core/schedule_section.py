"""The section `schedule` of a job file: control variables that the user fixed, and adjustment."""

from dataclasses import fields

from xgpt.core.job import Adjustment, FixedSchedule
from xgpt.core.policies import Policy, policies, policy, policy_names, searched_policies
from xgpt.core.sections import Section, is_one_of
from xgpt.core.units import parse_share

# More no device holds; and each part of a batch is a step of its own in every estimate.
MOST, MOST_PARTS = 1_000_000, 4096


def read_schedule(top: Section) -> tuple[FixedSchedule, Adjustment]:
    field = top.get("schedule")
    if field is None or field.value == "auto":
        return FixedSchedule(), Adjustment()
    section = top.section("schedule", "auto, or a mapping of control variables")
    if section is None:
        return FixedSchedule(), Adjustment()
    schedule = FixedSchedule(
        policy=section.choice("policy", None, policy_names()), replicas=_read_replicas(section),
        **{name: section.integer(name, None, int(name != "tp_gpus"), most) for name, most in (
            ("encode_batch", MOST), ("decode_iterations", MOST), ("max_active", MOST),
            ("decode_micro_batches", MOST_PARTS), ("encode_micro_batches", MOST_PARTS),
            ("token_budget", MOST), ("tp_degree", MOST_PARTS), ("tp_gpus", MOST))},
        others=_read_others(section))
    degree, gpus = schedule.tp_degree, schedule.tp_gpus
    if degree is not None and gpus is not None and gpus % degree:
        section.reject("tp_gpus", f"must be a multiple of tp_degree = {degree}")
    # the one searched first stands for all those that a search looks at: it has their variables
    row = policy(schedule.policy or searched_policies()[0])
    _check_controls(section, schedule, row)
    adjustment = _read_adjustment(section, row)
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


def _read_others(section: Section) -> tuple[tuple[str, int], ...]:
    """Control variables that only policies of other packages have."""
    own = {field.name for field in fields(FixedSchedule)}
    least = {variable.name: variable.least for row in policies() for variable in row.variables
             if variable.name not in own}
    values = [(name, section.integer(name, None, minimum, MOST)) for name, minimum in least.items()]
    return tuple((name, value) for name, value in values if value is not None)


def _read_adjustment(section: Section, row: Policy) -> Adjustment:
    steers = section.flag("steer", False) if section.has("steer") else None
    share = section.amount("adjustment", None, parse_share, lambda x: 0 <= x < 1,
                           "a share of an encode batch's mean input tokens, '10%' or 0.1; 0 for "
                           "none")
    for key in ("adjustment", "steer"):
        if section.has(key) and not row.has_even_batches:
            even = [each.name for each in policies() if each.has_even_batches]
            section.reject(key, f"of {', '.join(even)} alone")
    if steers and share == 0:
        section.reject("steer", "needs an adjustment above 0")
    field = section.get("shuffle")
    shuffle = field is not None and field.value
    if isinstance(shuffle, bool) or (isinstance(shuffle, int) and 2 <= shuffle <= MOST):
        return Adjustment(share=share, steers=steers, shuffle=shuffle)
    section.reject_type("shuffle", f"true, false, or the queries of a window, 2 to {MOST}")
    return Adjustment()


def _check_controls(section: Section, schedule: FixedSchedule, row: Policy) -> None:
    """Every variable given is one of the policy's."""
    own = row.variable_names
    for name in sorted({name for each in policies() for name in each.variable_names} - {*own}):
        if schedule.value_of(name) is not None:
            others = [each.name for each in policies() if name in each.variable_names]
            section.reject(
                name, f"a variable of {', '.join(others)}; {row.name} has {', '.join(own)}")
    parts, groups = schedule.encode_micro_batches, schedule.decode_micro_batches
    if "encode_micro_batches" in own and parts and groups and parts % groups:
        section.reject("encode_micro_batches",
                       f"must be a multiple of decode_micro_batches = {groups}")
