"""Proposers that run a draft model. Retrieval is in `tree/device`, its memory in `spec_decode/memory.py`."""
