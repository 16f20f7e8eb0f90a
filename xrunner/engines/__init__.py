"""Other engines than the runner's own, under the same schedules, with the same result files."""
