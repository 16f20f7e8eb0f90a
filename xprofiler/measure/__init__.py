"""Measuring ranks, which time XRunner's own layers; started as processes, imported by nobody."""
