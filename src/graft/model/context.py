"""The length of a model's context, by its config."""

from __future__ import annotations

from typing import Any


def max_positions(config: Any) -> int | None:
    """The model's context length; None: no limit.

    With longrope, the rotation of all tokens changes once a forward goes past the original context. A tree reaches
    further than plain decoding and could change the text there, so such a model's context ends before.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    limit: int | None = getattr(config, "max_position_embeddings", None)
    if rope.get("rope_type") == "longrope":
        original = rope.get("original_max_position_embeddings") or config.original_max_position_embeddings
        return int(original)
    return limit
