"""Data types, units and errors of the field, without I/O of a job; for every package."""
