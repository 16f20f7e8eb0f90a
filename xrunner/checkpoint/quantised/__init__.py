"""Quantised weights: their formats, checked and widened; only xrunner.checkpoint imports it."""

