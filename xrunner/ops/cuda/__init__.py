"""CUDA operators and their launches; only xrunner.ops, the engine and `xgpt doctor` import them."""

