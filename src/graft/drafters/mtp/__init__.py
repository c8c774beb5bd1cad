"""MTP heads: the multi-token-prediction layer in a model's own checkpoint, and its drafter."""

from graft.drafters.mtp.checkpoint import has_head, load_head
from graft.drafters.mtp.head import MtpHead

__all__ = ["MtpHead", "has_head", "load_head"]
