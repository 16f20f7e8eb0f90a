"""Reads the config.json and GGUF headers of models; for every package."""
