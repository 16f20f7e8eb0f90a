"""A policy of a package of its own: queries come in waves, each encoded in one step and decoded
until its last query is done."""
