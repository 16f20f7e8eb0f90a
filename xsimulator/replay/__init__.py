"""Replay: simulates a schedule step by step, by the runner's own rules. The scheduler, the report
and the application import it."""
