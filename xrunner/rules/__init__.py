"""Batching rules: which requests are encoded (prefill) when, and when to decode. Free of torch and
MPI. XRunner drives the rules with real requests and XSimulator's replay with sampled ones; planner
and profiler may import them too (docs/running.md)."""
