"""The `xgpt` command (click). Heavy imports wait until a command needs them."""
