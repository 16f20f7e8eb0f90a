"""Measures XRunner's own layers. All ranks measure at once, since in a run they share the machine."""
