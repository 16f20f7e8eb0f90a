"""Use cases, one module per command or step of a run; for xgpt.cli and the library."""
