"""Serving: a scheduler that decodes many requests together, an OpenAI-compatible API before it, and a page."""
