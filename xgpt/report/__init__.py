"""Screens, pages and tables of plans, runs and sweeps; for xgpt.app, cli and run_folder."""
