"""Measures XRunner's own layers. All ranks measure at once, as in a run they share the machine."""
