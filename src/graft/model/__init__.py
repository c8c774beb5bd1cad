"""The target model: its runner, KV cache, tree attention and sampler, and which models can be run."""

from graft.model.factory import target_for
from graft.model.kv_cache import KVCache, NoRoomError, PagePool, Row
from graft.model.loan import evaluating
from graft.model.runner import FirstLayersRunner, TargetRunner
from graft.model.step import Chunk
from graft.model.verified import VerifyOutput

__all__ = [
    "Chunk",
    "FirstLayersRunner",
    "KVCache",
    "NoRoomError",
    "PagePool",
    "Row",
    "TargetRunner",
    "VerifyOutput",
    "evaluating",
    "target_for",
]
