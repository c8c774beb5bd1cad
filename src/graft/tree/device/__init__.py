"""Candidates and trees on a GPU: the same trees as the C code of `graft.tree` makes, without the host.

Nothing synchronises, so all of it may run inside a CUDA graph. It does not depend on the engine. Importing the modules
of this folder needs Triton.
"""
