"""Model families as plain layers: `qkv` before the attention kernel, `finish` after it.

Imported by the engine, and by XProfiler, which times these very layers. All decoder-only families
share one layer class, described by `xgpt.core.model.Decoder`. A family is a reader of its tensors'
names and a row of `stage_model.FAMILIES`."""
