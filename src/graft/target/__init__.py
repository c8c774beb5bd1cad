"""The target model's runner: its cache, its tree attention, and which models it can run."""

from graft.target.cache import CacheLimit, NoRoomError, TreeCache
from graft.target.loan import evaluating
from graft.target.runner import TargetRunner, target_for
from graft.target.verified import Verified

__all__ = ["CacheLimit", "NoRoomError", "TargetRunner", "TreeCache", "Verified", "evaluating", "target_for"]
