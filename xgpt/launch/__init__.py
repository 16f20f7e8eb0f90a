"""Starts ranks, here, over hosts or within Slurm, and watches them; for xgpt.app and run_folder."""
