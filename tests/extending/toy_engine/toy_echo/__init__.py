"""An engine of a package of its own: it answers every query with its input, read backwards."""
