"""Files and state of a run's output folder; for xgpt.app and xgpt.cli."""
