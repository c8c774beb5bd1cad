"""The target model's runner: its cache, its tree attention, and which models it can run."""

from graft.model.factory import target_for
from graft.model.kv_cache import CacheLimit, NoRoomError, TreeCache
from graft.model.loan import evaluating
from graft.model.runner import TargetRunner
from graft.model.verified import VerifyOutput

__all__ = ["CacheLimit", "NoRoomError", "TargetRunner", "TreeCache", "VerifyOutput", "evaluating", "target_for"]
