"""What other numbers of copies of the model come to, for the terminal."""

from xgpt.core.schedule import CopiesTried, Schedule
from xgpt.core.units import format_seconds
from xgpt.report.figures import plain
from xgpt.report.table import table


def copies_table(schedule: Schedule) -> str:
    """A line for each number of copies that was looked at, the chosen one marked; "" where there
    was no choice."""
    if len(schedule.over_copies) < 2:
        return ""
    body = [_row(one, schedule) for one in schedule.over_copies]
    return table(("copies", "of", "queries/s", "at most", "latency", "the best of them"), body,
                 right=(0, 1, 2, 3, 4))


def _row(one: CopiesTried, schedule: Schedule) -> tuple[str, ...]:
    deployment = schedule.deployment
    is_chosen = (one.replicas, one.devices_per_replica) == (
        deployment.replicas, deployment.devices_per_replica)
    known = one.throughput_qps is not None
    return (f"{'* ' if is_chosen else ''}{one.replicas}", f"{one.devices_per_replica}",
            plain(one.throughput_qps) if one.throughput_qps is not None else "-",
            plain(one.bound_qps) if known or one.bound_qps > 0 else "-",
            "-" if one.latency_s is None else format_seconds(one.latency_s), one.words)
