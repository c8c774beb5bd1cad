"""The target model: its runner, KV cache, tree attention and sampler, and which models can be run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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
    "Chunk": "step",
    "KVCache": "kv_cache",
    "NoRoomError": "kv_cache",
    "PagePool": "kv_cache",
    "Row": "kv_cache",
    "TargetRunner": "runner",
    "VerifyOutput": "verified",
    "evaluating": "overrides",
    "target_for": "factory",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'graft.model' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"graft.model.{_HOMES[name]}"), name)
