"""Executes a Schedule on the real model (paper section 3). What the launcher and the ranks share is
here; `xgpt.app` and `xgpt.launch` import that. A head decides by a torch-free batching rule, stages
execute, and KV caches keep account."""
