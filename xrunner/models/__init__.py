"""Model families as plain layers: `qkv` before the attention kernel, `finish` after it.

XProfiler times these very layers. A family is one module and one row of
`stage_model.LAYER_CLASSES`.
"""
