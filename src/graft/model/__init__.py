"""The target model: its runner, KV cache, tree attention and sampler, and which models can be run."""

from graft.model.factory import target_for
from graft.model.kv_cache import CacheLimit, NoRoomError, TreeCache
from graft.model.loan import evaluating
from graft.model.runner import TargetRunner
from graft.model.verified import VerifyOutput

__all__ = ["CacheLimit", "NoRoomError", "TargetRunner", "TreeCache", "VerifyOutput", "evaluating", "target_for"]
