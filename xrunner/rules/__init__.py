"""Batching rules: which queries are encoded when, and when to decode. Free of torch and MPI.

One rule object per policy is driven by XRunner with real queries and by XSimulator's replay with
sampled ones, so that both make the same decisions (docs/running.md)."""
