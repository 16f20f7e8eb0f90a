"""Engines that execute a schedule: our own and others', a row each (engine.py); xgpt imports the
rows."""
