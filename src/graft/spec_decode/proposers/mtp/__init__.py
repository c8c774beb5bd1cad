"""MTP heads: the multi-token-prediction layer in a model's own checkpoint, and its drafter."""

from graft.spec_decode.proposers.mtp.checkpoint import has_head, load_head
from graft.spec_decode.proposers.mtp.head import MtpHead

__all__ = ["MtpHead", "has_head", "load_head"]
