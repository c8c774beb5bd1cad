"""The engine: the round of speculative decoding, the loop around it, and the scheduler of a server's requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graft.engine.answers import Choice, Generation, Stream
    from graft.engine.engine import Engine
    from graft.engine.prompts import Prompt
    from graft.engine.rounds import PrefillChunk

__all__ = ["Choice", "Engine", "Generation", "PrefillChunk", "Prompt", "Stream"]

# Lazy imports: `settings` is used before torch is imported.
_HOMES = {
    "Choice": "answers",
    "Engine": "engine",
    "Generation": "answers",
    "PrefillChunk": "rounds",
    "Prompt": "prompts",
    "Stream": "answers",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'graft.engine' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"graft.engine.{_HOMES[name]}"), name)
