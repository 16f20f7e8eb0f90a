"""Heads, stages and KV caches that execute steps; `xrunner.rank`, backends and profiler import
it."""

