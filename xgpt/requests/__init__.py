"""Reads and spools requests; for xgpt.job, simulator, runner, report and app."""
