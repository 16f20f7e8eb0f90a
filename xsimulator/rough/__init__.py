"""Rough formulas: throughput, latency and memory of a configuration in microseconds, within about
15 % of a replay. The simulator, the scheduler and the application import them."""
