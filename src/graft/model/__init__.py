"""The target model: its runner, KV cache, tree attention and sampler, and which models can be run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graft.lazy import lazy_attributes

if TYPE_CHECKING:
    from graft.model.factory import target_for
    from graft.model.kv_cache import KVCache, NoRoomError, PagePool, Row
    from graft.model.overrides import evaluating
    from graft.model.runner import TargetRunner
    from graft.model.step import Chunk
    from graft.model.verified import VerifyOutput

__all__ = [
    "Chunk",
    "KVCache",
    "NoRoomError",
    "PagePool",
    "Row",
    "TargetRunner",
    "VerifyOutput",
    "evaluating",
    "target_for",
]

# Modules here that need no transformers (`sampler`, `verified`) are used without it by other engines.
_HOMES = {
    "Chunk": "graft.model.step",
    "KVCache": "graft.model.kv_cache",
    "NoRoomError": "graft.model.kv_cache",
    "PagePool": "graft.model.kv_cache",
    "Row": "graft.model.kv_cache",
    "TargetRunner": "graft.model.runner",
    "VerifyOutput": "graft.model.verified",
    "evaluating": "graft.model.overrides",
    "target_for": "graft.model.factory",
}

__getattr__ = lazy_attributes(__name__, _HOMES)
