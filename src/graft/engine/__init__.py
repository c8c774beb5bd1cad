"""The engine: the round of speculative decoding, the loop around it, and the scheduler of a server's requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graft.lazy import lazy_attributes

if TYPE_CHECKING:
    from graft.engine.answers import Choice, Generation, Stream
    from graft.engine.engine import Engine
    from graft.engine.prompts import Prompt
    from graft.engine.rounds import PrefillChunk

__all__ = ["Choice", "Engine", "Generation", "PrefillChunk", "Prompt", "Stream"]

# Lazy imports: `settings` is used before torch is imported.
_HOMES = {
    "Choice": "graft.engine.answers",
    "Engine": "graft.engine.engine",
    "Generation": "graft.engine.answers",
    "PrefillChunk": "graft.engine.rounds",
    "Prompt": "graft.engine.prompts",
    "Stream": "graft.engine.answers",
}

__getattr__ = lazy_attributes(__name__, _HOMES)
