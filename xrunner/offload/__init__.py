"""Weights, keys and values below the device: counted, copied ahead, and lent for computing."""
