"""How many threads a rank computes with while others take its cores."""

import pytest

from xrunner.rank.threads import HOLD_S, LOOK_S, Threads, WaitedForCores, threads_of


class Machine:
    """A clock, and threads that wait for a core where more of them are at work than it has."""

    def __init__(self, cores: int) -> None:
        self.cores, self.now_s, self.waited_s = cores, 0.0, 0.0
        self.applied: list[int] = []
        self.threads: Threads | None = None

    def start(self, most: int) -> Threads:
        self.threads = Threads(most, waited_s=lambda: self.waited_s, apply=self.applied.append,
                               clock=lambda: self.now_s)
        return self.threads

    def work(self, looks: int) -> None:
        for _ in range(looks):
            self.now_s += LOOK_S
            if self.threads.count > self.cores:
                self.waited_s += 0.5 * LOOK_S * (self.threads.count - self.cores)
            self.threads.look()


@pytest.mark.parametrize(("most", "cores"), [(4, 4), (1, 0)])
def test_nothing_changes_while_nobody_disturbs_or_there_is_one_thread(most, cores):
    machine = Machine(cores)
    machine.start(most)
    machine.work(200)
    assert machine.applied == []


def test_a_taken_core_costs_a_thread_and_comes_back():
    machine = Machine(cores=4)
    threads = machine.start(4)
    machine.cores = 3
    machine.work(2)
    assert machine.applied == [3], "two looks, one after the other"
    machine.cores = 4
    machine.work(int(HOLD_S / LOOK_S) + 2)
    assert machine.applied == [3, 4] and threads.count == 4
    machine.cores = 0  # several are taken, and never all
    machine.work(8)
    assert machine.applied == [3, 4, 3, 2, 1] and threads.count == 1


def test_tries_in_vain_become_seldom():
    machine = Machine(cores=3)
    machine.start(4)
    machine.work(int(60 / LOOK_S))
    assert machine.applied[:4] == [3, 4, 3, 4]
    assert machine.applied.count(4) <= 6, "after 2, 4, 8, 16, 32 s"
    machine.cores = 4
    machine.work(int(40 / LOOK_S))
    assert machine.applied[-1] == 4


def test_one_interval_of_waiting_is_none():
    machine = Machine(cores=2)
    machine.start(2)
    for machine.cores in 20 * [1, 2]:
        machine.work(1)
    assert machine.applied == []


def test_answers_in_float32_do_not_depend_on_what_else_the_machine_does():
    assert threads_of("cpu", "float32", 4) is None, "another number adds up in another order"
    assert threads_of("cpu", "bfloat16", 4, is_deterministic=True) is None
    assert threads_of("gpu", "bfloat16", 4) is None
    found = threads_of("cpu", "bfloat16", 4)
    assert found is not None and found.most == 4


def test_what_the_system_counts(tmp_path, monkeypatch):
    interrupted = [0]
    monkeypatch.setattr("xrunner.rank.threads._interrupted", lambda: interrupted[0])

    def counts(thread: str, text: str | None, *, is_interrupted: bool = True) -> None:
        (tmp_path / thread).mkdir(exist_ok=True)
        if text is not None:
            (tmp_path / thread / "schedstat").write_text(text)
        interrupted[0] += 10**9 * is_interrupted

    counts("7", "100 2000000000 5\n", is_interrupted=False)
    waited = WaitedForCores(tmp_path)
    assert waited() == 0.0, "what it waited before is not counted"
    counts("7", "100 3000000000 5\n", is_interrupted=False)
    assert waited() == 0.0, "not asked where no thread was interrupted"
    counts("7", None)
    assert waited() == pytest.approx(1.0)
    counts("8", "0 9000000000 0\n")
    assert waited() == pytest.approx(1.0), "a new thread has waited since it began"
    counts("9", None)
    assert waited() >= 1.0, "a thread that has ended"


def test_a_system_that_counts_nothing(tmp_path):
    assert WaitedForCores(tmp_path / "none")() == 0.0
