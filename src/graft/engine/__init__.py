"""The engine: the round of speculative decoding, the loop around it, and the scheduler of many requests."""

from graft.engine.answers import Choice, Generation, Stream
from graft.engine.engine import Engine, PrefillChunk
from graft.engine.prompts import Prompt

__all__ = ["Choice", "Engine", "Generation", "PrefillChunk", "Prompt", "Stream"]
