"""The engine: the round of speculative decoding, the loop around it, and the scheduler of many requests."""

from graft.engine.engine import Choice, Engine, Generation, Prompt, Reading, Stream

__all__ = ["Choice", "Engine", "Generation", "Prompt", "Reading", "Stream"]
