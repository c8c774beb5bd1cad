"""The target model's runner: its cache, its tree attention, and which models it can run."""

from graft.target.cache import TreeCache
from graft.target.runner import TargetRunner, Verified, evaluating, target_for

__all__ = ["TargetRunner", "TreeCache", "Verified", "evaluating", "target_for"]
