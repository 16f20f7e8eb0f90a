"""What executes a schedule: the runner's own engine and others', each one row (engine.py)."""
