"""What made a run longer or shorter than predicted, in words."""

from __future__ import annotations

from xgpt.app.running.metrics import Attribution


def test_each_cause_is_told_by_itself() -> None:
    found = Attribution(predicted_s=10.0, with_lengths_s=11.0, with_times_s=9.9, measured_s=10.1,
                        same_steps=1.0)
    assert found.sentence == ("time of the run against its prediction +1 %: output lengths +10 %, "
                              "step times -10 %, the rest +2 %")
