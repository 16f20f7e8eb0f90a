"""Files of a model: found, checked, and read tensor by tensor; only the runner and xgpt.app import
it."""

