"""Operators of a layer, native or by torch, and sampling (docs/kernels.md); the models import
them."""

