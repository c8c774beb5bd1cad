"""Graft inside SGLang: a plugin that grafts retrieved text onto the trees of SGLang's EAGLE-3 head (docs/sglang.md).

SGLang finds `plugin`. Only `worker` and `hooks` import SGLang; the other modules run without it.
"""
