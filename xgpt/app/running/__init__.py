"""Runs a plan: prepares, starts, follows and closes its ranks; for xgpt.app."""
