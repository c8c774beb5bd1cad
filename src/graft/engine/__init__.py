"""The engine: the round of speculative decoding, the loop around it, and the scheduler of a server's requests."""

from graft.engine.answers import Choice, Generation, Stream
from graft.engine.engine import Engine
from graft.engine.prompts import Prompt
from graft.engine.rounds import PrefillChunk

__all__ = ["Choice", "Engine", "Generation", "PrefillChunk", "Prompt", "Stream"]
