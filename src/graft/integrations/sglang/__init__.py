"""Graft inside SGLang: a plugin that keeps its EAGLE-3 head and grafts retrieved text onto its trees (docs/sglang.md).

`plugin` is what SGLang finds, `worker` the only module that imports SGLang; all else runs without it.
"""
