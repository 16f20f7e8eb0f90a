"""Files of a run, free of torch; the ranks and the launcher (`xgpt.app`, `xgpt.run_folder`) use
them."""

