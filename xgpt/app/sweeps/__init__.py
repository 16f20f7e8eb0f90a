"""Plans and runs the points of a sweep; for xgpt.app and xgpt.cli."""
