"""When a device began and ended each step."""

from __future__ import annotations

from itertools import pairwise

from xrunner.engine.step_log import TimedStep, Timeline


class Device:
    """A queue: what is asked for at host second t begins then, or when the one before it is done.
    Its own clock counts milliseconds from some other moment."""

    def __init__(self) -> None:
        self.now_s, self.free_s = 0.0, 0.0

    def work(self, seconds: float) -> None:
        self.free_s = max(self.free_s, self.now_s) + seconds

    def put_event(self) -> Event:
        return Event(self, max(self.free_s, self.now_s))


class Event:
    def __init__(self, device: Device, at_s: float) -> None:
        self._device, self.at_s = device, at_s

    def query(self) -> bool:
        return self._device.now_s >= self.at_s

    def synchronize(self) -> None:
        self._device.now_s = max(self._device.now_s, self.at_s)

    def elapsed_time(self, end_event: Event) -> float:
        assert self.query() and end_event.query()
        return (end_event.at_s - self.at_s) * 1e3


def step(line: Timeline, device: Device, seconds: float) -> TimedStep:
    line.begin()
    device.work(seconds)
    return line.end()


def test_steps_that_wait_for_each_other_follow_on_each_other():
    device = Device()
    line = Timeline(lambda: device.now_s, device.put_event)
    asked = []
    for _ in range(4):
        asked.append(step(line, device, 1.0))
        device.now_s += 0.1  # the host is ahead
    assert not asked[0].is_over()
    times = [worked.times() for worked in asked]
    assert all(abs(end - begin - 1.0) < 1e-9 for begin, end in times)
    assert all(abs(later - end) < 1e-9 for (_, end), (later, _) in pairwise(times))
    assert times[0][0] == 0.0 and device.now_s == times[-1][1]
    assert all(worked.is_over() for worked in asked)


def test_a_step_of_an_idle_device_begins_when_it_is_asked_for():
    device = Device()
    line = Timeline(lambda: device.now_s, device.put_event)
    first = step(line, device, 1.0)
    device.now_s = 5.0
    second = step(line, device, 2.0)
    assert second.times() == (5.0, 7.0) and first.times() == (0.0, 1.0)
    assert second.times() == (5.0, 7.0)  # asked again


def test_without_a_queue_a_step_is_over_when_it_returns():
    now = iter((3.0, 4.5))
    line = Timeline(lambda: next(now))
    line.begin()
    worked = line.end()
    assert worked.is_over() and worked.times() == (3.0, 4.5)
