"""The `xgpt` command (click), imported by xgpt.__main__ alone; imports use cases when used."""
