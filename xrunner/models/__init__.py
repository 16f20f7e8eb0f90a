"""Model families as plain layers: `qkv` before the attention kernel, `finish` after it.

XProfiler times these very layers. A decoder's layer is one class, told by
`xgpt.core.model.Decoder`; a family is a reader of its tensors' names, and a row of
`stage_model.FAMILIES`.
"""
