"""Facts about this machine, and safe file writing; for every package."""
