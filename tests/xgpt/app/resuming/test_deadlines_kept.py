"""A run that stops at deadlines: what had not begun is in errors.jsonl, what was done stays, each
line once; the job's start is kept over its commands, and the same command runs what expired."""

import json

import pytest

pytest.importorskip("torch", reason="runs need the extra `run`")

from begun_runs import CONSTRAINT, COUNT, WORKLOAD, lines  # noqa: E402

from xgpt.core.errors import DeadlinePassed, StoppedEarly  # noqa: E402
from xgpt.run_folder.files import START_FILE  # noqa: E402
from xgpt.run_folder.state import run_status  # noqa: E402
from xrunner.files.results import HELD_FILE  # noqa: E402

LATE = {3, 4, 17}


def asked(folder, deadline_of):
    """The requests, each with the deadline that `deadline_of` gives for its number, if any."""
    rows = [json.loads(line) for line in (folder / "requests.jsonl").read_text().splitlines()]
    for number, row in enumerate(rows):
        if (deadline_s := deadline_of(number)) is not None:
            row["deadline_s"] = deadline_s
    (folder / "requests.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def errors(folder):
    path = folder / "out" / "errors.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def began_earlier(folder, seconds):
    """Lets the job's first command have begun so many seconds earlier."""
    path = folder / "out" / START_FILE
    kept = json.loads(path.read_text())
    path.write_text(json.dumps({**kept, "at": kept["at"] - seconds}))


@pytest.fixture
def stops(monkeypatch):
    monkeypatch.setitem(CONSTRAINT, "limits",
                        "constraint: {on_deadline: stop, attainment: 0.001}")


def test_what_expired_is_told_and_run_by_the_same_command(folder, run, stops, capsys):
    asked(folder, lambda number: 1e-6 if number in LATE else 9e6)
    with pytest.raises(DeadlinePassed, match="3 requests had not begun") as passed:
        run()
    assert passed.value.exit_code == 4
    told, out = passed.value.details, folder / "out"
    assert (told["status"], told["queries"], told["expired"]) == ("stopped", COUNT - 3, 3)
    assert told["attainment"]["measured"] == told["attainment"]["predicted"] == (COUNT - 3) / COUNT
    done = lines(out / "results.jsonl")
    assert list(done) == [query for query in range(COUNT) if query not in LATE]
    assert not (out / HELD_FILE).exists()
    assert [(row["line"], row["id"], row["code"]) for row in errors(folder)] == [
        (query + 1, f"q{query}", "expired") for query in sorted(LATE)]
    status = run_status(out)
    assert status.progress.done == COUNT - 3 and "3 requests expired" in status.next_step
    capsys.readouterr()
    metrics = run()
    said = " ".join(capsys.readouterr().err.split())
    assert "3 requests expired at their deadlines: they are run to their end" in said
    final = lines(out / "results.jsonl")
    assert (metrics["queries"], metrics["queries_before"]) == (COUNT, COUNT - 3)
    assert list(final) == list(range(COUNT)) and final.items() >= done.items()
    assert not errors(folder) and not (out / START_FILE).exists()


def test_the_clock_goes_on_over_stopped_runs_and_no_line_is_lost_or_doubled(folder, run, stops):
    out = folder / "out"
    asked(folder, lambda number: 9e6 if number < 20 else 1e-6)
    with pytest.raises(StoppedEarly) as stop:
        run(6)
    assert stop.value.exit_code == 75, "most requests have time, and go on"
    done = lines(out / "results.jsonl") | lines(out / HELD_FILE)
    began_earlier(folder, 1e7)
    with pytest.raises(DeadlinePassed):
        run()
    kept = lines(out / "results.jsonl")
    assert kept.items() == done.items() and list(kept) == sorted(done)
    assert [row["line"] - 1 for row in errors(folder)] == [
        query for query in range(COUNT) if query not in done]
    with pytest.raises(StoppedEarly) as stop:  # now with `finish`, which a stop interrupts
        run(2)
    assert stop.value.exit_code == 75 and not errors(folder)
    metrics = run()
    final = lines(out / "results.jsonl")
    assert list(final) == list(range(COUNT)) and final.items() >= done.items()
    assert metrics["queries"] == COUNT


def test_the_makespan_is_a_deadline_for_all(folder, run, monkeypatch):
    monkeypatch.setitem(CONSTRAINT, "limits",
                        "constraint: {on_deadline: stop, makespan_s: 9e6}")
    monkeypatch.setitem(WORKLOAD, "requests", "requests: {count: 24}, input_tokens: {mean: 5, "
                        "std: 2, max: 9}")
    with pytest.raises(StoppedEarly):
        run(6)
    began_earlier(folder, 1e7)
    with pytest.raises(DeadlinePassed):
        run()
    assert run()["queries"] == COUNT
    assert list(lines(folder / "out" / "results.jsonl")) == list(range(COUNT))
