"""vLLM as an engine: its kernels and models, driven step by step by xgpt's batching rules."""
