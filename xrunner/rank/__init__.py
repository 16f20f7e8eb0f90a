"""The life of a rank, from start to end; only launchers start it (`python -m xrunner.rank...`)."""

