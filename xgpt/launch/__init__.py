"""Starting ranks, and watching them until they end."""
